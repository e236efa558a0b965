//! Top-k selection with its tie rules, and log-probabilities with ranks.

use crate::arrays::{Array, DTYPES, Layout, random};
use tilewright::{
    Backend, Cpu, Dtype, Result,
    reference::sampling::{Filters, filtered, largest, log_softmax, softmax},
    sampling::{Choice, Logprobs, SamplingParams, TieBreak, TopK, TopKTies, logprobs, top_k},
};

crate::judge_backends!(
    top_k_selects_what_sorting_selects,
    a_row_with_nan_selects_nothing,
    raw_logprobs_match_the_softmax,
    processed_logprobs_match_the_sampling_distribution,
    logprobs_errors_name_arguments_and_rows
);

/// Scores with many ties, zeros of both signs and -inf.
pub(super) fn scores(count: usize, seed: u64) -> Vec<f32> {
    let round = |(i, x): (usize, f32)| match i % 13 {
        0 => -0.0,
        5 => f32::NEG_INFINITY,
        _ => (2.0 * x).round() / 2.0,
    };
    random(count, seed).into_iter().enumerate().map(round).collect()
}

fn select<B: Backend>(backend: &B, scores: &Array, top: TopK) -> (Array, Vec<i32>) {
    let mut values = Array::zeros(dtype_of(scores), &[scores.shape[0], top.k], Layout::Padded);
    let mut indices = vec![7; scores.shape[0] * top.k];
    top_k(backend, scores.view(), top, values.view_mut(), &mut indices).unwrap();
    assert!(values.gaps_untouched());
    (values, indices)
}

fn dtype_of(scores: &Array) -> Dtype {
    scores.view().dtype()
}

fn top_k_selects_what_sorting_selects<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        for (rows, vocab) in [(0, 3), (1, 1), (5, 50), (3, 257), (2, 5000)] {
            let scores = Array::new(dtype, &[rows, vocab], Layout::Padded, &scores(rows * vocab, 5));
            let widths = [1, 2, 20, 50, 257, 5000].into_iter().filter(|&k| k <= vocab);
            for (at, k) in widths.enumerate() {
                let ties = [TieBreak::Lowest, TieBreak::Highest];
                // a slow device has every width, and both rules in turn
                let few = if crate::judge::stride() > 1 { &ties[at % 2..][..1] } else { &ties };
                few.iter().for_each(|&ties| assert_selects(backend, &scores, k, ties));
            }
        }
    }
}

fn assert_selects<B: Backend>(backend: &B, scores: &Array, k: usize, ties: TieBreak) {
    let vocab = scores.shape[1];
    let exact = |row: &[f64]| largest(row, k, ties == TieBreak::Highest);
    let expected: Vec<_> = scores.values().chunks(vocab).flat_map(exact).collect();
    let (values, indices) = select(backend, scores, TopK { k, ties, sorted: true });
    let what = format!("{} {:?} k={k} {ties:?}", dtype_of(scores), scores.shape);
    assert!(indices.iter().map(|&i| i as usize).eq(expected.iter().copied()), "{what}");
    let bits = scores.bits();
    for (slot, found) in values.bits().into_iter().enumerate() {
        assert_eq!(found, bits[slot / k * vocab + expected[slot]], "{what}: bits of {slot}");
    }
    let (_, unsorted) = select(backend, scores, TopK { k, ties, sorted: false });
    for (found, expected) in unsorted.chunks(k).zip(expected.chunks(k)) {
        let mut ascending: Vec<_> = expected.iter().map(|&i| i as i32).collect();
        ascending.sort_unstable();
        assert_eq!(found, ascending, "{what}, unsorted");
    }
}

fn a_row_with_nan_selects_nothing<B: Backend>([backend]: &[B; 1]) {
    let values = [1.0, 2.0, 3.0, 1.0, f32::NAN, 3.0];
    let scores = Array::new(Dtype::F16, &[2, 3], Layout::Dense, &values);
    let (values, indices) = select(backend, &scores, TopK { k: 2, ties: TieBreak::Lowest, sorted: true });
    assert_eq!(indices, [2, 1, -1, -1]);
    assert_eq!(values.values()[..2], [3.0, 2.0]);
    assert!(values.values()[2..].iter().all(|value| value.is_nan()));
}

#[test]
fn top_k_refuses_by_name() {
    let scores = Array::zeros(Dtype::F32, &[2, 8], Layout::Dense);
    let refuse = |k, shape: &[usize], dtype, len| {
        let mut values = Array::zeros(dtype, shape, Layout::Dense);
        let options = TopK { k, ties: TieBreak::Lowest, sorted: false };
        let result = top_k(
            &Cpu::with_threads(1).unwrap(),
            scores.view(),
            options,
            values.view_mut(),
            &mut vec![0; len],
        );
        result.unwrap_err().to_string()
    };
    assert_eq!(refuse(0, &[2, 1], Dtype::F32, 2), "sampling.top_k: k = 0 is not in 1..=8");
    assert_eq!(refuse(9, &[2, 9], Dtype::F32, 18), "sampling.top_k: k = 9 is not in 1..=8");
    assert_eq!(
        refuse(3, &[2, 4], Dtype::F32, 6),
        "sampling.top_k: values has shape [2, 4], expected [rows, k] = [2, 3]"
    );
    assert_eq!(refuse(3, &[2, 3], Dtype::Bf16, 6), "sampling.top_k: values is bf16, expected f32");
    assert_eq!(
        refuse(3, &[2, 3], Dtype::F32, 5),
        "sampling.top_k: indices has 5 elements, expected rows x k = 2 x 3"
    );
}

fn query_logprobs<B: Backend>(
    backend: &B,
    logits: &Array,
    params: Option<&[SamplingParams]>,
    choices: &[Choice],
) -> Vec<Result<Logprobs>> {
    let missing = Err(tilewright::Error::new("test", "not written"));
    let mut out = vec![missing; choices.len()];
    logprobs(backend, logits.view(), params, choices, &mut out).unwrap();
    out
}

/// Compares logprobs with the exact ones; `order` is by rank.
fn assert_logprobs(logprobs: &Logprobs, exact: &[f64], order: &[usize], choice: Choice) {
    let all = std::iter::once(&logprobs.chosen).chain(&logprobs.top);
    for (i, found) in all.enumerate() {
        let expected = exact[found.token as usize];
        let close = (f64::from(found.logprob) - expected).abs() <= 1e-6 * (1.0 + expected.abs());
        assert!(close || f64::from(found.logprob) == expected, "{found:?}: expected {expected}");
        assert_eq!(order[found.rank as usize - 1], found.token as usize, "rank of {found:?}");
        assert!(i == 0 || found.rank as usize == i, "{found:?} is entry {i}");
    }
    assert_eq!((logprobs.chosen.token, logprobs.top.len()), (choice.token, choice.top_n as usize));
}

fn raw_logprobs_match_the_softmax<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        for (rows, vocab) in [(0, 4), (1, 1), (5, 50), (3, 5000)] {
            let mut values = scores(rows * vocab, 6);
            values.iter_mut().step_by(31).for_each(|value| *value -= 200.0);
            let logits = Array::new(dtype, &[rows, vocab], Layout::Padded, &values);
            let choice = |row: usize| Choice {
                token: (row * 17 % vocab) as u32,
                top_n: [0u32, 1, 7][row % 3].min(vocab as u32),
            };
            let choices: Vec<_> = (0..rows).map(choice).collect();
            let results = query_logprobs(backend, &logits, None, &choices);
            for (row, values) in logits.values().chunks(vocab).enumerate() {
                let logprobs = results[row].as_ref().unwrap();
                let order = largest(values, vocab, false);
                assert_logprobs(logprobs, &log_softmax(values), &order, choices[row]);
            }
        }
    }
}

fn processed_logprobs_match_the_sampling_distribution<B: Backend>([backend]: &[B; 1]) {
    let plain = SamplingParams::default();
    let logits = Array::new(Dtype::F32, &[1, 50], Layout::Dense, &random(50, 7));
    for params in [
        SamplingParams { temperature: 0.6, ..plain },
        SamplingParams { temperature: 1.7, top_k: Some(9), ..plain },
        SamplingParams { top_p: 0.8, ..plain },
        SamplingParams { temperature: 0.0, ..plain },
    ] {
        let filters = Filters {
            top_k: params.top_k.map(|k| k as usize),
            top_p: (params.top_p < 1.0).then_some(f64::from(params.top_p)),
            ..Filters::default()
        };
        let probs = filtered(&softmax(&logits.values(), f64::from(params.temperature)), &filters);
        let exact: Vec<f64> = probs.iter().map(|p| p.ln()).collect();
        let order = largest(&probs, 50, false);
        for token in [0, 17, order[0], order[3]] {
            let choice = Choice { token: token as u32, top_n: 12 };
            let logprobs = query_logprobs(backend, &logits, Some(&[params]), &[choice]).remove(0).unwrap();
            assert_logprobs(&logprobs, &exact, &order, choice);
        }
    }
    // the tie rule drops the first of two equal tokens, so its log-probability is -inf
    let ties = Array::new(Dtype::F32, &[1, 3], Layout::Dense, &[1.0, 1.0, 0.0]);
    let last = SamplingParams { top_k: Some(1), top_k_ties: TopKTies::HighestIndex, ..plain };
    let logprobs =
        query_logprobs(backend, &ties, Some(&[last]), &[Choice { token: 0, top_n: 1 }]).remove(0).unwrap();
    assert_eq!((logprobs.chosen.logprob, logprobs.chosen.rank), (f32::NEG_INFINITY, 2));
    assert_eq!((logprobs.top[0].token, logprobs.top[0].logprob), (1, 0.0));
}

fn logprobs_errors_name_arguments_and_rows<B: Backend>([backend]: &[B; 1]) {
    let inf = f32::INFINITY;
    let values = [[1.0, f32::NAN], [-inf, -inf], [0.0, inf], [0.0, 0.0]].concat();
    let logits = Array::new(Dtype::F32, &[4, 2], Layout::Dense, &values);
    let choice = Choice { token: 1, top_n: 2 };
    let out = query_logprobs(backend, &logits, None, &[choice; 4]);
    let texts: Vec<_> = out[..3].iter().map(|row| row.as_ref().unwrap_err().to_string()).collect();
    assert_eq!(
        texts,
        [
            "sampling.logprobs: request 0: logits hold NaN at token 1",
            "sampling.logprobs: request 1: every logit is -inf",
            "sampling.logprobs: request 2: logits hold inf at token 1",
        ]
    );
    assert_eq!(out[3].as_ref().unwrap().chosen.rank, 2);

    let refuse = |params: Option<&[SamplingParams]>, choices: &[Choice], len| {
        let mut out = vec![out[3].clone(); len];
        let result = logprobs(backend, logits.view(), params, choices, &mut out);
        result.unwrap_err().to_string()
    };
    let with = |bad| [choice, bad, choice, choice];
    assert_eq!(refuse(None, &[choice; 3], 4), "sampling.logprobs: choices has 3 elements, expected rows = 4");
    assert_eq!(
        refuse(None, &with(Choice { token: 2, top_n: 0 }), 4),
        "sampling.logprobs: request 1: token 2 is not below vocab = 2"
    );
    assert_eq!(
        refuse(None, &with(Choice { token: 0, top_n: 3 }), 4),
        "sampling.logprobs: request 1: top_n = 3 is above vocab = 2"
    );
    assert_eq!(refuse(None, &[choice; 4], 3), "sampling.logprobs: out has 3 elements, expected rows = 4");
    let hot = SamplingParams { temperature: -1.0, ..SamplingParams::default() };
    assert_eq!(
        refuse(Some(&[hot; 4]), &[choice; 4], 4),
        "sampling.logprobs: request 0: temperature = -1 is not a finite number >= 0"
    );
}
