//! Tokens and distributions of rows whose filters end outside of the list.

use super::{
    distribution::assert_distributed,
    rows::{Both, Rows, bell, positive},
    sample::{Launch, assert_drawn, assert_drawn_from, params},
};
use half::{bf16, f16};
use tilewright::sampling::{FilterOrder, SamplingParams, TopKTies};
use tilewright_kernels::sampling::{RowCtas, RowKind};

const LOGITS: RowKind = RowKind::Logits;
const PROBS: RowKind = RowKind::Probs;

/// The tokens of all rows and their distributions are those of the CPU backend.
fn assert_both<T: Both>(kind: RowKind, rows: &Rows<T>, params: &[SamplingParams], launch: Launch)
where
    for<'a> tilewright::tensor::Data<'a>: From<&'a [T]>,
{
    assert_drawn_from(kind, rows, params, launch);
    assert_distributed::<T, f32>(rows, kind, params, (launch.of_row.threads, rows.begin));
}

/// Requests with top-k of more elements than a list holds.
fn params_beyond_the_list(count: usize) -> Vec<SamplingParams> {
    let of = |i: usize| SamplingParams {
        top_k: Some(2100),
        top_k_ties: [TopKTies::Keep, TopKTies::LowestIndex, TopKTies::HighestIndex][i / 4 % 3],
        top_p: [1.0, 0.5][i % 2],
        order: [FilterOrder::TopKFirst, FilterOrder::Joint][i / 2 % 2],
        seed: i as u64,
        ..SamplingParams::default()
    };
    (0..count).map(of).collect()
}

#[test]
fn top_k_beyond_the_list() {
    let params = params_beyond_the_list(12);
    let ties = |_, i: usize| if i == 0 { 1.0 } else { 0.25 };
    for (ctas, threads) in [(1, 64), (2, 128)] {
        let launch = Launch { of_row: RowCtas { ctas, threads }, seed: 0 };
        assert_both(LOGITS, &Rows::<f32>::new((12, 4000), (1, 2), bell), &params, launch);
        assert_both(LOGITS, &Rows::<bf16>::new((12, 4000), (0, 0), bell), &params, launch);
        assert_both(LOGITS, &Rows::<bf16>::new((12, 4000), (0, 0), ties), &params, launch);
        assert_both(PROBS, &Rows::<f32>::new((12, 4000), (0, 0), positive), &params, launch);
    }
}

/// Equal weights end in the middle of a vector, or of the row of a warp.
#[test]
fn top_k_of_ties_beyond_the_list() {
    let ties = |_, i: usize| if i == 0 { 1.0 } else { 0.25 };
    let of = |row: usize| SamplingParams {
        top_k: Some(2050 + row as u32 / 2),
        top_k_ties: [TopKTies::LowestIndex, TopKTies::HighestIndex][row % 2],
        seed: row as u64,
        ..SamplingParams::default()
    };
    let params: Vec<_> = (0..16).map(of).collect();
    for vocab in [2100, 2600] {
        assert_drawn(&Rows::<f32>::new((16, vocab), (0, 0), ties), &params, Launch::one_cta(64, 0));
    }
}

/// Each row draws the element after the first tie that top-k drops. Rows differ in the place of this tie in a thread's step.
#[test]
fn draws_after_the_ties_of_top_k() {
    let of = |(seed, top_k)| SamplingParams {
        top_k: Some(top_k),
        top_k_ties: TopKTies::LowestIndex,
        seed,
        ..SamplingParams::default()
    };
    let seeds = [82, 7, 10, 3, 42, 15, 9, 121];
    let ends = [1843, 2751, 2905, 2195, 1691, 1297, 2279, 1949];
    let each: Vec<_> = seeds.into_iter().zip(ends).map(of).collect();
    let rows = Rows::<f32>::new((8, 3000), (0, 0), |_, i| [0.25, 0.25, 0.2501][i % 3]);
    assert_drawn(&rows, &each, Launch::one_cta(64, 0));
}

/// Logits so far below 0 that the list, which the histogram bounds, lacks the last of the 890 largest.
fn far_below_zero(_: usize, i: usize) -> f32 {
    -12_000.0 + (i * 7919 % 16_301 % 128) as f32 / 1024.0
}

/// A request for the 890 largest of [`far_below_zero`].
fn params_far_below_zero() -> SamplingParams {
    SamplingParams { temperature: 0.6, top_k: Some(890), seed: 3, ..SamplingParams::default() }
}

#[test]
fn top_k_ends_outside_of_the_list() {
    let rows = Rows::<f32>::new((1, 16_320), (0, 0), far_below_zero);
    let launch = Launch { of_row: RowCtas { ctas: 2, threads: 512 }, seed: 0 };
    assert_both(LOGITS, &rows, &[params_far_below_zero()], launch);
}

/// Rows with the largest element in each vector of an almost full last step, and one with it after 1,024 vectors of a warp.
fn greedy_rows() -> [(Rows<f32>, Vec<SamplingParams>); 2] {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let of = |vocab, places: &[usize]| {
        let rows = Rows::new((places.len(), vocab), (0, 0), |row, i| f32::from(i == places[row]));
        (rows, vec![greedy; places.len()])
    };
    let last_step: Vec<usize> = (0..8).map(|i| 4 * (773 + 32 * i) + i % 4).collect();
    [of(4080, &last_step), of(9000, &[4402])]
}

#[test]
fn the_largest_element_is_found_after_the_first_steps() {
    for (rows, params) in greedy_rows() {
        assert_both(LOGITS, &rows, &params, Launch::one_cta(64, 0));
    }
}

/// All elements are in one bucket of the histogram, and the last step over the row is almost full.
#[test]
fn top_p_ends_outside_of_the_list() {
    let of = |row: usize| SamplingParams {
        top_p: [0.002, 0.1, 0.5, 0.9, 0.998][row % 5],
        seed: row as u64,
        ..SamplingParams::default()
    };
    let each: Vec<_> = (0..15).map(of).collect();
    let narrow = |row, i| bell(row, i) / 400.0;
    assert_drawn(&Rows::<f32>::new((15, 5116), (0, 0), narrow), &each, Launch::one_cta(64, 0));
    let many = |row: usize| SamplingParams {
        top_k: Some(700 + row as u32),
        seed: row as u64,
        ..SamplingParams::default()
    };
    let each: Vec<_> = params(15).into_iter().chain((0..15).map(many)).collect();
    assert_drawn(&Rows::<f32>::new((30, 5116), (0, 0), bell), &each, Launch::one_cta(64, 0));
    assert_drawn(&Rows::<bf16>::new((30, 5116), (0, 0), bell), &each, Launch::one_cta(64, 0));
}

/// Probabilities of which many are equal to others, or to a part of the maximum.
fn coarse(row: usize, i: usize) -> f32 {
    (bell(row, i) * 4.0).max(0.0).round() / 64.0
}

/// Requests for [`coarse`] rows: temperature 1, and min-p of up to twice that of logits.
fn params_of_coarse(count: usize) -> Vec<SamplingParams> {
    let of =
        |request: SamplingParams| SamplingParams { temperature: 1.0, min_p: request.min_p * 2.0, ..request };
    params(count).into_iter().map(of).collect()
}

/// The largest probabilities are equal. All but one of a row are at the same place of a vector, in two vectors per thread; or a
/// thread has another vector of them after 1,024 vectors of its warp.
#[test]
fn top_k_keeps_ties_of_all_threads() {
    let ties = |row: usize, i: usize| match i {
        0..480 if i % 8 == row => 1.0,
        _ if i == 520 + (row + 1) % 8 => 1.0,
        _ => 0.125,
    };
    let of = |seed| SamplingParams { top_k: Some(1), seed, ..SamplingParams::default() };
    let each: Vec<_> = (0..8).map(of).collect();
    assert_drawn_from(PROBS, &Rows::<f16>::new((8, 2500), (0, 0), ties), &each, Launch::one_cta(64, 0));
    assert_drawn_from(PROBS, &Rows::<f32>::new((8, 2500), (0, 0), ties), &each, Launch::one_cta(64, 0));
    let distant = |_, i: usize| if i % 4096 < 4 { 1.0 } else { 0.125 };
    assert_drawn_from(PROBS, &Rows::<f32>::new((8, 9000), (0, 0), distant), &each, Launch::one_cta(64, 0));
}

#[test]
fn min_p_keeps_weights_at_its_bound() {
    let weights = |_, i: usize| [1.0, 0.5, 0.25][i % 3];
    let of = |seed| SamplingParams { min_p: 0.5, seed, ..SamplingParams::default() };
    let each: Vec<_> = (0..8).map(of).collect();
    assert_drawn_from(PROBS, &Rows::<f32>::new((8, 48), (0, 0), weights), &each, Launch::one_cta(64, 0));
}

/// Weights of which many are in the bucket of the threshold; others equal the limit from which on weights are not listed.
fn at_the_upper_limit(_: usize, i: usize) -> f32 {
    const BUCKET: u32 = 360_448; // bits of f32
    match i % 13 {
        0..3 => f32::from_bits(2933 * BUCKET + i as u32 * 37 % 128 * 1024),
        3 => f32::from_bits(2933 * BUCKET + BUCKET / 8 * 5),
        _ => 0.001,
    }
}

/// Different weights below the normal numbers of f32.
fn subnormal(_: usize, i: usize) -> f32 {
    f32::from_bits(0x40_0000 + i as u32 * 7919 % 4096 * 1024)
}

#[test]
fn weights_at_the_upper_limit_of_the_list() {
    let of = |row: usize| SamplingParams {
        top_p: [0.5, 0.6][row % 2],
        seed: row as u64,
        ..SamplingParams::default()
    };
    let each: Vec<_> = (0..8).map(of).collect();
    for weight in [at_the_upper_limit, subnormal] {
        let rows = Rows::<f32>::new((8, 2800), (0, 0), weight);
        assert_both(PROBS, &rows, &each, Launch::one_cta(64, 0));
    }
}

/// Top-p ends among equal logits, at one place of the vectors of a warp's last step or of the step before, and each row draws one of
/// them. The list has only the larger logits, all of another warp: the histogram misses them, because they are far above the first
/// loads.
fn assert_drawn_where_top_p_ends<T: Both>()
where
    for<'a> tilewright::tensor::Data<'a>: From<&'a [T]>,
{
    let size = 16 / size_of::<T>();
    let logit = |row: usize, i: usize| match i {
        1024.. if i < 1024 + 32 * size && i.is_multiple_of(size) => 0.0,
        4608.. if i % 8 == row % 8 && (i < 4864) == (row < 8) => -0.0625,
        _ => -20.0,
    };
    let of = |seed| SamplingParams { top_p: 0.99, seed, ..SamplingParams::default() };
    let each = [1, 3, 5, 7, 9, 10, 11, 18, 19, 20, 22, 24, 29, 32, 33, 34].map(of);
    assert_drawn(&Rows::<T>::new((16, 5112), (0, 8), logit), &each, Launch::one_cta(64, 0));
}

#[test]
fn draws_where_top_p_ends() {
    assert_drawn_where_top_p_ends::<f32>();
    assert_drawn_where_top_p_ends::<bf16>();
}

#[test]
fn rows_of_probabilities() {
    for vocab in [50, 2500] {
        let rows = Rows::<f32>::new((20, vocab), (1, 2), coarse);
        assert_both(PROBS, &rows, &params_of_coarse(20), Launch::one_cta(64, 0));
    }
    let rows = Rows::<f16>::new((40, 2500), (0, 0), coarse);
    assert_drawn_from(PROBS, &rows, &params_of_coarse(40), Launch::one_cta(64, 0));
}
