//! Latent attention: keys in two parts, the first of which is the values. Both bodies compute the same scenarios.

use super::{CAUSAL, Case, FULL, SPOILED, Scales, World, check};
use tilewright::{
    Dtype, HeadDim,
    attention::variant::{ExpressionVariant, Plain},
};
use tilewright_kernels::attention::{
    Body, KvLayout, UNLIMITED,
    body::{Bodies, mla_wgmma::MlaWgmmaConfig},
};

/// Heads of DeepSeek.
const WHOLE_HEADS: HeadDim = HeadDim { qk: 576, vo: 512 };

/// A body, and the sizes that reach its paths.
struct LatentBody {
    body: Body,
    page_size: usize,
    /// Keys added to requests, so that both warpgroups have several KV tiles.
    more: usize,
    /// Split lengths: even and odd numbers of KV tiles for `mla_wgmma`.
    pieces: [usize; 2],
    /// Heads of more than one tile of rows, if simulating them is fast.
    long_heads: usize,
    /// Page sizes, and whether the cache is HND.
    pages: &'static [(usize, bool)],
}

const MLA: LatentBody = LatentBody {
    body: Body::Mla,
    page_size: 16,
    more: 0,
    pieces: [64, 64],
    long_heads: 16,
    pages: &[(1, false), (5, true), (16, true), (64, false)],
};

const MLA_WGMMA: LatentBody = LatentBody {
    body: Body::MlaWgmma,
    page_size: 64,
    more: 200,
    pieces: [128, 192],
    long_heads: 128,
    pages: &[(1, false), (2, true), (5, true), (8, false), (16, true), (24, false), (32, true), (128, false)],
};

impl LatentBody {
    /// Small heads, to keep tests short.
    fn case(&self, heads: usize, lengths: &[(usize, usize)]) -> Case {
        Case::new(128, (heads, 1), lengths).with(|case| {
            (case.body, case.page_size) = (self.body, self.page_size);
            case.dim = HeadDim { qk: 192, vo: 128 };
        })
    }
}

/// One test per scenario and body.
macro_rules! scenarios {
    ($($name:ident)+) => {
        mod mma {
            $(#[test] fn $name() { super::$name(&super::MLA); })+
        }

        mod wgmma {
            $(#[test] fn $name() { super::$name(&super::MLA_WGMMA); })+
        }
    };
}

scenarios! {
    decode_of_uneven_requests
    logits_that_grow
    whole_heads
    groups
    prefill_append_and_mixed_batches
    pages_and_layouts
    windows_and_mask_bits
    levels_of_a_cascade_and_long_splits
    f16
    values_that_are_not_finite
}

fn decode_of_uneven_requests(body: &LatentBody) {
    let more = body.more;
    check(&body.case(16, &[(1, 70 + more), (1, 3), (1, 0), (1, 33 + more)]).with(|case| case.seeds = 3));
    let case = body.case(128, &[(1, 40 + more / 2), (1, 0), (1, 65)]);
    check(&case.with(|case| (case.workers, case.seeds) = (3, 2)));
    let case = body.case(100, &[(1, 320 + more), (1, 128)]);
    check(&case.with(|case| (case.workers, case.seeds) = (1, 1 + more as u64 / 100)));
}

fn logits_that_grow(body: &LatentBody) {
    for growth in [4.0, 40.0] {
        let case = body.case(20, &[(1, 300 + body.more), (3, 150 + body.more)]);
        check(&case.with(|case| (case.growth, case.seeds) = (growth, 2)));
    }
}

fn whole_heads(body: &LatentBody) {
    for heads in [16, 128] {
        let case = body.case(heads, &[(1, 100 + body.more)]).with(|case| case.dim = WHOLE_HEADS);
        check(&case.with(|case| (case.piece, case.workers) = (body.pieces[1], 2)));
    }
    // all lanes of a warp have a state of the merge
    let long = body.case(1, &[(1, 64 * 33 + 3)]).with(|case| case.dim = WHOLE_HEADS);
    check(&long.with(|case| (case.piece, case.workers) = (64, 7)));
}

fn groups(body: &LatentBody) {
    for heads in [1, 15, 17, 33, 64, 65] {
        let case = body.case(heads, &[(1, 40 + body.more / 2), (2, 70 + body.more)]);
        check(&case.with(|case| case.piece = body.pieces[1]));
    }
}

fn prefill_append_and_mixed_batches(body: &LatentBody) {
    let lengths = [(5, 90 + body.more), (1, 130), (40, 40), (3, 3), (0, 7), (12, 5)];
    let split = body.case(4, &lengths);
    check(&split.with(|case| (case.piece, case.workers, case.seeds) = (body.pieces[0], 5, 2)));
    check(&body.case(16, &lengths).with(|case| case.mask = FULL));
    // no work item: none may be loaded
    check(&body.case(4, &[(0, 7)]));
}

fn pages_and_layouts(body: &LatentBody) {
    let lengths = [(1, 100 + body.more), (10, 30 + body.more / 2)];
    for &(page_size, hnd) in body.pages {
        check(&body.case(4, &lengths).with(|case| (case.page_size, case.hnd) = (page_size, hnd)));
    }
    check(&body.case(4, &lengths).with(|case| case.layout = KvLayout::Ragged));
    for (mask, block) in [(FULL, 4), (CAUSAL, 4), ((30, 0), 16)] {
        let case = body.case(2, &[(1, 80 + body.more / 2), (30, 70)]);
        check(&case.with(|case| (case.layout, case.page_size, case.mask) = (KvLayout::Blocks, block, mask)));
    }
}

fn windows_and_mask_bits(body: &LatentBody) {
    let more = body.more;
    for mask in [(20, 0), (3, 5), (UNLIMITED, 9), (0, 0), (70 + more as u32, 0)] {
        let case = body.case(2, &[(1, 150 + more), (40, 90 + more), (10, 4)]);
        check(&case.with(|case| (case.mask, case.piece) = (mask, body.pieces[0])));
    }
    for (columns, mask) in [(7, FULL), (40, CAUSAL), (1000, FULL)] {
        let case = body.case(2, &[(1, 80 + more / 2), (21, 90 + more), (5, 5)]);
        check(&case.with(|case| (case.bits, case.mask, case.piece) = (Some(columns), mask, body.pieces[1])));
    }
}

fn levels_of_a_cascade_and_long_splits(body: &LatentBody) {
    let lengths = [(1, 100), (3, 90), (1, 128), (20, 100)].map(|(qo, kv)| (qo, kv + body.more));
    let levels = body.case(4, &lengths).with(|case| (case.workers, case.seeds) = (3, 2));
    let levels = levels.with(|case| (case.prefix, case.piece) = (70 + body.more, body.pieces[0]));
    check(&levels);
    // rows see different parts of the level
    check(&levels.with(|case| (case.mask, case.seeds) = ((40, 0), 1)));
    // one item of the level is a source of more merges than are fetched at once
    let shared = body.case(1, &[(1, 90 + body.more); 12]).with(|case| case.workers = 3);
    let shared = shared.with(|case| (case.prefix, case.seeds) = (70 + body.more, 2));
    check(&shared.with(|case| case.mask = (40, 0)));
    let long = body.case(body.long_heads, &[(1, 64 * 20 + 3)]);
    check(&long.with(|case| (case.piece, case.workers, case.seeds) = (body.pieces[1], 7, 2)));
    // merges of fewer sources than a warp has lanes, of more, and of twice as many per warp; four warps divide those of `wgmma`
    let most = if body.body == Body::MlaWgmma { 4 * 64 + 1 } else { 2 * 64 + 1 };
    let sources = body.case(body.long_heads.min(64), &[(1, 64 * 9), (1, 64 * most)]);
    check(&sources.with(|case| (case.piece, case.workers) = (64, 7)));
    for (heads, lengths) in [(20, [(1, 64), (3, 64 * 33 + 3)]), (1, [(1, 64), (1, 64 * 65)])] {
        check(&body.case(heads, &lengths).with(|case| (case.piece, case.workers) = (64, 7)));
    }
}

fn f16(body: &LatentBody) {
    let f16 = |case: &mut Case| (case.qo, case.kv) = (Dtype::F16, Dtype::F16);
    check(&body.case(8, &[(1, 90 + body.more), (33, 70)]).with(f16));
}

fn values_that_are_not_finite(body: &LatentBody) {
    for (dtype, heads) in [(Dtype::Bf16, 2), (Dtype::F16, 16)] {
        let case = body.case(heads, &[(1, 70 + body.more), (40, 90 + body.more), (5, 12)]);
        let case = case.with(|case| (case.qo, case.kv, case.spoiled) = (dtype, dtype, SPOILED.to_vec()));
        check(&case.clone().with(|case| case.mask = (30, 0)));
        check(&case.clone().with(|case| case.seeds = 2));
        check(&case.with(|case| (case.bits, case.seeds) = (Some(40), 2)));
    }
}
#[test]
fn every_size_of_shared_memory() {
    for (arch, groups) in [(80, 4), (86, 2), (120, 2)] {
        let case = MLA.case(40, &[(1, 90), (3, 150)]).with(|case| case.arch = arch);
        check(&case);
        let whole = MLA.case(33, &[(2, 100)]).with(|case| (case.dim, case.arch) = (WHOLE_HEADS, arch));
        assert_eq!(whole.latent_config(Bodies::Both).q_rows(), 16 * groups);
        check(&whole);
    }
}

/// Items of few rows have a body of their own, and a ring of more stages.
#[test]
fn few_rows() {
    let case = MLA.case(4, &[(1, 70), (4, 90), (2, 12), (1, 340)]);
    check(&case.clone().with(|case| case.layout = KvLayout::Ragged));
    check(&case.with(|case| (case.bits, case.spoiled) = (Some(40), SPOILED.to_vec())));
}

/// Each is alone in its tile, which its row sees in part: all words of a chunk, in both halves of the elements.
#[test]
fn single_values_that_are_not_finite() {
    let keys = [41, 43, 45, 47, 105, 107, 109, 111];
    let spoiled = keys.into_iter().enumerate().map(|(request, key)| (request, key, f64::NAN)).collect();
    let case = MLA_WGMMA.case(2, &keys.map(|key| (1, if key < 64 { 64 } else { 128 })));
    check(&case.with(|case| (case.mask, case.spoiled) = ((5, 0), spoiled)));
    // rows with a logit of -inf have one NaN
    let whole = MLA_WGMMA.case(16, &[(3, 504)]).with(|case| case.dim = WHOLE_HEADS);
    check(&whole.with(|case| (case.mask, case.spoiled) = ((20, 0), vec![(0, 500, f64::INFINITY)])));
}

#[test]
fn head_dims_of_wgmma() {
    for (qk, vo) in [(320, 256), (512, 384), (256, 128)] {
        check(&MLA_WGMMA.case(20, &[(1, 260), (3, 70)]).with(|case| case.dim = HeadDim { qk, vo }));
    }
}

#[test]
fn small_pages_of_whole_heads() {
    for page_size in [1, 16] {
        let case = MLA_WGMMA.case(70, &[(1, 300)]).with(|case| case.dim = WHOLE_HEADS);
        check(&case.with(|case| case.page_size = page_size));
    }
}

/// Caches of 8 bits, which `mla_wgmma` widens.
#[test]
fn caches_of_bytes() {
    use Dtype::{Bf16, E4m3, E5m2, F16, I8};
    let of = |(qo, kv), scales, heads, lengths: &[(usize, usize)]| {
        MLA_WGMMA.case(heads, lengths).with(|case| (case.qo, case.kv, case.scales) = (qo, kv, scales))
    };
    let lengths = [(1, 300), (3, 3), (40, 210), (0, 7), (1, 64)];
    for (number, dtypes) in
        [(Bf16, E4m3), (F16, E4m3), (Bf16, E5m2), (F16, I8), (Bf16, I8)].into_iter().enumerate()
    {
        let scales = [Scales::Tensor, Scales::Head][number % 2];
        let case = of(dtypes, scales, 2, &lengths).with(|case| case.page_size = [1, 5, 16, 64, 128][number]);
        check(&case.clone().with(|case| (case.piece, case.workers, case.seeds) = (192, 3, 2)));
        check(&case.with(|case| (case.mask, case.hnd) = ((70, 0), true)));
    }
    let e4m3 = |heads, lengths: &[_]| of((Bf16, E4m3), Scales::Tensor, heads, lengths);
    // the last request ends in its first tile, and the tensor with it
    check(&e4m3(4, &[(1, 300), (10, 130), (1, 20)]).with(|case| case.layout = KvLayout::Ragged));
    let blocks = e4m3(2, &[(1, 180), (30, 70)]);
    check(&blocks.with(|case| (case.layout, case.page_size, case.mask) = (KvLayout::Blocks, 16, FULL)));
    check(&e4m3(2, &[(1, 280), (21, 290), (5, 5)]).with(|case| (case.bits, case.piece) = (Some(40), 128)));
    // lanes copy other chunks than they widen, before the queries of a second item, too
    for (heads, workers) in [(16, 1), (70, 2)] {
        let whole = e4m3(heads, &[(1, 300)]).with(|case| (case.dim, case.piece) = (WHOLE_HEADS, 192));
        check(&whole.with(|case| case.workers = workers));
    }
    for (mask, bits) in [((30, 0), None), (CAUSAL, Some(40))] {
        let case = e4m3(16, &[(1, 270), (40, 290), (5, 12)]).with(|case| case.spoiled = SPOILED.to_vec());
        check(&case.with(|case| (case.mask, case.bits) = (mask, bits)));
    }
}

#[test]
fn unsupported_configs_report_all_reasons() {
    let head_dim = HeadDim { qk: 592, vo: 560 };
    let config = MlaWgmmaConfig { dtype: Dtype::F32, kv: Dtype::Bf16, out: Dtype::F32, head_dim, heads: 200 };
    assert_eq!(
        config.unsupported(),
        [
            "queries are f32, expected f16 or bf16",
            "the cache is bf16, expected f32 as queries, or 8 bits",
            "head_dim ckv = 560, expected a multiple of 128 in 128..=512",
            "head_dim kpe = 32, expected a multiple of 64 above 0",
            "there are 200 query heads, the most is 128",
        ]
    );
    let long = MlaWgmmaConfig {
        dtype: Dtype::Bf16,
        kv: Dtype::Bf16,
        out: Dtype::Bf16,
        head_dim: HeadDim { qk: 640, vo: 512 },
        heads: 16,
    };
    assert_eq!(long.unsupported(), ["head_dim = 640 is too long for two KV tiles in shared memory"]);
}

#[test]
fn latent_outputs_of_e4m3() {
    for body in [MLA, MLA_WGMMA] {
        let case = body.case(16, &[(1, 90), (3, 200), (2, 40)]).with(|case| case.fp8_outputs = true);
        check(&case);
        let [piece, _] = body.pieces;
        check(&case.with(|case| (case.piece, case.workers, case.heads, case.seeds) = (piece, 4, (40, 1), 2)));
    }
    // a merge that is left to the kernel of large merges
    let large = MLA_WGMMA.case(64, &[(1, 64 * 9)]).with(|case| case.fp8_outputs = true);
    check(&large.with(|case| (case.piece, case.workers) = (64, 7)));
}

/// Merges of two states, by the last CTA to claim them: the bits do not depend on the order of claims.
#[test]
fn pairs_of_states() {
    let plain = ExpressionVariant::of(&Plain).expect("it does nothing");
    // CTAs end at about the same time, as pieces are equally long; the last of three requests has a shorter one
    for (heads, qo, seeds) in [(64, 1, 16), (9, 3, 2), (100, 1, 4)] {
        let case = MLA_WGMMA.case(heads, &[(qo, 384), (qo, 384), (1, 290)]);
        let case = case.with(|case| (case.piece, case.workers) = (192, 6));
        check(&case);
        let world = World::new(&case, &plain);
        assert!(world.schedule().merges.iter().filter(|merge| merge.is_pair == 1).count() > 1);
        for (items, kernel) in case.kernels(&plain) {
            let kernel = kernel.expect("a supported configuration");
            let bits = |seed| world.run(items, &kernel, seed).expect("no fault").o;
            assert!((1..seeds).all(|seed| bits(seed) == bits(0)), "{heads} heads");
        }
    }
}
