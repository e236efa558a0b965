//! 8-bit caches: dtypes, scales per tensor, head and page, and non-finite elements.

use super::{Case, FULL, Scales, check};
use tilewright::{Dtype, HeadDim};
use tilewright_kernels::attention::params::KvLayout;

const DTYPES: [(Dtype, Dtype); 6] = [
    (Dtype::Bf16, Dtype::E4m3),
    (Dtype::F16, Dtype::E4m3),
    (Dtype::Bf16, Dtype::E5m2),
    (Dtype::F16, Dtype::E5m2),
    (Dtype::Bf16, Dtype::I8),
    (Dtype::F16, Dtype::I8),
];

fn case(dim: usize, (qo, kv): (Dtype, Dtype), scales: Scales) -> Case {
    let lengths = [(1, 90), (33, 70), (1, 0), (2, 3)];
    Case::new(dim, (4, 2), &lengths).with(|case| (case.qo, case.kv, case.scales) = (qo, kv, scales))
}

#[test]
fn dtypes() {
    for dtypes in DTYPES {
        check(&case(64, dtypes, Scales::Tensor));
    }
    for arch in [80, 86, 120] {
        check(&case(128, DTYPES[arch as usize % 4], Scales::One).with(|case| case.arch = arch));
    }
}

#[test]
fn head_dims_of_bytes() {
    for (qk, vo) in [(16, 16), (80, 80), (192, 128), (256, 256), (32, 96)] {
        let case = case(qk, DTYPES[qk / 16 % 6], Scales::Head).with(|case| case.dim = HeadDim { qk, vo });
        let case = case.with(|case| (case.heads, case.lengths) = ((1, 1), vec![(1, 450), (20, 70)]));
        check(&case.with(|case| case.growth = 4.0));
    }
}

#[test]
fn factors() {
    for scales in [Scales::Head, Scales::Page, Scales::Mixed] {
        for (number, dtypes) in DTYPES.into_iter().enumerate() {
            let case = case(32, dtypes, scales).with(|case| case.page_size = [5, 1, 16][number % 3]);
            check(&case.clone().with(|case| case.piece = 64));
            check(&case.with(|case| (case.mask, case.seeds) = ([(20, 0), FULL][number % 2], 2)));
        }
    }
    let ragged = case(32, DTYPES[0], Scales::Head).with(|case| case.layout = KvLayout::Ragged);
    check(&ragged);
}

#[test]
fn logits_that_grow() {
    for (scales, growth) in [(Scales::Tensor, 4.0), (Scales::Page, 40.0), (Scales::Mixed, 10.0)] {
        let case = case(64, DTYPES[1], scales).with(|case| case.lengths = vec![(1, 300), (40, 270)]);
        check(&case.with(|case| case.growth = growth));
    }
}

/// Queries beyond the range of f16, to which those of few rows are converted.
#[test]
fn queries_of_any_magnitude() {
    for (query_factor, arch) in [(1e30, 90), (1e-30, 80)] {
        let case = case(64, DTYPES[0], Scales::Head).with(|case| case.lengths = vec![(1, 90), (2, 70)]);
        check(&case.with(|case| (case.query_factor, case.arch) = (query_factor, arch)));
    }
}

#[test]
fn elements_that_are_not_finite() {
    let spoiled = [(0, 3, f64::NAN), (0, 40, f64::INFINITY), (1, 25, f64::NAN), (1, 41, f64::NEG_INFINITY)];
    for (number, dtypes) in DTYPES.into_iter().enumerate().filter(|(_, (_, kv))| *kv != Dtype::I8) {
        let scales = [Scales::One, Scales::Page][number % 2];
        let case = case(64, dtypes, scales).with(|case| {
            let infinite = |value: &f64| case.kv == Dtype::E5m2 || value.is_nan();
            case.spoiled = spoiled.into_iter().filter(|(_, _, value)| infinite(value)).collect();
        });
        check(&case.clone().with(|case| case.mask = (30, 0)));
        check(&case.with(|case| case.mask = FULL));
    }
}

/// Items of up to 32 rows, for which one kernel has two row tiles per warp.
#[test]
fn pairs_of_row_tiles() {
    for (number, scales) in [Scales::Page, Scales::Mixed, Scales::Page].into_iter().enumerate() {
        let case = case(64, DTYPES[2 * number], scales);
        let case = case.with(|case| case.lengths = vec![(1, 170), (14, 90), (9, 3)]);
        check(&case.clone().with(|case| (case.piece, case.growth, case.page_size) = (64, 4.0, 5)));
        if case.kv == Dtype::E5m2 {
            let spoiled = vec![(0, 3, f64::NAN), (0, 40, f64::INFINITY), (1, 25, f64::NEG_INFINITY)];
            check(&case.with(|case| (case.spoiled, case.mask) = (spoiled, (30, 0))));
        }
    }
}

/// Caches that producers convert for `wgmma`.
mod wgmma {
    use super::{DTYPES, case};
    use crate::attention::{
        case::{Case, FULL, Scales},
        judge::check,
    };
    use tilewright::{Dtype, HeadDim};
    use tilewright_kernels::attention::{choose::Body, params::KvLayout};

    fn wgmma(dim: usize, dtypes: (Dtype, Dtype), scales: Scales) -> Case {
        case(dim, dtypes, scales)
            .with(|case| (case.body, case.lengths) = (Body::Wgmma, vec![(70, 300), (3, 40), (9, 5)]))
    }

    #[test]
    fn dtypes_and_scales() {
        for (number, dtypes) in DTYPES.into_iter().enumerate() {
            let scales = [Scales::Tensor, Scales::Head][number % 2];
            check(&wgmma([64, 128][number % 2], dtypes, scales).with(|case| case.seeds = 2));
        }
    }

    #[test]
    fn head_dims_layouts_and_masks() {
        for (qk, vo, page_size) in [(48, 48, 1), (64, 128, 5), (128, 64, 16), (96, 96, 64)] {
            let case = wgmma(qk, DTYPES[0], Scales::One);
            let case = case.with(|case| (case.dim, case.page_size) = (HeadDim { qk, vo }, page_size));
            check(&case.clone().with(|case| case.hnd = true));
            check(&case.with(|case| (case.mask, case.layout) = ((30, 2), KvLayout::Ragged)));
        }
        check(&wgmma(64, DTYPES[0], Scales::One).with(|case| case.bits = Some(40)));
        let blocks = wgmma(64, DTYPES[2], Scales::One).with(|case| case.layout = KvLayout::Blocks);
        check(&blocks.with(|case| (case.page_size, case.mask) = (16, FULL)));
    }

    #[test]
    fn splits_and_other_launches() {
        let split = wgmma(128, DTYPES[0], Scales::Head).with(|case| case.lengths = vec![(40, 700), (1, 130)]);
        check(&split.clone().with(|case| (case.piece, case.workers, case.seeds) = (128, 4, 4)));
        check(&split.with(|case| (case.workers, case.second, case.growth) = (1, 3, 20.0)));
    }

    #[test]
    fn queries_of_any_magnitude_and_values_that_are_not_finite() {
        for query_factor in [1e30, 1e-30] {
            check(&wgmma(64, DTYPES[0], Scales::Head).with(|case| case.query_factor = query_factor));
        }
        let spoiled =
            [(0, 40, f64::INFINITY), (0, 299, f64::NAN), (1, 25, f64::NAN), (1, 31, f64::NEG_INFINITY)];
        let case = wgmma(64, DTYPES[2], Scales::One).with(|case| case.spoiled = spoiled.to_vec());
        check(&case.clone().with(|case| (case.mask, case.seeds) = ((30, 0), 2)));
        check(&case.with(|case| (case.piece, case.workers) = (192, 3)));
    }
}
