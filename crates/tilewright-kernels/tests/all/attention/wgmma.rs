//! The `wgmma` body: head dims, layouts, masks, splits, and the drawing of runs. Its hooks are tested with those of all bodies.

use super::{CAUSAL, Case, FULL, check};
use tilewright::{Dtype, HeadDim};
use tilewright_kernels::attention::{Body, KvLayout, UNLIMITED, body::wgmma::WgmmaConfig};

fn case(dim: usize, heads: (usize, usize), lengths: &[(usize, usize)]) -> Case {
    Case::new(dim, heads, lengths).with(|case| case.body = Body::Wgmma)
}

#[test]
fn causal_prefill_and_append() {
    let lengths = [(70, 300), (20, 20), (0, 7), (30, 10), (3, 400)];
    check(&case(64, (4, 2), &lengths).with(|case| case.seeds = 3));
    check(&case(128, (4, 1), &lengths).with(|case| (case.mask, case.workers) = (FULL, 3)));
}

#[test]
fn head_dims() {
    for (qk, vo) in [(48, 48), (96, 96), (128, 128), (192, 128), (64, 128), (256, 256)] {
        let case = case(qk, (1, 1), &[(150, 290)]);
        check(&case.with(|case| case.dim = HeadDim { qk, vo }));
    }
}

#[test]
fn groups() {
    for group in [1, 5, 8, 71, 128] {
        check(&case(64, (group, 1), &[(1, 40), (3, 170)]));
    }
}

#[test]
fn pages_and_layouts() {
    for (page_size, hnd) in [
        (1, false),
        (2, true),
        (5, false),
        (12, true),
        (8, false),
        (16, true),
        (24, false),
        (64, true),
        (256, false),
    ] {
        let case = case(64, (4, 2), &[(40, 300), (10, 30)]);
        check(&case.with(|case| (case.page_size, case.hnd) = (page_size, hnd)));
    }
    for (dim, page_size) in [(128, 1), (128, 4), (256, 1), (256, 2)] {
        check(&case(dim, (4, 2), &[(40, 300), (10, 30)]).with(|case| case.page_size = page_size));
    }
    for hnd in [false, true] {
        let case = case(64, (4, 2), &[(40, 300), (10, 30)]).with(|case| case.layout = KvLayout::Ragged);
        check(&case.with(|case| case.hnd = hnd));
    }
}

#[test]
fn f16_and_logits_that_grow() {
    for growth in [1.0, 4.0, 40.0] {
        let case = case(64, (2, 1), &[(90, 600)]).with(|case| case.growth = growth);
        check(&case.clone().with(|case| (case.qo, case.kv) = (Dtype::F16, Dtype::F16)));
        check(&case);
    }
}

#[test]
fn windows() {
    for mask in [(20, 0), (150, UNLIMITED), (3, 5), (UNLIMITED, 9), (0, 0), (260, 0)] {
        check(&case(64, (2, 1), &[(100, 500), (10, 4)]).with(|case| case.mask = mask));
    }
}

#[test]
fn mask_bits() {
    for (columns, mask) in [(7, FULL), (140, CAUSAL), (1000, FULL)] {
        let case = case(64, (2, 1), &[(21, 290), (5, 5)]);
        check(&case.with(|case| (case.bits, case.mask) = (Some(columns), mask)));
    }
}

/// More tiles than stages, in boxes of one warp, boxes of several warps, and rows.
#[test]
fn mask_bits_of_many_tiles() {
    for (columns, page_size) in [(1000, 128), (300, 16), (1000, 4)] {
        let case = case(128, (2, 1), &[(40, 900), (30, 500)]).with(|case| case.layout = KvLayout::Paged);
        check(&case.with(|case| {
            (case.bits, case.page_size, case.workers, case.seeds) = (Some(columns), page_size, 2, 3);
        }));
    }
}

#[test]
fn blocks() {
    for (mask, block) in [(FULL, 4), (CAUSAL, 1), ((30, 0), 16), (FULL, 64)] {
        let case = case(64, (2, 1), &[(40, 300), (30, 70)]);
        check(&case.with(|case| (case.layout, case.page_size, case.mask) = (KvLayout::Blocks, block, mask)));
    }
}

#[test]
fn splits_and_levels() {
    // pieces are whole KV tiles
    for (dim, piece) in [(64, 192), (128, 128)] {
        let split = case(dim, (4, 1), &[(20, 5 * piece + 3)]);
        check(&split.with(|case| (case.piece, case.workers, case.seeds) = (piece, 4, 4)));
    }
    let level = case(64, (4, 2), &[(1, 300), (3, 290), (20, 300)]);
    for piece in [192, 1152] {
        let case = level.clone().with(|case| (case.prefix, case.piece, case.workers) = (270, piece, 3));
        check(&case.clone().with(|case| case.mask = (40, 0)));
        check(&case);
    }
    // rows of two requests, whose own keys have mask bits
    let masked =
        case(64, (1, 1), &[(3, 290), (2, 300)]).with(|case| (case.prefix, case.bits) = (270, Some(20)));
    check(&masked);
    // all lanes of a warp have a state of the merge
    check(&case(64, (1, 1), &[(1, 192 * 33)]).with(|case| (case.piece, case.workers) = (192, 2)));
}

#[test]
fn more_ctas_than_runs_and_fewer() {
    for workers in [1, 2, 7, 50] {
        check(&case(64, (2, 2), &[(300, 300)]).with(|case| (case.workers, case.seeds) = (workers, 4)));
    }
}

#[test]
fn two_launches_share_the_runs() {
    for (workers, second) in [(1, 1), (2, 3), (5, 40), (50, 2)] {
        let case = case(64, (2, 2), &[(300, 300), (40, 400)]).with(|case| case.seeds = 4);
        check(&case.with(|case| (case.workers, case.second, case.piece) = (workers, second, 192)));
    }
}

#[test]
fn values_that_are_not_finite() {
    let spoiled = [
        (0, 40, f64::INFINITY),
        (0, 299, f64::NAN),
        (1, 25, f64::NAN),
        (1, 41, f64::NEG_INFINITY),
        (1, 60, f64::INFINITY),
        (1, 64, f64::NEG_INFINITY),
    ];
    for dim in [64, 256] {
        let case = case(dim, (2, 1), &[(100, 300), (40, 90)]).with(|case| case.spoiled = spoiled.to_vec());
        check(&case.clone().with(|case| (case.mask, case.seeds) = ((30, 0), 2)));
        check(&case.clone().with(|case| (case.piece, case.workers, case.seeds) = (192, 3, 4)));
        check(&case.clone().with(|case| (case.workers, case.seeds) = (1, 1)));
        check(&case.with(|case| (case.bits, case.seeds) = (Some(40), 2)));
    }
    // all elements, in masked tiles that others follow, and in items of one tile
    let of_key = |key: usize| (0, key, if key & 4 == 0 { f64::INFINITY } else { f64::NEG_INFINITY });
    let case = case(256, (1, 1), &[(20, 450)]).with(|case| case.spoiled = (128..384).map(of_key).collect());
    let case = case.with(|case| (case.mask, case.bits) = (FULL, Some(450)));
    check(&case);
    check(&case.with(|case| case.piece = 64));
}

#[test]
fn producer_warps_without_boxes_may_be_late() {
    for dim in [128, 256] {
        let case = case(dim, (2, 1), &[(260, 1500)]).with(|case| case.layout = KvLayout::Ragged);
        check(&case.with(|case| (case.workers, case.seeds) = (1, 4)));
    }
}

/// Two CTAs execute each run together: full and partial halves of its rows, all sources of boxes, masks, and non-finite values, which
/// both CTAs process again.
#[test]
fn pairs_of_ctas() {
    let pairs = |case: Case| check(&case.with(|case| case.pairs = true));
    let lengths = [(130, 300), (20, 20), (65, 200), (3, 400)];
    pairs(case(64, (4, 2), &lengths).with(|case| case.seeds = 3));
    for workers in [1, 3] {
        pairs(case(128, (4, 1), &lengths).with(|case| (case.mask, case.workers) = (FULL, workers)));
    }
    for (dim, group, page_size) in [(HeadDim { qk: 192, vo: 128 }, 1, 64), (HeadDim::same(256), 3, 8)] {
        let case = case(128, (group, 1), &[(300, 500)]);
        pairs(case.with(|case| (case.dim, case.page_size, case.seeds) = (dim, page_size, 4)));
    }
    let ragged = case(128, (2, 1), &[(260, 700), (40, 90)]).with(|case| case.layout = KvLayout::Ragged);
    pairs(ragged.with(|case| (case.mask, case.seeds) = ((150, 0), 2)));
    let spoiled = case(64, (2, 1), &[(140, 300), (30, 80)]);
    let infinite = [(0, 5, f64::INFINITY), (0, 250, f64::NAN), (1, 70, f64::NEG_INFINITY)];
    pairs(spoiled.with(|case| (case.spoiled, case.seeds) = (infinite.to_vec(), 2)));
}

#[test]
fn unsupported_configs_report_all_reasons() {
    let dtype = Dtype::Bf16;
    let config = WgmmaConfig {
        q: dtype,
        o: dtype,
        out: dtype,
        kv: dtype,
        head_dim: HeadDim { qk: 80, vo: 264 },
        any_mask: false,
        pairs: false,
    };
    let rule = "expected a multiple of 8 up to 256 that fills three quarters of tiles of 64";
    assert_eq!(
        config.unsupported(),
        [format!("head_dim qk = 80, {rule}"), format!("head_dim vo = 264, {rule}")]
    );
    let bytes = WgmmaConfig { kv: Dtype::E4m3, head_dim: HeadDim::same(256), ..config };
    let reason = "head_dim (256, 256) with a cache of e4m3, expected multiples of 16 up to 128";
    assert_eq!(bytes.unsupported(), [reason]);
    let other = WgmmaConfig { kv: Dtype::F16, head_dim: HeadDim::same(64), ..config };
    assert_eq!(other.unsupported(), ["the cache is f16, expected bf16 or 8 bits"]);
}
