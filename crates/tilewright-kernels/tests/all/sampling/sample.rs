//! Sampled tokens equal those of the CPU backend.

use super::rows::{Both, Rows, bell, requests, run, ties_of_top_k};
use half::{bf16, f16};
use tilewright::{
    Cpu,
    sampling::{FilterOrder, SamplingParams, TopKTies, sample as on_cpu, sampling_from_probs},
};
use tilewright_kernels::sampling::{
    EMPTY, INVALID_VALUE, ROW_OUTCOME_WORDS, RowCtas, RowKind, SampleConfig, SampleParams, VALID,
    distribution, sample,
};
use tilewright_ptx::{Arg, Memory};

/// Requests of every kind.
pub(super) fn params(count: usize) -> Vec<SamplingParams> {
    let of = |i: usize| SamplingParams {
        temperature: [1.0, 0.7, 0.0, 3.0, 1e-45][i % 5],
        top_k: [None, Some(40), Some(3), Some(700), Some(1)][i / 2 % 5],
        top_k_ties: [TopKTies::Keep, TopKTies::LowestIndex, TopKTies::HighestIndex][i % 3],
        top_p: [0.9, 1.0, 0.3][i / 3 % 3],
        min_p: [0.0, 0.0, 0.05, 0.3][i % 4],
        order: [FilterOrder::TopKFirst, FilterOrder::Joint][i / 5 % 2],
        seed: i as u64 * 0x1_0000_0003,
        offset: u64::MAX - i as u64,
    };
    (0..count).map(of).collect()
}

/// The CTAs of a row and the seed of the simulator.
#[derive(Clone, Copy)]
pub(super) struct Launch {
    pub(super) of_row: RowCtas,
    pub(super) seed: u64,
}

impl Launch {
    pub(super) fn one_cta(threads: u32, seed: u64) -> Self {
        Self { of_row: RowCtas { ctas: 1, threads }, seed }
    }
}

/// Runs the kernel and returns the row outcomes.
pub(super) fn outcomes<T: Both>(
    rows: &Rows<T>,
    kind: RowKind,
    params: &[SamplingParams],
    Launch { of_row, seed }: Launch,
) -> Vec<u32> {
    let kernel = sample::<T>("sample", kind, of_row).expect("a valid kernel");
    let mut memory = Memory::new();
    let scores = rows.load(&mut memory);
    let requests = requests(params, &mut memory);
    let to = memory.alloc(params.len() * ROW_OUTCOME_WORDS * 4);
    let [count, vocab] = rows.shape;
    let params = SampleParams {
        scores,
        stride: rows.stride as u64,
        shape: [count as u32, vocab as u32],
        row_ids: 0,
        outcomes: to,
        tokens: 0,
        valid: 0,
        requests,
    };
    run(&kernel, count, &params.all_args(), (seed, &mut memory));
    memory.read(to, count * ROW_OUTCOME_WORDS).expect("verdicts")
}

pub(super) fn assert_drawn<T: Both>(rows: &Rows<T>, params: &[SamplingParams], launch: Launch)
where
    for<'a> tilewright::tensor::Data<'a>: From<&'a [T]>,
{
    assert_drawn_from(RowKind::Logits, rows, params, launch);
}

/// The tokens of all rows are those of the CPU backend.
pub(super) fn assert_drawn_from<T: Both>(
    kind: RowKind,
    rows: &Rows<T>,
    params: &[SamplingParams],
    launch: Launch,
) where
    for<'a> tilewright::tensor::Data<'a>: From<&'a [T]>,
{
    let (cpu, mut expected) = (Cpu::with_threads(1).unwrap(), vec![Ok(0); params.len()]);
    match kind {
        RowKind::Logits => on_cpu(&cpu, rows.view(), params, &mut expected),
        RowKind::Probs => sampling_from_probs(&cpu, rows.view(), params, &mut expected),
        RowKind::Scores => panic!("scores are not drawn"),
    }
    .expect("valid arguments");
    let found = outcomes(rows, kind, params, launch);
    for (row, (found, expected)) in found.chunks(ROW_OUTCOME_WORDS).zip(expected).enumerate() {
        assert_eq!(
            (found[0], Ok(found[1])),
            (VALID, expected),
            "{:?}, row {row}: {:?}",
            rows.shape,
            params[row]
        );
    }
}

#[test]
fn short_rows() {
    for vocab in [1, 2, 7, 8, 9, 50, 257, 2048] {
        let params = params(20);
        assert_drawn(&Rows::<f32>::new((20, vocab), (1, 2), bell), &params, Launch::one_cta(64, 0));
        assert_drawn(&Rows::<f16>::new((20, vocab), (3, 1), bell), &params, Launch::one_cta(128, 1));
        assert_drawn(&Rows::<bf16>::new((20, vocab), (0, 0), bell), &params, Launch::one_cta(256, 2));
    }
}

#[test]
fn long_rows_with_and_without_a_sufficient_list() {
    let falling = |_, i: usize| -(i as f32) * 1e-3; // one thread holds all of the largest
    for threads in [128, 1024] {
        let params = params(30);
        assert_drawn(&Rows::<bf16>::new((30, 5003), (5, 1), bell), &params, Launch::one_cta(threads, 3));
        assert_drawn(&Rows::<f32>::new((30, 5003), (5, 1), falling), &params, Launch::one_cta(threads, 4));
    }
}

/// Logits that differ have equal weights if their distances from the maximum are equal after rounding: the list needs more than
/// the logits above its bound.
#[test]
fn logits_next_to_the_bound_keep_their_ties() {
    let near = |_, i: usize| match i {
        0 => 1010.0,
        _ if i % 33 == 5 => 10.0 + (i * 7 % 20) as f32 * 1e-6,
        _ => -5000.0,
    };
    let params: Vec<_> = (0..24)
        .map(|row| SamplingParams {
            temperature: 1000.0,
            top_k: Some(40),
            top_k_ties: [TopKTies::Keep, TopKTies::LowestIndex, TopKTies::HighestIndex][row % 3],
            top_p: [1.0, 0.5][row % 2],
            seed: row as u64,
            ..SamplingParams::default()
        })
        .collect();
    for threads in [64, 256] {
        assert_drawn(&Rows::<f32>::new((24, 4200), (3, 1), near), &params, Launch::one_cta(threads, 0));
    }
}

/// The tail has 1.1 % of the mass, below the buckets that the pass over the row counts; and top-p among ties of top-k.
#[test]
fn thresholds_of_top_p_may_be_below_the_counted_buckets() {
    let tail = |_, i: usize| if i == 4000 { 0.0 } else { -13.0 - (i % 7) as f32 * 1e-3 };
    let of = |seed| SamplingParams { top_p: 0.999, seed, ..SamplingParams::default() };
    let params: Vec<_> = (0..4).map(of).collect();
    assert_drawn(&Rows::<f32>::new((4, 5003), (1, 1), tail), &params, Launch::one_cta(128, 0));
    let of = |seed| SamplingParams { top_k: Some(150), top_p: 0.42, seed, ..SamplingParams::default() };
    let params: Vec<_> = (0..8).map(of).collect();
    assert_drawn(&Rows::<f32>::new((8, 3100), (1, 1), ties_of_top_k), &params, Launch::one_cta(128, 0));
}

/// Rows of clusters: with a list, with one that overflows, without filters, with an invalid value.
#[test]
fn clusters_draw_the_tokens_of_one_cta() {
    // the numbers of CTAs that `RowCtas::choose` returns
    for (ctas, threads) in [(2, 128), (8, 64)] {
        let launch = Launch { of_row: RowCtas { ctas, threads }, seed: u64::from(ctas + threads) };
        for vocab in [1, 50, 2048] {
            assert_drawn(&Rows::<f32>::new((10, vocab), (1, 2), bell), &params(10), launch);
        }
        let params = params(30);
        assert_drawn(&Rows::<bf16>::new((30, 5003), (5, 1), bell), &params, launch);
        assert_drawn(&Rows::<f32>::new((30, 5003), (5, 1), |_, i| -(i as f32) * 1e-3), &params, launch);
        assert_drawn(&Rows::<f16>::new((30, 3001), (1, 0), |_, _| 0.5), &params, launch);
        let top_p = |row: usize| SamplingParams {
            top_p: [0.9, 0.3][row % 2],
            seed: row as u64,
            ..Default::default()
        };
        let params: Vec<_> = (0..6).map(top_p).collect();
        assert_drawn(&Rows::<f32>::new((6, 9001), (3, 0), |row, i| bell(row, i) / 6.0), &params, launch);
        let invalid =
            Rows::<f32>::new((2, 4500), (0, 0), |row, i| if i == 4321 * row { f32::NAN } else { 1.0 });
        let found = outcomes(&invalid, RowKind::Logits, &params[..2], launch);
        assert_eq!(
            found.chunks(ROW_OUTCOME_WORDS).map(|row| [row[0], row[1]]).collect::<Vec<_>>(),
            [[INVALID_VALUE, 0], [INVALID_VALUE, 4321]]
        );
    }
}

/// Rows whose filter ends among thousands of elements: normal logits, logits of few values, an element far above those that
/// each thread reads first, and mass below the buckets of the histogram.
#[test]
fn filters_end_where_the_histogram_shows_or_not() {
    let steps = |row, i| (bell(row, i) * 2.0).round() / 4.0;
    let spike = |row, i: usize| if i == 19_000 { 40.0 } else { bell(row, i) / 6.0 };
    let deep = |_, i: usize| if i == 9_000 { 0.0 } else { -17.5 - (i % 7) as f32 * 1e-3 };
    let of = |row: usize| SamplingParams {
        top_k: [None, None, Some(1_000), None][row % 4],
        top_p: [0.9, 0.3, 1.0, 0.999_999][row % 4],
        temperature: [1.0, 0.7][row / 4],
        seed: row as u64,
        ..SamplingParams::default()
    };
    let params: Vec<_> = (0..8).map(of).collect();
    for (ctas, threads) in [(1, 128), (1, 512), (1, 1024), (2, 512), (8, 64)] {
        let launch = Launch { of_row: RowCtas { ctas, threads }, seed: u64::from(ctas + threads) };
        assert_drawn(&Rows::<f32>::new((8, 20_000), (1, 0), |row, i| bell(row, i) / 6.0), &params, launch);
        assert_drawn(&Rows::<f32>::new((8, 20_000), (0, 1), steps), &params, launch);
        assert_drawn(&Rows::<f32>::new((8, 20_000), (3, 0), spike), &params, launch);
        assert_drawn(&Rows::<f32>::new((8, 20_000), (3, 0), deep), &params, launch);
        assert_drawn(&Rows::<bf16>::new((8, 20_000), (3, 0), |row, i| bell(row, i) / 6.0), &params, launch);
    }
}

/// All of the largest elements are in the range of one CTA: more than its part of the list holds, but fewer than the list.
#[test]
fn lists_of_clusters_overflow_in_one_part() {
    let crowded = |_, i: usize| if i < 1500 { 1.0 } else { -9.0 - i as f32 * 1e-3 };
    let of = |seed| SamplingParams { top_k: Some(10), seed, ..SamplingParams::default() };
    let params: Vec<_> = (0..8).map(of).collect();
    for (ctas, threads) in [(2, 128), (8, 64)] {
        let launch = Launch { of_row: RowCtas { ctas, threads }, seed: 0 };
        assert_drawn(&Rows::<f32>::new((8, 16_400), (0, 0), crowded), &params, launch);
    }
}

#[test]
fn equal_logits_draw_by_index() {
    let params = params(30);
    assert_drawn(&Rows::<f16>::new((30, 3001), (1, 0), |_, _| 0.5), &params, Launch::one_cta(256, 0));
    // a few equal maxima in the threads of all warps
    let peaks = |_, i: usize| if i % 401 == 17 { 4.0 } else { -1.0 };
    assert_drawn(&Rows::<bf16>::new((30, 4099), (7, 2), peaks), &params, Launch::one_cta(256, 1));
}

#[test]
fn every_seed_gives_the_same_tokens() {
    for seed in 0..8 {
        assert_drawn(&Rows::<f16>::new((15, 2500), (1, 0), bell), &params(15), Launch::one_cta(64, seed));
    }
}

#[test]
fn the_vocabulary_of_llama_3() {
    assert_drawn(&Rows::<bf16>::new((1, 128_256), (0, 0), bell), &params(6)[5..], Launch::one_cta(1024, 0));
}

#[test]
fn weights_are_drawn_over_the_whole_range_of_f32() {
    let plain = SamplingParams::default();
    let values = [1e-45, 3e-45, f32::MIN_POSITIVE, 1.0, f32::MAX, 1e30, 1e38, 0.0];
    let rows =
        Rows::<f32>::new(
            (8, 3000),
            (0, 0),
            |row, i| if i < 300 { values[row] * ((i % 3) as f32 / 2.0) } else { 0.0 },
        );
    let params: Vec<_> =
        (0..8).map(|seed| SamplingParams { seed, top_p: [1.0, 0.6][seed as usize % 2], ..plain }).collect();
    let mut expected = vec![Ok(0); 8];
    sampling_from_probs(&Cpu::with_threads(1).unwrap(), rows.view(), &params, &mut expected)
        .expect("valid arguments");
    let found = outcomes(&rows, RowKind::Probs, &params, Launch::one_cta(128, 0));
    for (found, expected) in found.chunks(ROW_OUTCOME_WORDS).zip(&expected[..7]) {
        assert_eq!((found[0], &Ok(found[1])), (VALID, expected));
    }
    assert_eq!(found[7 * ROW_OUTCOME_WORDS], EMPTY);
}

/// The maximum over the temperature may exceed the range of f32.
#[test]
fn maxima_and_temperatures_may_have_any_magnitude() {
    const ROWS: [(f32, f32); 8] = [
        (f32::MIN, 1.0),
        (f32::MAX, 1e-45),
        (f32::MAX, 5e37),
        (1e30, 1e-3),
        (1e30, 1e28),
        (-1e-40, 1e-42),
        (1e-45, 1e-45),
        (65_504.0, 1.0),
    ];
    let near = |row: usize, i: usize| {
        let (max, temperature) = ROWS[row % ROWS.len()];
        if i % 11 == 5 { f32::NEG_INFINITY } else { max - temperature * 0.6 * (i % 7) as f32 }
    };
    let params: Vec<_> = (0..3 * ROWS.len())
        .map(|row| SamplingParams {
            temperature: ROWS[row % ROWS.len()].1,
            seed: row as u64,
            top_p: [1.0, 0.7][row / ROWS.len() % 2],
            ..SamplingParams::default()
        })
        .collect();
    for vocab in [200, 3000] {
        assert_drawn(&Rows::<f32>::new((24, vocab), (0, 0), near), &params, Launch::one_cta(64, 0));
    }
}

/// The binary exponents of weights just below a power of two have a fraction that rounds to 1.
#[test]
fn logits_just_below_the_maximum_have_its_weight() {
    let near = |_, i: usize| if i == 7 { 0.0 } else { -1e-9 };
    let of = |seed| SamplingParams { seed, ..SamplingParams::default() };
    let params: Vec<_> = (0..4).map(of).collect();
    assert_drawn(&Rows::<f32>::new((4, 1000), (0, 0), near), &params, Launch::one_cta(64, 0));
}

#[test]
fn reports_the_first_invalid_value() {
    let bad = |values: [f32; 4]| {
        move |row: usize, i: usize| if i % 1000 == 777 { values[row] } else { bell(row, i) }
    };
    let params = [SamplingParams::default(); 4];
    let rows = Rows::<f32>::new((4, 2900), (0, 0), bad([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0]));
    let found = outcomes(&rows, RowKind::Logits, &params, Launch::one_cta(128, 0));
    let heads: Vec<_> = found.chunks(ROW_OUTCOME_WORDS).map(|row| row[0]).collect();
    assert_eq!(heads, [INVALID_VALUE, INVALID_VALUE, VALID, VALID]);
    assert_eq!((found[1], found[5]), (777, 777));
    assert_eq!((found[3], found[7]), (0, 0));
    assert!(f32::from_bits(found[2]).is_nan() && f32::from_bits(found[6]) == f32::INFINITY);
}

/// Asserts that an invalid value is found at each of these places, with and without a histogram.
fn assert_found(kind: RowKind, value: f32, places: &[usize], (vocab, threads): (usize, u32)) {
    let params: Vec<_> = (0..2 * places.len())
        .map(|row| SamplingParams { top_p: [0.9, 1.0][row % 2], ..SamplingParams::default() })
        .collect();
    let of = |row: usize, i| if i == places[row / 2] { value } else { bell(row, i).abs() };
    let rows = Rows::<f32>::new((params.len(), vocab), (1, 0), of);
    let found = outcomes(&rows, kind, &params, Launch::one_cta(threads, 0));
    let found: Vec<_> = found.chunks(ROW_OUTCOME_WORDS).map(|row| (row[0], row[1] as usize)).collect();
    let expected: Vec<_> = (0..params.len()).map(|row| (INVALID_VALUE, places[row / 2])).collect();
    assert_eq!(found, expected);
}

/// At the ends, and in all elements of the vectors of a lane, of its first loads and of a full step after them.
#[test]
fn finds_an_invalid_value_anywhere() {
    let of_lane =
        |first: usize, count| (0..count).flat_map(move |i| [0, 1, 2, 3].map(|e| first + 128 * i + e));
    let ends = [0, 1, 2, 3, 2596, 2599, 2600];
    let places: Vec<usize> = ends.into_iter().chain(of_lane(15, 16)).collect();
    let later: Vec<usize> = of_lane(1024 + 15, 8).collect();
    for (kind, value) in
        [(RowKind::Logits, f32::NAN), (RowKind::Probs, -1.0), (RowKind::Probs, f32::INFINITY)]
    {
        assert_found(kind, value, &places, (2601, 128));
        assert_found(kind, value, &later, (4500, 64));
    }
}

#[test]
fn rejects_unsupported_thread_counts() {
    let error = sample::<f32>("s", RowKind::Probs, RowCtas { ctas: 1, threads: 96 }).expect_err("refused");
    assert_eq!(error.to_string(), "kernel s: threads = 96, expected a power of two in 64..=1024");
    let error = sample::<f32>("s", RowKind::Probs, RowCtas { ctas: 3, threads: 64 }).expect_err("refused");
    assert_eq!(
        error.to_string(),
        "kernel s: ctas = 3 of 64 threads, expected 1, 2, 4 or 8, and at most 8192 threads"
    );
}

/// Probabilities over the sum of a row, against f64; the row begins with its maximum.
#[test]
fn probabilities_have_the_accuracy_of_f32() {
    let temperatures = [1.0, 0.7, 3.0, 1e-3, 1e-45, 1e-39, 3e38, 0.999_999_9];
    let vocab = 3000;
    let logit = |row: usize, i: usize| match i {
        0 => 0.0,
        _ if i % 100 == 7 => f32::NEG_INFINITY,
        _ => -(temperatures[row] * (i as f32 * 0.04)).max(temperatures[row]),
    };
    let rows = Rows::<f32>::new((8, vocab), (1, 0), logit);
    let params = temperatures.map(|temperature| SamplingParams { temperature, ..SamplingParams::default() });
    let config = SampleConfig { kind: RowKind::Logits, threads: 64 };
    let kernel = distribution::<f32, f32>("distribution", config).expect("a valid kernel");
    let mut memory = Memory::new();
    let scores = rows.load(&mut memory);
    let requests = requests(&params, &mut memory);
    let to = memory.alloc(8 * vocab * 4);
    let stride = || Arg::U64(vocab as u64);
    let args = [Arg::U64(scores), Arg::U64(to), stride(), stride(), Arg::U32(vocab as u32)];
    run(&kernel, 8, &[&args[..], &requests.args()].concat(), (0, &mut memory));
    let found: Vec<f32> = memory.read(to, 8 * vocab).expect("probabilities");
    for (row, found) in found.chunks(vocab).enumerate() {
        let weight = |i| (f64::from(logit(row, i)) / f64::from(temperatures[row])).exp();
        let sum: f64 = (0..vocab).map(weight).sum();
        for (i, &found) in found.iter().enumerate() {
            let expected = weight(i) / sum;
            // 1.3 ulp of the weight, half an ulp of the quotient, rounding of the logit's distance, subnormal results
            let bound = expected * 2_f64.powi(-22) + 2_f64.powi(-148);
            assert!(
                (f64::from(found) - expected).abs() <= bound,
                "row {row}, {i}: {found:e}, expected {expected:e}"
            );
        }
    }
}
