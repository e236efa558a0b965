//! Distributions equal those of the CPU backend. `long_rows` tests those of rows whose filters end outside of the list.

use super::{
    rows::{Both, Rows, bell, requests, run, ties_of_top_k},
    sample::params,
};
use crate::real::{Real, assert_near};
use half::{bf16, f16};
use tilewright::{
    Cpu, ViewMut,
    sampling::{FilterOrder, SamplingParams, Scores, TopKTies, distribution as on_cpu},
};
use tilewright_kernels::sampling::{RowKind, SampleConfig, distribution};
use tilewright_ptx::{Arg, Memory};

/// Results begin `gap` elements after an aligned address and have `gap` more elements per row. `gap` is also the seed.
pub(super) fn assert_distributed<T: Both, O: Both + Real>(
    rows: &Rows<T>,
    kind: RowKind,
    params: &[SamplingParams],
    (threads, gap): (u32, usize),
) where
    for<'a> tilewright::tensor::Data<'a>: From<&'a [T]>,
{
    let [count, vocab] = rows.shape;
    let mut expected = vec![0_f32; count * vocab];
    let out = ViewMut::new(&mut expected, &[count, vocab]).expect("dense rows");
    let scores = match kind {
        RowKind::Logits => Scores::Logits(rows.view()),
        RowKind::Probs | RowKind::Scores => Scores::Probs(rows.view()),
    };
    on_cpu(&Cpu::with_threads(1).unwrap(), scores, params, out).expect("valid arguments");
    let kernel =
        distribution::<T, O>("distribution", SampleConfig { kind, threads }).expect("a valid kernel");
    let (mut memory, stride, size) = (Memory::new(), vocab + gap, size_of::<O>());
    let scores = rows.load(&mut memory);
    let requests = requests(params, &mut memory);
    let to = memory.alloc((gap + count * stride) * size) + (gap * size) as u64;
    let strides = [rows.stride, stride].map(|stride| Arg::U64(stride as u64));
    let args = [&[Arg::U64(scores), Arg::U64(to)], &strides[..], &[Arg::U32(vocab as u32)]].concat();
    run(&kernel, count, &[args, requests.args()].concat(), (gap as u64, &mut memory));
    for (row, expected) in expected.chunks(vocab).enumerate() {
        let found: Vec<O> = memory.read(to + (row * stride * size) as u64, vocab).expect("a row");
        for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let what = format!("{:?}, row {row}, element {i}: {:?}", rows.shape, params[row]);
            // the tolerance would accept a small probability of a dropped token
            assert!(expected != 0.0 || found.wide() == 0.0, "{what} is {}, expected 0", found.wide());
            assert_near(&what, found, expected.into(), (1e-6, expected.into()));
        }
    }
}

const LOGITS: RowKind = RowKind::Logits;

#[test]
fn rows_of_all_lengths() {
    for (vocab, count) in [(1, 20), (9, 20), (257, 20), (2048, 10)] {
        let each = params(count);
        assert_distributed::<f32, f32>(&Rows::new((count, vocab), (1, 2), bell), LOGITS, &each, (64, 1));
        assert_distributed::<f16, f16>(&Rows::new((count, vocab), (3, 1), bell), LOGITS, &each, (128, 3));
        assert_distributed::<bf16, f32>(&Rows::new((count, vocab), (0, 0), bell), LOGITS, &each, (64, 0));
    }
    let each = params(32);
    assert_distributed::<bf16, bf16>(&Rows::new((32, 5003), (5, 1), bell), LOGITS, &each, (128, 5));
    let falling = |_, i: usize| -(i as f32) * 1e-3;
    assert_distributed::<f32, f16>(&Rows::new((32, 5003), (5, 1), falling), LOGITS, &each, (64, 0));
    // almost full last steps
    let many = |row: u32| SamplingParams { top_k: Some(700 + row), ..SamplingParams::default() };
    let each: Vec<_> = each.iter().copied().take(8).chain((0..4).map(many)).collect();
    assert_distributed::<f32, f32>(&Rows::new((12, 5116), (0, 0), bell), LOGITS, &each, (64, 0));
    assert_distributed::<bf16, f32>(&Rows::new((12, 5116), (0, 0), bell), LOGITS, &each, (64, 0));
}

/// Of two rows, the second is invalid. Results are aligned or not.
#[test]
fn invalid_rows_become_nan() {
    let invalid = |row: usize, i: usize| if row + i == 3000 { f32::NAN } else { bell(row, i) };
    let each = [SamplingParams::default(); 2];
    let (single, half) = (Rows::new((2, 3000), (0, 0), invalid), Rows::new((2, 3000), (0, 0), invalid));
    for gap in [0, 5] {
        assert_distributed::<f32, f32>(&single, LOGITS, &each, (64, gap));
        assert_distributed::<f32, f16>(&single, LOGITS, &each, (64, gap));
        assert_distributed::<bf16, f32>(&half, LOGITS, &each, (64, gap));
        assert_distributed::<bf16, bf16>(&half, LOGITS, &each, (64, gap));
    }
}

/// A list whose bound is found by digits; one that overflows; thresholds below the counted buckets; weights at the
/// bound of min-p; top-p among more ties of top-k than the list holds.
#[test]
fn filters_that_need_other_passes() {
    let plain = SamplingParams::default();
    let many = SamplingParams { top_k: Some(150), ..plain };
    assert_distributed::<f32, f32>(&Rows::new((1, 3000), (1, 0), bell), LOGITS, &[many], (256, 0));
    let least = SamplingParams { min_p: 1e-3, ..plain };
    let falling = |_, i: usize| -(i as f32) * 1e-3;
    assert_distributed::<bf16, f32>(&Rows::new((1, 5003), (1, 0), falling), LOGITS, &[least], (64, 0));
    let nearly_all = SamplingParams { top_p: 0.999, ..plain };
    let tail = |_, i: usize| if i == 4000 { 0.0 } else { -13.0 - (i % 7) as f32 * 1e-3 };
    assert_distributed::<f32, f32>(&Rows::new((1, 5003), (1, 1), tail), LOGITS, &[nearly_all], (128, 0));
    let deep = |_, i: usize| if i == 40 { 0.0 } else { -17.5 - (i % 7) as f32 * 1e-3 };
    let thousand = SamplingParams { top_k: Some(1000), ..plain };
    assert_distributed::<f32, f32>(&Rows::new((1, 5003), (1, 1), deep), LOGITS, &[thousand], (64, 0));
    let half = SamplingParams { min_p: 0.5, ..plain };
    let weights =
        |_, i: usize| [0.0, 0.125, 0.25, 0.5, 1.0][i % 7 % 5] * if i % 50 < 10 { 1.0 } else { 0.25 };
    assert_distributed::<f16, f32>(&Rows::new((1, 3000), (1, 0), weights), RowKind::Probs, &[half], (64, 0));
    let of_ties = SamplingParams { top_k: Some(150), top_p: 0.42, ..plain };
    assert_distributed::<f32, f32>(&Rows::new((1, 3100), (1, 0), ties_of_top_k), LOGITS, &[of_ties], (64, 0));
}

/// As many elements are listed as can be ranked by counting.
#[test]
fn top_k_ends_in_a_full_ranking() {
    let falling = |_, i: usize| if i.is_multiple_of(4) { i as f32 * -1e-3 } else { -50.0 };
    let each =
        [SamplingParams { top_k: Some(254), top_k_ties: TopKTies::LowestIndex, ..SamplingParams::default() }];
    assert_distributed::<f32, f32>(&Rows::new((1, 4096), (0, 0), falling), LOGITS, &each, (1024, 0));
}

/// Ties at the end of top-k in all elements of a vector: in a list, and among more elements than a list holds.
#[test]
fn top_k_ends_anywhere_in_a_vector() {
    let falling = |_, i: usize| (i / 16) as f32 * -0.125; // one warp holds all of the largest
    let ties = |row: usize, i: usize| [1.0, 0.25, 0.25][(i + row / 2) % 3];
    let of = |row: usize, top_k: u32| SamplingParams {
        top_k: Some(top_k + row as u32 / 2),
        top_k_ties: [TopKTies::LowestIndex, TopKTies::HighestIndex][row % 2],
        ..SamplingParams::default()
    };
    let each: Vec<_> = (0..16).map(|row| of(row, 33)).collect();
    assert_distributed::<f32, f32>(&Rows::new((16, 5003), (0, 0), falling), LOGITS, &each, (64, 0));
    assert_distributed::<bf16, f32>(&Rows::new((16, 5003), (0, 0), falling), LOGITS, &each, (64, 0));
    let each: Vec<_> = (0..16).map(|row| of(row, 2050)).collect();
    for vocab in [2100, 2600] {
        let rows = Rows::<f32>::new((16, vocab), (0, 0), ties);
        assert_distributed::<f32, f32>(&rows, LOGITS, &each, (64, 0));
        assert_distributed::<f32, f32>(&rows, RowKind::Probs, &each, (64, 0));
        assert_distributed::<bf16, f32>(&Rows::new((16, vocab), (0, 0), ties), LOGITS, &each, (64, 0));
    }
}

/// Top-p ends among small equal logits at one place of the vectors of a warp's last step or of the step before.
#[test]
fn top_p_ends_anywhere_in_a_vector() {
    let small = |row: usize, i: usize| match i {
        0 => 0.0,
        1792.. if i % 8 == row % 8 && (i < 2048) == (row < 8) => -14.5,
        _ => -60.0,
    };
    let each = [SamplingParams { top_k: Some(2080), top_p: 0.999_998_5, ..SamplingParams::default() }; 16];
    assert_distributed::<f32, f32>(&Rows::new((16, 2100), (0, 0), small), LOGITS, &each, (64, 0));
    assert_distributed::<bf16, f32>(&Rows::new((16, 2100), (0, 0), small), LOGITS, &each, (64, 0));
}

/// Much of the mass that top-k lists is at one place of the vectors of a warp's last step or of the step before. All weights are just
/// above the subnormal numbers of f32.
#[test]
fn top_p_of_all_ends_above_top_k() {
    let weight = |row: usize, i: usize| {
        let step = if row < 8 { 2560..2816 } else { 2816..3056 };
        let is_large = i < 36 || step.contains(&i) && (i / 128 % 2, i % 4) == (row / 4 % 2, row % 4);
        f32::from_bits(0x80_0000 + if is_large { 0x1_0000 + i as u32 } else { 0 })
    };
    let order = FilterOrder::Joint;
    let each = [SamplingParams { top_k: Some(60), top_p: 0.0165, order, ..SamplingParams::default() }; 16];
    let rows = Rows::<f32>::new((16, 3056), (0, 0), weight);
    assert_distributed::<f32, f32>(&rows, RowKind::Probs, &each, (64, 0));
}

/// The mass of the largest weights is exactly the target of top-p. Rows differ in the bucket of these weights.
#[test]
fn top_p_ends_exactly_at_a_bucket() {
    let weight = |row: usize, i: usize| (1.0 + row as f32 / 128.0) * if i % 5 < 3 { 1.0 } else { 0.5 };
    let each = [SamplingParams { top_p: 0.75, ..SamplingParams::default() }; 4];
    let rows = Rows::<f32>::new((4, 3420), (0, 0), weight);
    assert_distributed::<f32, f32>(&rows, RowKind::Probs, &each, (64, 0));
}

/// The elements that each thread reads first are far below the others, so that few elements are listed for top-p.
#[test]
fn top_p_ends_in_a_short_list() {
    let late = |row, i: usize| bell(row, i) - if i % 2304 < 1024 { 26.0 } else { 0.0 };
    let of = |row: usize| SamplingParams { top_p: 0.05 + row as f32 * 0.055, ..SamplingParams::default() };
    let each: Vec<_> = (0..16).map(of).collect();
    assert_distributed::<f32, f32>(&Rows::new((16, 4500), (0, 0), late), LOGITS, &each, (64, 0));
}

/// The largest element is far above those that each thread reads first, or all elements are in one bucket of the histogram.
#[test]
fn top_p_ends_outside_of_the_list() {
    let spike = |row, i: usize| if i == 4500 { 16.0 } else { bell(row, i) / 6.0 };
    let of = |top_p| SamplingParams { top_p, ..SamplingParams::default() };
    let rows = Rows::<f32>::new((2, 5116), (0, 0), spike);
    assert_distributed::<f32, f32>(&rows, LOGITS, &[0.9996, 0.9997].map(of), (64, 0));
    let each = [0.002, 0.1, 0.5, 0.9, 0.998].map(of);
    let rows = Rows::<f32>::new((5, 5116), (1, 0), |row, i| bell(row, i) / 400.0);
    assert_distributed::<f32, f32>(&rows, LOGITS, &each, (64, 0));
    let rows = Rows::<f32>::new((5, 5116), (0, 0), |row, i| 1.0 + bell(row, i) / 400.0);
    assert_distributed::<f32, f32>(&rows, RowKind::Probs, &each, (64, 0));
}

/// Rows with an invalid value in each of the elements that a thread reads, and outside of vectors, with and without a histogram.
#[test]
fn an_invalid_probability_makes_its_row_invalid() {
    for (value, top_p) in [(-1.0, 1.0), (-1.0, 0.9), (f32::INFINITY, 1.0), (f32::INFINITY, 0.9)] {
        let place = |row: usize| if row == 72 { 0 } else { 15 + row / 4 * 128 + row % 4 };
        let prob = |row, i| if i == place(row) { value } else { 0.5 };
        let each = [SamplingParams { top_p, ..SamplingParams::default() }; 73];
        assert_distributed::<f32, f32>(&Rows::new((73, 4500), (1, 0), prob), RowKind::Probs, &each, (64, 0));
    }
}
