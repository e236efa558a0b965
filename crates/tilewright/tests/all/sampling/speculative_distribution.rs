//! Chi-square tests of speculative sampling: for any draft, single tokens and token pairs follow the target's distribution.
//!
//! Both models are Markov chains. Tokens are collected over as many calls as needed, with offsets as documented, and drafts
//! are drawn with the same seeds and offsets.

use crate::{assert_drawn_from, draws_wanted, random};
use tilewright::{
    Backend, SamplingParams, View,
    reference::sampling::{Filters, filtered, softmax},
    sampling::{ChainCounts, ChainOutput, Drafts, Scores, chain_speculative_sampling, sampling_from_probs},
};

crate::judge_backends!(
    two_tokens_follow_the_target_for_any_draft,
    two_tokens_follow_a_target_that_excludes_tokens,
    drafts_of_any_length_follow_the_target,
    filtered_and_unnormalised_targets_are_followed
);

const VOCAB: usize = 6;
const START: usize = 2;

/// The next-token distribution for each token.
type Markov = Vec<[f32; VOCAB]>;

fn markov(seed: u64, sharpness: f32) -> Markov {
    let row = |logits: &[f32]| {
        let wide: Vec<f64> = logits.iter().map(|&x| f64::from(sharpness * x)).collect();
        let probs = softmax(&wide, 1.0);
        std::array::from_fn(|t| probs[t] as f32)
    };
    random(VOCAB * VOCAB, seed).chunks(VOCAB).map(row).collect()
}

fn one_hot(token: usize) -> Markov {
    vec![std::array::from_fn(|t| if t == token { 1.0 } else { 0.0 }); VOCAB]
}

/// The first two tokens of each request, with drafts of two tokens or of `draft_len`.
fn two_tokens<B: Backend>(
    backend: &B,
    target: &Markov,
    draft: &Markov,
    draft_len: impl Fn(usize) -> usize,
) -> Vec<(usize, usize)> {
    let mut texts: Vec<Vec<usize>> = vec![vec![]; draws_wanted()];
    while texts.iter().any(|text| text.len() < 2) {
        let params: Vec<_> = texts.iter().enumerate().map(|(row, text)| params(row, text.len())).collect();
        let mut lasts: Vec<Vec<usize>> =
            texts.iter().map(|text| vec![text.last().copied().unwrap_or(START)]).collect();
        for position in 0..2 {
            draw_drafts(backend, draft, &params, position, &mut lasts);
        }
        let rows = |model: &Markov, len: usize| -> Vec<f32> {
            lasts.iter().flat_map(|last| last[..len].iter().flat_map(|&t| model[t])).collect()
        };
        let (draft_probs, target_probs) = (rows(draft, 2), rows(target, 3));
        let id = |(row, last): (usize, &Vec<usize>)| {
            let len = draft_len(row);
            [1, 2].map(|i| if i <= len { last[i] as i32 } else { -1 })
        };
        let ids: Vec<i32> = lasts.iter().enumerate().flat_map(id).collect();
        let drafts =
            Drafts { probs: View::new(&draft_probs, &[draws_wanted(), 2, VOCAB]).unwrap(), ids: &ids };
        let target_probs = Scores::Probs(View::new(&target_probs, &[draws_wanted(), 3, VOCAB]).unwrap());
        let mut tokens = vec![0; draws_wanted() * 3];
        let mut chains = vec![Ok(ChainCounts::default()); draws_wanted()];
        let out = ChainOutput { tokens: &mut tokens, chains: &mut chains, totals: None };
        chain_speculative_sampling(backend, drafts, target_probs, &params, out).unwrap();
        for (text, tokens) in texts.iter_mut().zip(tokens.chunks(3)) {
            text.extend(tokens.iter().take_while(|&&t| t >= 0).map(|&t| t as usize));
        }
    }
    texts.into_iter().map(|text| (text[0], text[1])).collect()
}

fn params(row: usize, drawn: usize) -> SamplingParams {
    SamplingParams { seed: row as u64, offset: drawn as u64, ..SamplingParams::default() }
}

/// Appends a token to each draft, drawn with the request's own seed and offset.
fn draw_drafts<B: Backend>(
    backend: &B,
    draft: &Markov,
    params: &[SamplingParams],
    position: u64,
    lasts: &mut [Vec<usize>],
) {
    let rows: Vec<f32> = lasts.iter().flat_map(|last| draft[last[last.len() - 1]]).collect();
    let params: Vec<_> =
        params.iter().map(|&p| SamplingParams { offset: p.offset + position, ..p }).collect();
    let mut drawn = vec![Ok(0); draws_wanted()];
    let view = View::new(&rows, &[draws_wanted(), VOCAB]).unwrap();
    sampling_from_probs(backend, view, &params, &mut drawn).unwrap();
    for (last, token) in lasts.iter_mut().zip(drawn) {
        last.push(token.unwrap() as usize);
    }
}

fn assert_follows(target: &Markov, pairs: &[(usize, usize)], what: &str) {
    let at = |a: usize, b: usize| f64::from(target[START][a]) * f64::from(target[a][b]);
    let first: Vec<f64> = target[START].iter().map(|&p| f64::from(p)).collect();
    let joint: Vec<f64> = (0..VOCAB * VOCAB).map(|i| at(i / VOCAB, i % VOCAB)).collect();
    let firsts: Vec<u32> = pairs.iter().map(|&(a, _)| a as u32).collect();
    let both: Vec<u32> = pairs.iter().map(|&(a, b)| (a * VOCAB + b) as u32).collect();
    assert_drawn_from(&first, &firsts, &format!("{what}: first token"));
    assert_drawn_from(&joint, &both, &format!("{what}: first two tokens"));
}

fn two_tokens_follow_the_target_for_any_draft<B: Backend>([backend]: &[B; 1]) {
    let target = markov(1, 0.7);
    let backwards = target.iter().map(|row| std::array::from_fn(|t| row[VOCAB - 1 - t])).collect();
    let drafts = [
        ("equal", target.clone()),
        ("near", markov(1, 0.5)),
        ("unrelated", markov(2, 1.5)),
        ("backwards", backwards),
        ("uniform", vec![[1.0 / VOCAB as f32; VOCAB]; VOCAB]),
        ("one likely token", one_hot(3)),
        ("one other token", one_hot(0)),
    ];
    for (name, draft) in drafts {
        assert_follows(&target, &two_tokens(backend, &target, &draft, |_| 2), name);
    }
}

fn two_tokens_follow_a_target_that_excludes_tokens<B: Backend>([backend]: &[B; 1]) {
    let mut target = markov(3, 0.7);
    for (t, row) in target.iter_mut().enumerate() {
        row[t] = 0.0;
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|p| *p /= sum);
    }
    assert_follows(&target, &two_tokens(backend, &target, &markov(4, 1.0), |_| 2), "exclusions");
    assert_follows(&one_hot(4), &two_tokens(backend, &one_hot(4), &markov(4, 1.0), |_| 2), "one-hot target");
}

fn drafts_of_any_length_follow_the_target<B: Backend>([backend]: &[B; 1]) {
    let target = markov(5, 0.7);
    assert_follows(&target, &two_tokens(backend, &target, &markov(6, 0.7), |row| row % 3), "lengths 0, 1, 2");
}

/// Weights are normalised, and a filter of the target applies exactly.
fn filtered_and_unnormalised_targets_are_followed<B: Backend>([backend]: &[B; 1]) {
    let (logits, weights) = (random(VOCAB, 7), [0.5f32, 4.0, 1.0, 0.25, 2.0, 3.0]);
    let sampling =
        |row: usize| SamplingParams { temperature: 1.5, top_k: Some(4), top_p: 0.9, ..params(row, 0) };
    let all: Vec<_> = (0..draws_wanted()).map(sampling).collect();
    let draft = vec![weights; VOCAB];
    let mut lasts = vec![vec![START]; draws_wanted()];
    let plain: Vec<_> = (0..draws_wanted()).map(|row| params(row, 0)).collect();
    draw_drafts(backend, &draft, &plain, 0, &mut lasts);
    let ids: Vec<i32> = lasts.iter().map(|last| last[1] as i32).collect();
    let drafts = View::strided(&weights[..], &[draws_wanted(), 1, VOCAB], &[0, 0, 1]).unwrap();
    let target = View::strided(&logits, &[draws_wanted(), 2, VOCAB], &[0, 0, 1]).unwrap();
    let mut tokens = vec![0; draws_wanted() * 2];
    let mut chains = vec![Ok(ChainCounts::default()); draws_wanted()];
    let out = ChainOutput { tokens: &mut tokens, chains: &mut chains, totals: None };
    let drafts = Drafts { probs: drafts, ids: &ids };
    chain_speculative_sampling(backend, drafts, Scores::Logits(target), &all, out).unwrap();

    let wide: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    let filters = Filters { top_k: Some(4), top_p: Some(0.9), ..Filters::default() };
    let expected = filtered(&softmax(&wide, 1.5), &filters);
    let firsts: Vec<u32> = tokens.chunks(2).map(|pair| pair[0] as u32).collect();
    assert_drawn_from(&expected, &firsts, "filtered logits");

    // the acceptance rate is the overlap of the two distributions
    let sum: f32 = weights.iter().sum();
    let overlap: f64 = expected.iter().zip(weights).map(|(q, p)| q.min(f64::from(p / sum))).sum();
    let accepted: u64 = chains.iter().map(|chain| chain.as_ref().unwrap().accepted).sum();
    let deviation = (overlap * (1.0 - overlap) * draws_wanted() as f64).sqrt();
    let distance = accepted as f64 - overlap * draws_wanted() as f64;
    assert!(distance.abs() < 4.0 * deviation, "{accepted} accepted, expected {overlap} of all");
}
