//! The `mla_wgmma` body: rows, pages, masks, splits, and non-finite values.

use super::{
    case::{CAUSAL, Case, FULL},
    judge::check,
};
use tilewright::{Dtype, HeadDim};
use tilewright_kernels::attention::{
    body::mla_wgmma::MlaWgmmaConfig,
    params::{KvLayout, UNLIMITED},
};

/// Small heads, to keep tests short.
fn case(heads: usize, lengths: &[(usize, usize)]) -> Case {
    Case::new(128, (heads, 1), lengths).with(|case| {
        (case.latent, case.wgmma) = (true, true);
        (case.dim, case.page_size) = (HeadDim { qk: 192, vo: 128 }, 64);
    })
}

#[test]
fn decode_of_uneven_requests() {
    check(&case(16, &[(1, 256), (1, 3), (1, 0), (1, 200)]).with(|case| case.seeds = 3));
    check(&case(128, &[(1, 140), (1, 0), (1, 65)]).with(|case| (case.workers, case.seeds) = (3, 2)));
    check(&case(100, &[(1, 520), (1, 128)]).with(|case| (case.workers, case.seeds) = (1, 3)));
}

#[test]
fn whole_heads() {
    for heads in [16, 128] {
        let case = case(heads, &[(1, 330)]).with(|case| case.dim = HeadDim { qk: 576, vo: 512 });
        check(&case.with(|case| (case.piece, case.workers) = (192, 2)));
    }
}

#[test]
fn head_dims() {
    for (qk, vo) in [(320, 256), (512, 384), (256, 128)] {
        check(&case(20, &[(1, 260), (3, 70)]).with(|case| case.dim = HeadDim { qk, vo }));
    }
}

#[test]
fn logits_that_grow() {
    for growth in [4.0, 40.0] {
        check(&case(20, &[(1, 512), (3, 300)]).with(|case| (case.growth, case.seeds) = (growth, 2)));
    }
}

#[test]
fn groups() {
    for heads in [1, 15, 17, 33, 64, 65] {
        check(&case(heads, &[(1, 140), (2, 270)]).with(|case| case.piece = 192));
    }
}

#[test]
fn prefill_append_and_mixed_batches() {
    let lengths = [(5, 290), (1, 130), (40, 40), (3, 3), (0, 7), (12, 5)];
    check(&case(4, &lengths).with(|case| (case.piece, case.workers, case.seeds) = (128, 5, 2)));
    check(&case(16, &lengths).with(|case| case.mask = FULL));
}

#[test]
fn pages_and_layouts() {
    for (page_size, hnd) in
        [(1, false), (2, true), (5, true), (8, false), (16, true), (24, false), (32, true), (128, false)]
    {
        let case = case(4, &[(1, 300), (10, 130)]);
        check(&case.with(|case| (case.page_size, case.hnd) = (page_size, hnd)));
    }
    for page_size in [1, 16] {
        let case = case(70, &[(1, 300)]).with(|case| case.dim = HeadDim { qk: 576, vo: 512 });
        check(&case.with(|case| case.page_size = page_size));
    }
    check(&case(4, &[(1, 300), (10, 30)]).with(|case| case.layout = KvLayout::Ragged));
    for (mask, block) in [(FULL, 4), (CAUSAL, 4), ((30, 0), 16)] {
        let case = case(2, &[(1, 180), (30, 70)]);
        check(&case.with(|case| (case.layout, case.page_size, case.mask) = (KvLayout::Blocks, block, mask)));
    }
}

#[test]
fn windows_and_mask_bits() {
    for mask in [(20, 0), (3, 5), (UNLIMITED, 9), (0, 0), (270, 0)] {
        let case = case(2, &[(1, 350), (40, 290), (10, 4)]).with(|case| case.mask = mask);
        check(&case.with(|case| case.piece = 128));
    }
    for (columns, mask) in [(7, FULL), (40, CAUSAL), (1000, FULL)] {
        let case = case(2, &[(1, 180), (21, 290), (5, 5)]);
        check(&case.with(|case| (case.bits, case.mask, case.piece) = (Some(columns), mask, 192)));
    }
}

#[test]
fn levels_of_a_cascade_and_long_splits() {
    let levels = case(4, &[(1, 300), (3, 290), (1, 328), (20, 300)]);
    check(&levels.with(|case| (case.prefix, case.piece, case.workers, case.seeds) = (270, 128, 3, 2)));
    let long = case(128, &[(1, 64 * 20 + 3)]);
    check(&long.with(|case| (case.piece, case.workers, case.seeds) = (192, 4, 2)));
}

#[test]
fn f16() {
    let f16 = |case: &mut Case| (case.qo, case.kv) = (Dtype::F16, Dtype::F16);
    check(&case(8, &[(1, 290), (33, 70)]).with(f16));
}

#[test]
fn values_that_are_not_finite() {
    let spoiled = [
        (0, 3, f64::NAN),
        (0, 40, f64::INFINITY),
        (1, 25, f64::NAN),
        (1, 41, f64::NEG_INFINITY),
        (1, 60, f64::INFINITY),
        (1, 64, f64::NEG_INFINITY),
        (2, 10, f64::NAN),
    ];
    for (dtype, heads) in [(Dtype::Bf16, 2), (Dtype::F16, 16)] {
        let case = case(heads, &[(1, 270), (40, 290), (5, 12)]);
        let case = case.with(|case| (case.qo, case.kv, case.spoiled) = (dtype, dtype, spoiled.to_vec()));
        check(&case.clone().with(|case| case.mask = (30, 0)));
        check(&case.clone().with(|case| (case.mask, case.seeds) = (CAUSAL, 2)));
        check(&case.with(|case| (case.bits, case.seeds) = (Some(40), 2)));
    }
}

#[test]
fn unsupported_configs_report_all_reasons() {
    let head_dim = HeadDim { qk: 592, vo: 560 };
    let config = MlaWgmmaConfig { dtype: Dtype::F32, head_dim, heads: 200 };
    assert_eq!(
        config.unsupported(),
        [
            "queries and the cache are f32, expected f16 or bf16",
            "head_dim ckv = 560, expected a multiple of 128 in 128..=512",
            "head_dim kpe = 32, expected a multiple of 64 above 0",
            "there are 200 query heads, the most is 128",
        ]
    );
    let long = MlaWgmmaConfig { dtype: Dtype::Bf16, head_dim: HeadDim { qk: 640, vo: 512 }, heads: 16 };
    assert_eq!(long.unsupported(), ["head_dim = 640 is too long for two KV tiles in shared memory"]);
}
