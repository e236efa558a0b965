//! Decode, append, prefill and mixed batches; groups, head dims, pages, layouts, masks; split keys and cascades.

use super::{CAUSAL, Case, FULL, SPOILED, check};
use tilewright::{Dtype, HeadDim};
use tilewright_kernels::attention::{Body, KvLayout, UNLIMITED};

#[test]
fn decode_of_uneven_requests() {
    check(&Case::new(64, (4, 2), &[(1, 70), (1, 3), (1, 0), (1, 33)]).with(|case| case.seeds = 4));
}

#[test]
fn prefill_of_a_few_requests() {
    let case = Case::new(64, (2, 1), &[(70, 100), (20, 20), (0, 7), (30, 10)]);
    check(&case.clone().with(|case| case.seeds = 3));
    check(&case.with(|case| case.mask = FULL));
}

#[test]
fn append_and_mixed_batches() {
    let lengths = [(5, 90), (1, 130), (40, 40), (3, 3)];
    for piece in [64, 128] {
        let case = Case::new(32, (3, 1), &lengths).with(|case| (case.piece, case.workers) = (piece, 5));
        check(&case.with(|case| case.seeds = 3));
    }
}

#[test]
fn groups() {
    for group in [1, 4, 5, 8, 16, 17, 71, 130] {
        check(&Case::new(32, (group, 1), &[(1, 40), (2, 70)]).with(|case| case.piece = 64));
    }
}

#[test]
fn head_dims() {
    let dims =
        [(16, 16), (40, 40), (80, 80), (96, 96), (128, 128), (192, 128), (64, 128), (256, 256), (24, 104)];
    for (qk, vo) in dims {
        let lengths = [(1, 50), (20, 70)];
        let case = Case::new(qk, (1, 1), &lengths);
        check(&case.with(|case| (case.dim, case.growth) = (HeadDim { qk, vo }, 4.0)));
    }
}

#[test]
fn pages_and_layouts() {
    for (page_size, hnd) in [(1, false), (5, true), (16, true), (64, false)] {
        let case = Case::new(32, (4, 2), &[(1, 100), (10, 30)]);
        check(&case.with(|case| (case.page_size, case.hnd) = (page_size, hnd)));
    }
    for hnd in [false, true] {
        let case = Case::new(32, (4, 2), &[(1, 100), (10, 30)]).with(|case| case.layout = KvLayout::Ragged);
        check(&case.with(|case| case.hnd = hnd));
    }
}

/// Units of a ring are as large as the larger of keys and values, of which there are as many boxes.
#[test]
fn boxes_of_two_sizes() {
    for (qk, vo) in [(64, 128), (128, 64)] {
        check(&Case::new(qk, (4, 2), &[(1, 700), (2, 300)]).with(|case| case.dim = HeadDim { qk, vo }));
    }
}

/// On Hopper, TMA loads the keys of few rows one by one: several stages per warp, and the last one is incomplete.
#[test]
fn pages_of_one_token() {
    for (hnd, spoiled, dtype) in [(false, &SPOILED[..], Dtype::Bf16), (true, &[], Dtype::F16)] {
        let case = Case::new(128, (4, 2), &[(1, 430), (3, 301), (0, 5), (2, 129)]);
        let case = case.with(|case| (case.page_size, case.growth, case.hnd) = (1, 4.0, hnd));
        let case = case.with(|case| (case.qo, case.kv, case.spoiled) = (dtype, dtype, spoiled.to_vec()));
        check(&case.clone().with(|case| (case.piece, case.mask) = (64, (250, 0))));
        check(&case);
    }
}

#[test]
fn f16() {
    let f16 = |case: &mut Case| (case.qo, case.kv) = (Dtype::F16, Dtype::F16);
    check(&Case::new(64, (2, 1), &[(1, 90), (33, 70)]).with(f16));
}

/// Only some rows of a warp raise their running maximum in later tiles.
#[test]
fn logits_that_grow() {
    for (growth, dtype) in [4.0, 40.0].into_iter().flat_map(|by| [(by, Dtype::F16), (by, Dtype::Bf16)]) {
        let case = Case::new(64, (4, 2), &[(1, 300), (40, 270), (0, 5), (3, 410)]);
        check(&case.with(|case| (case.qo, case.kv, case.growth) = (dtype, dtype, growth)));
    }
}

#[test]
fn every_architecture() {
    for arch in [80, 86, 120] {
        check(&Case::new(128, (1, 1), &[(1, 90), (20, 300)]).with(|case| case.arch = arch));
    }
}

#[test]
fn windows() {
    for mask in [(20, 0), (20, UNLIMITED), (3, 5), (UNLIMITED, 9), (0, 0), (70, 0)] {
        let case = Case::new(32, (2, 1), &[(1, 150), (40, 90), (10, 4)]).with(|case| case.mask = mask);
        check(&case.clone().with(|case| case.piece = 64));
        check(&case);
    }
}

#[test]
fn mask_bits() {
    for columns in [7, 40, 1000] {
        for mask in [FULL, CAUSAL] {
            let case = Case::new(32, (2, 1), &[(1, 80), (21, 90), (5, 5)]);
            let case = case.with(|case| (case.bits, case.mask) = (Some(columns), mask));
            check(&case.with(|case| case.piece = 64));
        }
    }
}

#[test]
fn blocks() {
    for (mask, block) in [(FULL, 4), (CAUSAL, 4), ((30, 0), 16), (FULL, 1)] {
        let case = Case::new(32, (2, 1), &[(1, 80), (30, 70)]);
        let case =
            case.with(|case| (case.layout, case.page_size, case.mask) = (KvLayout::Blocks, block, mask));
        check(&case);
    }
}

#[test]
fn levels_of_a_cascade() {
    for piece in [64, 1024] {
        for mask in [CAUSAL, (40, 0)] {
            let case = Case::new(32, (4, 2), &[(1, 100), (3, 90), (1, 128), (20, 100)]);
            let case = case.with(|case| (case.prefix, case.piece, case.workers) = (70, piece, 3));
            let case = case.with(|case| case.mask = mask);
            check(&case.clone().with(|case| case.seeds = 3));
            check(&case.with(|case| case.body = Body::Simt));
        }
    }
    // one item of the level is a source of more merges than are fetched at once
    let shared = Case::new(32, (1, 1), &[(1, 90); 12]).with(|case| case.workers = 3);
    check(&shared.with(|case| (case.prefix, case.piece, case.seeds) = (70, 1024, 3)));
}

#[test]
fn long_splits_of_one_request() {
    // more than twice as many states as a warp has lanes
    let case = Case::new(32, (4, 1), &[(1, 64 * 70 + 3)]);
    check(&case.with(|case| (case.piece, case.workers, case.seeds) = (64, 7, 3)));
}

#[test]
fn values_that_are_not_finite() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let case = Case::new(64, (2, 1), &[(1, 70), (40, 90), (5, 12)]);
        let case = case.with(|case| (case.qo, case.kv, case.spoiled) = (dtype, dtype, SPOILED.to_vec()));
        check(&case.clone().with(|case| case.mask = (30, 0)));
        check(&case.clone().with(|case| (case.bits, case.seeds) = (Some(40), 2)));
        check(&case.with(|case| (case.dim, case.heads) = (HeadDim::same(256), (1, 1))));
    }
}

/// Infinities of both signs at each position of a chunk of 8 elements, in keys that some rows see.
#[test]
fn infinite_values_at_all_positions() {
    let value = |key| if key < 56 { f64::INFINITY } else { f64::NEG_INFINITY };
    let of = |request| (48..64).map(move |key| (request, key, value(key)));
    let case = Case::new(64, (2, 1), &[(16, 70), (5, 64)]);
    check(&case.with(|case| (case.spoiled, case.seeds) = (of(0).chain(of(1)).collect(), 1)));
}

/// Items of up to 32 rows, for which one kernel has two row tiles per warp.
#[test]
fn pairs_of_row_tiles() {
    let case = Case::new(64, (2, 1), &[(1, 170), (16, 190), (9, 12)]);
    check(&case.clone().with(|case| (case.piece, case.workers, case.seeds) = (64, 3, 2)));
    check(&case.clone().with(|case| (case.bits, case.mask) = (Some(40), FULL)));
    let blocks = case.clone().with(|case| (case.layout, case.page_size) = (KvLayout::Blocks, 4));
    // a long request that is not the first: its pages have other numbers than those of the first
    check(&blocks.with(|case| (case.mask, case.lengths) = ((30, 0), vec![(9, 12), (16, 190)])));
    let levels = Case::new(32, (4, 2), &[(1, 100), (3, 90), (1, 128), (9, 100)]);
    let levels = levels.with(|case| (case.prefix, case.piece, case.workers) = (70, 64, 3));
    check(&levels.with(|case| (case.mask, case.seeds) = ((40, 0), 2)));
    let spoiled = case.with(|case| case.spoiled = SPOILED.to_vec());
    check(&spoiled.clone().with(|case| case.mask = (30, 0)));
    check(&spoiled.with(|case| (case.bits, case.dim) = (Some(40), HeadDim::same(128))));
}

/// Items of few rows, for which one kernel divides the keys among warps.
#[test]
fn few_rows() {
    // heads that end within the chunks that lanes copy at once, in items before others and after
    for (qk, vo) in [(24, 104), (40, 40), (80, 80), (256, 24)] {
        let case = Case::new(qk, (1, 1), &[(1, 150), (3, 203), (2, 90), (1, 7)]);
        check(&case.with(|case| (case.dim, case.piece, case.workers) = (HeadDim { qk, vo }, 128, 2)));
    }
    // mask bits that end with a byte, and the tensor with them
    let masked = Case::new(32, (1, 1), &[(1, 80), (4, 10)]);
    check(&masked.with(|case| (case.bits, case.mask) = (Some(10), FULL)));
    // infinities that no row sees, in each word of a value: each is alone in its tile
    let lengths: Vec<_> = (0..52).map(|word| (1, 2 * word + 8)).collect();
    let spoiled = (0..52).map(|word| (word, 2 * word, f64::INFINITY)).collect();
    let case = Case::new(24, (1, 1), &lengths).with(|case| (case.dim.vo, case.spoiled) = (104, spoiled));
    check(&case.with(|case| (case.mask, case.workers) = ((5, 0), 3)));
}
