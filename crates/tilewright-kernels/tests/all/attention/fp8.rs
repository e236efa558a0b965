//! Queries of e4m3 over a cache of e4m3: the `wgmma` body with products of 8 bits, and the `mma` bodies, which convert.

use super::{CAUSAL, Case, FULL, Scales, check, judge::check_with};
use tilewright::{
    Dtype, HeadDim,
    attention::variant::{ExpressionVariant, SoftCap},
    reference::variant as formula,
};
use tilewright_kernels::attention::{
    Body, KvLayout, UNLIMITED,
    body::{mma::MmaConfig, wgmma::WgmmaConfig},
};

fn case(dim: usize, heads: (usize, usize), lengths: &[(usize, usize)]) -> Case {
    let fp8 = |case: &mut Case| (case.fp8, case.kv, case.body) = (true, Dtype::E4m3, Body::Wgmma);
    Case::new(dim, heads, lengths).with(fp8)
}

#[test]
fn causal_prefill_and_append() {
    let lengths = [(70, 300), (20, 20), (0, 7), (30, 10), (3, 400)];
    check(&case(128, (4, 2), &lengths).with(|case| case.seeds = 3));
    check(&case(64, (4, 1), &lengths).with(|case| (case.mask, case.workers) = (FULL, 3)));
    check(&case(128, (4, 1), &lengths).with(|case| (case.qo, case.scales) = (Dtype::F16, Scales::Head)));
}

#[test]
fn head_dims_of_fp8() {
    for (qk, vo) in [(48, 48), (96, 96), (128, 64), (64, 128), (112, 112)] {
        check(&case(qk, (1, 1), &[(150, 290)]).with(|case| case.dim = HeadDim { qk, vo }));
    }
}

#[test]
fn pages_layouts_and_splits_of_fp8() {
    for (page_size, hnd) in [(1, false), (5, true), (8, false), (16, true), (64, false), (256, true)] {
        let case = case(128, (4, 2), &[(40, 300), (10, 30)]);
        check(&case.with(|case| (case.page_size, case.hnd) = (page_size, hnd)));
    }
    for layout in [KvLayout::Ragged, KvLayout::Blocks] {
        check(
            &case(128, (4, 2), &[(40, 300), (10, 30)]).with(|case| (case.layout, case.mask) = (layout, FULL)),
        );
    }
    let split = case(128, (4, 1), &[(20, 5 * 128 + 3), (40, 90)]);
    check(&split.with(|case| (case.piece, case.workers, case.seeds) = (128, 4, 4)));
    let level = case(128, (4, 2), &[(1, 300), (3, 290), (20, 300)]);
    check(&level.with(|case| (case.prefix, case.piece, case.workers) = (270, 128, 3)));
}

#[test]
fn masks_and_logits_of_fp8() {
    for mask in [(20, 0), (150, UNLIMITED), (3, 5), (0, 0), (260, 0)] {
        check(&case(128, (2, 1), &[(100, 500), (10, 4)]).with(|case| case.mask = mask));
    }
    for (columns, mask) in [(7, FULL), (140, CAUSAL)] {
        let case = case(128, (2, 1), &[(21, 290), (5, 5)]);
        check(&case.with(|case| (case.bits, case.mask) = (Some(columns), mask)));
    }
    for growth in [4.0, 40.0] {
        check(&case(128, (2, 1), &[(90, 600)]).with(|case| case.growth = growth));
    }
    let cap = ExpressionVariant::of(&SoftCap::new(0.5).unwrap()).unwrap();
    check_with(&case(128, (2, 1), &[(90, 300)]), &cap, &|_| formula::soft_cap(0.5));
}

#[test]
fn fp8_values_that_are_not_finite() {
    let spoiled = [(0, 40), (0, 299), (0, 298), (1, 25), (1, 41), (1, 60), (1, 64), (1, 77)];
    let spoiled: Vec<_> = spoiled
        .map(|(request, key)| (request, key, if key % 2 == 0 { f64::NAN } else { -f64::NAN }))
        .to_vec();
    let case = case(128, (2, 1), &[(100, 300), (40, 90)]).with(|case| case.spoiled = spoiled);
    check(&case.clone().with(|case| (case.mask, case.seeds) = ((30, 0), 2)));
    check(&case.clone().with(|case| (case.piece, case.workers, case.seeds) = (128, 3, 4)));
    check(&case.with(|case| (case.bits, case.seeds) = (Some(40), 2)));
}

/// Sums of values that accumulators of 8-bit products lose beside the first tile's: 31 % of the output.
#[test]
fn sums_of_tiles_are_added_in_f32() {
    let case = case(64, (1, 1), &[(20, 41 * 128)]).with(|case| case.constant_values = Some((448.0, 3.5)));
    check(&case.with(|case| (case.query_factor, case.mask) = (1e-9, FULL)));
}

#[test]
fn fp8_queries_are_converted_by_mma_bodies() {
    for (arch, qo) in [(80, Dtype::Bf16), (89, Dtype::F16), (90, Dtype::Bf16), (90, Dtype::F16)] {
        let lengths = [(1, 90), (33, 150), (1, 0), (2, 30)];
        let case = case(128, (4, 2), &lengths);
        check(&case.clone().with(|case| (case.arch, case.qo, case.body) = (arch, qo, Body::Mma)));
        let few = [(1, 300), (3, 30)];
        check(&case.with(|case| {
            (case.arch, case.qo, case.body, case.lengths) = (arch, qo, Body::Mma, few.to_vec());
        }));
    }
    let odd = case(80, (2, 1), &[(1, 90), (30, 60)]);
    check(&odd.with(|case| (case.body, case.scales) = (Body::Mma, Scales::Page)));
}

#[test]
fn queries_of_other_8_bit_dtypes_are_unsupported() {
    let (o, head_dim) = (Dtype::Bf16, HeadDim::same(128));
    let config =
        WgmmaConfig { q: Dtype::E4m3, o, out: o, kv: Dtype::Bf16, head_dim, any_mask: false, pairs: false };
    let reason = "queries are e4m3, expected bf16 as outputs, or e4m3 as a cache";
    assert_eq!(config.unsupported(), [reason]);
    let case = case(128, (2, 1), &[(1, 1)]);
    let config = case.config(tilewright_kernels::attention::body::Bodies::Both);
    assert_eq!(MmaConfig { q: Dtype::E5m2, ..config }.unsupported(), [reason.replace("e4m3, ", "e5m2, ")]);
}

fn narrow(case: Case) -> Case {
    case.with(|case| case.fp8_outputs = true)
}

#[test]
fn outputs_of_e4m3() {
    let lengths = [(70, 300), (20, 20), (0, 7), (30, 10), (3, 400)];
    let wide = |dim, lengths: &[_]| narrow(Case::new(dim, (4, 2), lengths));
    for dim in [128, 64] {
        check(&wide(dim, &lengths).with(|case| case.body = Body::Wgmma));
        check(&narrow(case(dim, (4, 2), &lengths)));
    }
    // parts of the eight fragments that a quad exchanges
    for (qk, vo) in [(48, 48), (64, 56), (96, 96), (128, 104)] {
        check(&wide(qk, &[(150, 290)]).with(|case| (case.dim.vo, case.body) = (vo, Body::Wgmma)));
    }
    for (arch, qo) in [(80, Dtype::Bf16), (89, Dtype::F16), (90, Dtype::Bf16)] {
        check(&wide(128, &lengths).with(|case| (case.arch, case.qo, case.kv) = (arch, qo, qo)));
        check(
            &wide(128, &[(1, 300), (2, 90)])
                .with(|case| (case.arch, case.qo, case.kv, case.heads) = (arch, qo, qo, (4, 1))),
        );
    }
    // merges of pieces
    let split = wide(128, &[(20, 5 * 128 + 3), (1, 390)]);
    let split = split.with(|case| (case.piece, case.workers, case.seeds) = (128, 4, 2));
    check(&split);
    check(&split.with(|case| case.body = Body::Wgmma));
}

#[test]
fn outputs_of_e4m3_are_saturated() {
    let spoiled = vec![(0, 40, f64::INFINITY), (0, 150, f64::NAN), (1, 25, f64::NEG_INFINITY)];
    let large =
        Case::new(128, (2, 1), &[(30, 300), (40, 90)]).with(|case| case.constant_values = Some((1e3, 300.0)));
    let spoiled = Case::new(128, (2, 1), &[(100, 300), (40, 90)]).with(|case| case.spoiled = spoiled);
    for case in [large, spoiled] {
        check(&narrow(case.clone()));
        check(&narrow(case.with(|case| case.body = Body::Wgmma)));
    }
}
