//! The exact distributions that samplers must draw from, in f64, by sorting.

/// Which filters apply, in the words of their definitions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Filters {
    /// Keep what is at least as probable as the k-th most probable.
    pub top_k: Option<usize>,
    /// Keep the most probable until they reach this share.
    pub top_p: Option<f64>,
    /// Keep what is at least this fraction of the most probable.
    pub min_p: Option<f64>,
    /// Whether top-p judges the distribution before top-k.
    pub joint: bool,
}

/// Softmax of `logits / temperature`; at temperature 0 all mass is on the first of the largest.
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
    let by_k = filters.top_k.map_or(all.clone(), |k| keep(&all, kth_largest(&all, k)));
    let judged = if filters.joint { all.clone() } else { normalise(by_k.clone()) };
    let by_p = filters.top_p.map_or(judged.clone(), |p| keep(&judged, nucleus(&judged, p)));
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

/// The smallest of the largest probabilities that together reach `p`.
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

fn keep(probs: &[f64], least: f64) -> Vec<f64> {
    probs.iter().map(|&p| if p >= least { p } else { 0.0 }).collect()
}

fn normalise(weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}
