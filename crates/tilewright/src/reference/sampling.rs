//! Exact sampling distributions in f64, by sorting; also penalties, log-softmax and speculative chains.

use crate::sampling::TopKTies;

/// The filters of a distribution.
#[derive(Debug, Clone, Copy, Default)]
pub struct Filters {
    /// Keep tokens at least as probable as the k-th most probable.
    pub top_k: Option<usize>,
    /// Tie rule at the k-th most probable.
    pub ties: TopKTies,
    /// Keep the most probable tokens until their sum reaches this share.
    pub top_p: Option<f64>,
    /// Keep tokens at least this fraction as probable as the most probable.
    pub min_p: Option<f64>,
    /// Whether top-p applies to the distribution before top-k.
    pub joint: bool,
}

/// Softmax of `logits / temperature`; temperature 0 puts all mass on the first maximum.
pub fn softmax(logits: &[f64], temperature: f64) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if temperature == 0.0 {
        let token = logits.iter().position(|&logit| logit == max);
        return (0..logits.len()).map(|i| if Some(i) == token { 1.0 } else { 0.0 }).collect();
    }
    normalise(logits.iter().map(|logit| ((logit - max) / temperature).exp()).collect())
}

/// `probs` filtered and renormalised.
pub fn filtered(probs: &[f64], filters: &Filters) -> Vec<f64> {
    let all = normalise(probs.to_vec());
    let by_k = filters.top_k.map_or(all.clone(), |k| match filters.ties {
        TopKTies::Keep => keep_at_least(&all, kth_largest(&all, k)),
        ties => {
            let chosen = largest(&all, k, ties == TopKTies::HighestIndex);
            (0..all.len()).map(|i| if chosen.contains(&i) { all[i] } else { 0.0 }).collect()
        }
    });
    let top_p_input = if filters.joint { all.clone() } else { normalise(by_k.clone()) };
    let by_p =
        filters.top_p.map_or(top_p_input.clone(), |p| keep_at_least(&top_p_input, nucleus(&top_p_input, p)));
    let least = filters.min_p.unwrap_or(0.0) * kth_largest(&all, 1);
    let kept = |i: usize| by_k[i] > 0.0 && by_p[i] > 0.0 && all[i] >= least;
    normalise((0..all.len()).map(|i| if kept(i) { all[i] } else { 0.0 }).collect())
}

/// The `k`-th largest value, or the smallest if there are fewer.
pub fn kth_largest(values: &[f64], k: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[k.min(sorted.len()) - 1]
}

/// Indices of the `k` largest values in descending order; ties by ascending index, or descending.
pub fn largest(values: &[f64], k: usize, highest_first: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    if highest_first {
        order.reverse();
    }
    // adding 0 makes -0 equal to 0
    order.sort_by(|&a, &b| (values[b] + 0.0).total_cmp(&(values[a] + 0.0)));
    order.truncate(k);
    order
}

/// Natural-log probabilities of a row of logits.
pub fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = logits.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
    logits.iter().map(|logit| logit - max - log_sum).collect()
}

/// Repetition, presence and frequency penalties of one row, token by token.
pub fn penalised(
    logits: &[f64],
    prompt: &[u32],
    output: &[u32],
    [repetition, presence, frequency]: [f64; 3],
) -> Vec<f64> {
    let penalise = |(token, &logit): (usize, &f64)| {
        let of = |list: &[u32]| list.iter().filter(|&&t| t as usize == token).count();
        let repeated = match of(prompt) + of(output) {
            0 => logit,
            _ if logit > 0.0 => logit / repetition,
            _ => logit * repetition,
        };
        let present = if of(output) > 0 { presence } else { 0.0 };
        repeated - frequency * of(output) as f64 - present
    };
    logits.iter().enumerate().map(penalise).collect()
}

/// The distribution after a rejection: the normalised `max(target - draft, 0)`, or the target if that is 0 everywhere.
pub fn residual(draft: &[f64], target: &[f64]) -> Vec<f64> {
    let (draft, target) = (normalise(draft.to_vec()), normalise(target.to_vec()));
    let excess: Vec<f64> = target.iter().zip(&draft).map(|(q, p)| (q - p).max(0.0)).collect();
    if excess.iter().sum::<f64>() > 0.0 { normalise(excess) } else { target }
}

/// The tokens of a draft chain of `(draft, token)` under `targets`, which has one more element than the chain. `random(i)`
/// returns the two random numbers of position `i`.
pub fn chain(
    drafts: &[(&[f64], usize)],
    targets: &[&[f64]],
    random: impl Fn(usize) -> [f64; 2],
) -> Vec<usize> {
    let mut tokens = Vec::new();
    for (i, &(draft, token)) in drafts.iter().enumerate() {
        let [test, draw] = random(i);
        let (p, q) = (normalise(draft.to_vec())[token], normalise(targets[i].to_vec())[token]);
        let acceptance = match q {
            0.0 => 0.0,
            _ => (q / p).min(1.0),
        };
        if test >= acceptance {
            tokens.push(inverse_transform(&residual(draft, targets[i]), draw));
            return tokens;
        }
        tokens.push(token);
    }
    tokens.push(inverse_transform(&normalise(targets[drafts.len()].to_vec()), random(drafts.len())[1]));
    tokens
}

/// Inverse transform: the first token at which the cumulative probability exceeds `u`.
fn inverse_transform(probs: &[f64], u: f64) -> usize {
    let mut sum = 0.0;
    let exceeds = |p: &f64| {
        sum += p;
        sum > u
    };
    let last = probs.iter().rposition(|&p| p > 0.0).unwrap_or_default();
    probs.iter().position(exceeds).unwrap_or(last)
}

/// The top-p threshold: the smallest probability of the nucleus of mass `p`.
fn nucleus(probs: &[f64], p: f64) -> f64 {
    let mut sorted = probs.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let mut sum = 0.0;
    let reaches = |probability: &f64| {
        sum += probability;
        sum >= p
    };
    let at = sorted.iter().position(reaches).unwrap_or(sorted.len() - 1);
    sorted[at]
}

fn keep_at_least(probs: &[f64], least: f64) -> Vec<f64> {
    probs.iter().map(|&p| if p >= least { p } else { 0.0 }).collect()
}

fn normalise(weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}
