//! Sampling: tokens kept by the filters, greedy sampling, invalid rows, batch and thread invariance.
//! `distribution.rs` tests the distributions, `errors.rs` the error texts.

use crate::{Array, DTYPES, F32_UNIT, Layout, pairwise, random};
use tilewright::{
    Backend, Cpu, Dtype,
    reference::sampling::{Filters, filtered, kth_largest, softmax as exact_softmax},
    sampling::{
        Sampled, SamplingParams,
        rng::{philox4x32_10, uniform},
        sample, sampling_from_probs, softmax, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs,
    },
};

crate::judge_backends!(
    tokens_are_batch_invariant,
    softmax_matches_the_oracle,
    renormalising_filters_keep_what_the_oracle_keeps,
    top_k_keeps_all_ties_and_top_p_all_ties_at_its_threshold,
    top_k_mask_keeps_logits_and_their_bits,
    temperature_0_is_greedy_with_lowest_index_ties,
    extreme_temperatures_reach_their_limits,
    bad_rows_report_errors_and_other_rows_are_drawn,
    filters_cover_the_full_range_of_f32
);

const SHAPES: [(usize, usize); 6] = [(0, 4), (1, 1), (2, 3), (5, 50), (3, 257), (2, 5000)];

/// Positive numbers with many ties in the 16-bit types, and zeros.
fn weights(count: usize, seed: u64) -> Vec<f32> {
    random(count, seed).into_iter().map(|x| if x < -3.0 { 0.0 } else { (1.5 * x).exp() }).collect()
}

fn draw<B: Backend>(backend: &B, logits: &Array, params: &[SamplingParams]) -> Vec<Sampled> {
    let mut out = vec![Ok(0); params.len()];
    sample(backend, logits.view(), params, &mut out).unwrap();
    out
}

/// Known-answer test of the authors (Random123, tests/kat_vectors).
#[test]
fn philox_matches_the_published_numbers() {
    let cases = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([!0; 4], [!0; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (counter, key, expected) in cases {
        assert_eq!(philox4x32_10(counter, key), expected);
    }
    assert_eq!(uniform(0, 0), (0x6627_e8d5_e169_c58du64 >> 11) as f64 / (1u64 << 53) as f64);
    let (seed, offset) = (0x299f_31d0_a409_3822, 0x85a3_08d3_243f_6a88);
    let block = philox4x32_10([0x243f_6a88, 0x85a3_08d3, 0, 0], [0xa409_3822, 0x299f_31d0]);
    let expected = (u64::from(block[0]) << 32 | u64::from(block[1])) >> 11;
    assert_eq!(uniform(seed, offset), expected as f64 / (1u64 << 53) as f64);
}

/// All combinations of dtype, shape, layout and one of `values`; on a slow device a few in which every pair of two of them occurs.
fn each_case<T: Copy>(values: &[T], test: impl Fn(Dtype, (usize, usize), Layout, T)) {
    let levels = [DTYPES.len(), SHAPES.len(), 2, values.len()];
    let rows = if crate::judge::stride() > 1 {
        pairwise(&levels)
    } else {
        let all = 0..levels.iter().product();
        let digits =
            |row: usize| levels.iter().scan(row, |rest, n| Some(std::mem::replace(rest, *rest / n) % n));
        all.map(|row| digits(row).collect()).collect()
    };
    for row in rows {
        let layout = [Layout::Dense, Layout::Padded][row[2]];
        test(DTYPES[row[0]], SHAPES[row[1]], layout, values[row[3]]);
    }
}

fn softmax_matches_the_oracle<B: Backend>([backend]: &[B; 1]) {
    each_case(&[0.0, 1e-6, 0.3, 1.0, 1e6], |dtype, (rows, vocab), layout, temperature: f32| {
        let logits = Array::random(dtype, &[rows, vocab], layout, 1);
        let mut out = Array::zeros(dtype, &[rows, vocab], layout);
        softmax(backend, logits.view(), &vec![temperature; rows], out.view_mut()).unwrap();
        let exact = |row| exact_softmax(row, f64::from(temperature));
        let expected: Vec<f64> = logits.values().chunks(vocab).flat_map(exact).collect();
        // The exponent is a difference and a quotient, each rounded once. Its error is relative to the exponent and
        // absolute in the result, which may be below f32's normal range.
        let slack = |i: usize| {
            let exponent = -(expected[i].max(1e-300)).ln();
            expected[i] * (4.0 + 2.0 * exponent) * F32_UNIT + f64::from(f32::MIN_POSITIVE)
        };
        out.assert_close(&expected, slack, &format!("{dtype} {rows}x{vocab} T={temperature}"));
    });
}

/// A filter that renormalises what it keeps.
#[derive(Debug, Clone, Copy)]
enum Renorm {
    TopK(u32),
    TopP(f32),
}

fn renormalising_filters_keep_what_the_oracle_keeps<B: Backend>([backend]: &[B; 1]) {
    let top_k = [1, 2, 7, 49, 50, 51, 1000, u32::MAX].map(Renorm::TopK);
    let top_p = [1e-7, 0.1, 0.37, 0.9, 0.999, 1.0].map(Renorm::TopP);
    each_case(&[&top_k[..], &top_p].concat(), |dtype, (rows, vocab), layout, renorm| {
        let probs = Array::new(dtype, &[rows, vocab], layout, &weights(rows * vocab, 3));
        let mut out = Array::zeros(dtype, &[rows, vocab], layout);
        let filters = match renorm {
            Renorm::TopK(k) => {
                top_k_renorm_probs(backend, probs.view(), &vec![k; rows], out.view_mut()).unwrap();
                Filters { top_k: Some(k as usize), ..Filters::default() }
            }
            Renorm::TopP(p) => {
                top_p_renorm_probs(backend, probs.view(), &vec![p; rows], out.view_mut()).unwrap();
                Filters { top_p: Some(f64::from(p)), ..Filters::default() }
            }
        };
        let expected: Vec<f64> =
            probs.values().chunks(vocab).flat_map(|row| filtered(row, &filters)).collect();
        let what = format!("{dtype} {rows}x{vocab} {renorm:?}");
        out.assert_close(&expected, |i| expected[i] * 2.0 * F32_UNIT, &what);
        for (i, (actual, expected)) in out.values().iter().zip(&expected).enumerate() {
            // f16 may round the smallest probabilities to 0
            assert!(*expected != 0.0 || *actual == 0.0, "{what}: token {i} should have been dropped");
            assert!(*expected < 1e-6 || *actual > 0.0, "{what}: token {i} should have been kept");
        }
    });
}

fn top_k_keeps_all_ties_and_top_p_all_ties_at_its_threshold<B: Backend>([backend]: &[B; 1]) {
    let probs = Array::new(Dtype::F32, &[1, 6], Layout::Dense, &[0.125, 0.25, 0.125, 0.25, 0.125, 0.125]);
    let mut out = Array::zeros(Dtype::F32, &[1, 6], Layout::Dense);
    top_k_renorm_probs(backend, probs.view(), &[1], out.view_mut()).unwrap();
    assert_eq!(out.values(), [0.0, 0.5, 0.0, 0.5, 0.0, 0.0]);
    top_k_renorm_probs(backend, probs.view(), &[3], out.view_mut()).unwrap();
    assert_eq!(out.values(), probs.values());
    // exactly half: the two largest reach it
    top_p_renorm_probs(backend, probs.view(), &[0.5], out.view_mut()).unwrap();
    assert_eq!(out.values(), [0.0, 0.5, 0.0, 0.5, 0.0, 0.0]);
    top_p_renorm_probs(backend, probs.view(), &[0.51], out.view_mut()).unwrap();
    assert_eq!(out.values(), probs.values());
}

fn top_k_mask_keeps_logits_and_their_bits<B: Backend>([backend]: &[B; 1]) {
    each_case(&[1, 2, 50, 5000], |dtype, (rows, vocab), layout, k| {
        let mut values = random(rows * vocab, 4);
        values.iter_mut().step_by(5).for_each(|value| *value = f32::NEG_INFINITY);
        values.iter_mut().skip(1).step_by(7).for_each(|value| *value = -0.0);
        let logits = Array::new(dtype, &[rows, vocab], layout, &values);
        let mut out = Array::zeros(dtype, &[rows, vocab], layout);
        top_k_mask_logits(backend, logits.view(), &vec![k; rows], out.view_mut()).unwrap();
        let masked = |row: &[f64]| {
            let least = kth_largest(row, k as usize);
            row.iter().map(|&x| if x >= least { x } else { f64::NEG_INFINITY }).collect::<Vec<_>>()
        };
        let expected: Vec<f64> = logits.values().chunks(vocab).flat_map(masked).collect();
        assert_eq!(out.values(), expected, "{dtype} {rows}x{vocab} k={k}");
    });
}

fn temperature_0_is_greedy_with_lowest_index_ties<B: Backend>([backend]: &[B; 1]) {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let filters = SamplingParams { top_k: Some(3), top_p: 0.5, min_p: 0.5, seed: 9, ..greedy };
    for dtype in DTYPES {
        let logits = [1.0, 7.0, -3.0, 7.0, f32::NEG_INFINITY, -0.0, 0.0, -0.0];
        let logits = Array::new(dtype, &[2, 4], Layout::Padded, &logits);
        assert_eq!(draw(backend, &logits, &[greedy, greedy]), [Ok(1), Ok(1)]);
        assert_eq!(draw(backend, &logits, &[filters, filters]), [Ok(1), Ok(1)]);
    }
}

fn extreme_temperatures_reach_their_limits<B: Backend>([backend]: &[B; 1]) {
    let logits = Array::new(Dtype::F32, &[1, 4], Layout::Dense, &[1.0, 1.001, f32::NEG_INFINITY, -2.0]);
    let count = if crate::judge::stride() > 1 { 30 } else { 300 };
    let draws = |temperature: f32| {
        let params = |offset| SamplingParams { temperature, offset, ..SamplingParams::default() };
        let mut counts = [0; 4];
        for offset in 0..count {
            counts[draw(backend, &logits, &[params(offset)])[0].clone().unwrap() as usize] += 1;
        }
        counts
    };
    for tiny in [1e-6, f32::MIN_POSITIVE, 1e-45] {
        assert_eq!(draws(tiny), [0, count as usize, 0, 0], "temperature {tiny}");
    }
    for large in [1e6, f32::MAX] {
        let counts = draws(large);
        assert!(
            counts[2] == 0 && [0, 1, 3].iter().all(|&i| counts[i] > count as usize / 5),
            "{large}: {counts:?}"
        );
    }
}

fn bad_rows_report_errors_and_other_rows_are_drawn<B: Backend>([backend]: &[B; 1]) {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows = [[-inf, 2.0, -inf], [1.0, nan, 3.0], [-inf, -inf, -inf], [0.0, 1.0, inf], [-inf, -inf, 0.0]];
    let logits = Array::new(Dtype::Bf16, &[5, 3], Layout::Dense, &rows.concat());
    for temperature in [0.0, 1.0] {
        let params = SamplingParams { temperature, top_p: 0.9, top_k: Some(2), ..SamplingParams::default() };
        let texts: Vec<_> = draw(backend, &logits, &[params; 5])
            .into_iter()
            .map(|row| row.map_err(|e| e.to_string()))
            .collect();
        let bad = |text: &str| Err(format!("sampling.sample: {text}"));
        assert_eq!(
            texts,
            [
                Ok(1),
                bad("request 1: logits hold NaN at token 1"),
                bad("request 2: every logit is -inf"),
                bad("request 3: logits hold inf at token 2"),
                Ok(2),
            ]
        );
    }

    let rows = [[0.0, 1.0], [0.0, 0.0], [0.5, -0.5], [nan, 1.0], [inf, 1.0]];
    let probs = Array::new(Dtype::F32, &[5, 2], Layout::Dense, &rows.concat());
    let mut out = vec![Ok(7); 5];
    sampling_from_probs(backend, probs.view(), &[SamplingParams::default(); 5], &mut out).unwrap();
    let texts: Vec<_> = out.into_iter().map(|row| row.map_err(|e| e.to_string())).collect();
    let bad = |text: &str| Err(format!("sampling.sampling_from_probs: {text}"));
    assert_eq!(
        texts,
        [
            Ok(1),
            bad("request 1: every probability is 0"),
            bad("request 2: probabilities hold -0.5 at token 1"),
            bad("request 3: probabilities hold NaN at token 0"),
            bad("request 4: probabilities hold inf at token 0"),
        ]
    );

    let mut out = Array::zeros(Dtype::F32, &[5, 2], Layout::Dense);
    top_p_renorm_probs(backend, probs.view(), &[0.5; 5], out.view_mut()).unwrap();
    assert!(out.values()[..2] == [0.0, 1.0] && out.values()[2..].iter().all(|v| v.is_nan()));
    top_k_mask_logits(backend, probs.view(), &[1; 5], out.view_mut()).unwrap();
    assert!(out.values()[6..8].iter().all(|v| v.is_nan()) && !out.values()[8].is_nan());
}

/// Parameters that all differ between requests.
fn mixed_params(rows: usize) -> Vec<SamplingParams> {
    let params = |i: usize| SamplingParams {
        temperature: [1.0, 0.7, 0.0, 3.0][i % 4],
        top_k: [None, Some(40), Some(3)][i % 3],
        top_p: [0.9, 1.0][i % 2],
        min_p: [0.0, 0.0, 0.05][i % 3],
        seed: i as u64 * 77,
        offset: 1000 - i as u64,
        ..SamplingParams::default()
    };
    (0..rows).map(params).collect()
}

fn tokens_are_batch_invariant<B: Backend>([backend]: &[B; 1]) {
    let (rows, vocab) = if crate::judge::stride() > 1 { (4, 5000) } else { (24, 5000) };
    let params = mixed_params(rows);
    for dtype in DTYPES {
        let logits = Array::random(dtype, &[rows, vocab], Layout::Dense, 8);
        let batch = draw(backend, &logits, &params);
        for (row, values) in logits.values().chunks(vocab).enumerate() {
            let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
            let alone = Array::new(dtype, &[1, vocab], Layout::Padded, &values);
            assert_eq!(draw(backend, &alone, &params[row..=row]), batch[row..=row]);
        }
    }
}

#[test]
fn tokens_are_thread_invariant() {
    let (rows, vocab) = (24, 5000);
    let params = mixed_params(rows);
    for dtype in DTYPES {
        let logits = Array::random(dtype, &[rows, vocab], Layout::Dense, 8);
        let [one, four] = [1, 4].map(|threads| draw(&Cpu::with_threads(threads).unwrap(), &logits, &params));
        assert_eq!(one, four);
        let distinct: std::collections::HashSet<_> = one.iter().flatten().collect();
        assert!(distinct.len() > 10, "rows draw for themselves: {one:?}");
    }
}

/// The threshold search covers all magnitudes.
fn filters_cover_the_full_range_of_f32<B: Backend>([backend]: &[B; 1]) {
    let values = [0.0, 1e-45, 3e-45, f32::MIN_POSITIVE, 1e-20, 1.0, f32::MAX / 2.0, f32::MAX];
    let probs = Array::new(Dtype::F32, &[1, 8], Layout::Dense, &values);
    for k in 1..=8 {
        let mut out = Array::zeros(Dtype::F32, &[1, 8], Layout::Dense);
        top_k_mask_logits(backend, probs.view(), &[k], out.view_mut()).unwrap();
        let kept = out.values().iter().filter(|value| value.is_finite()).count();
        assert_eq!(kept, k as usize);
        let params = SamplingParams { top_k: Some(k), top_p: 1e-45, ..SamplingParams::default() };
        let mut token = [Ok(0)];
        sampling_from_probs(backend, probs.view(), &[params], &mut token).unwrap();
        assert_eq!(token, [Ok(7)]);
    }
    let tiny = Array::new(Dtype::F32, &[1, 3], Layout::Dense, &[1e-45, 3e-45, 0.0]);
    let mut out = Array::zeros(Dtype::F32, &[1, 3], Layout::Dense);
    top_p_renorm_probs(backend, tiny.view(), &[0.6], out.view_mut()).unwrap();
    assert_eq!(out.values(), [0.0, 1.0, 0.0]);
}
