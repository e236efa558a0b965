//! Chi-square test of drawn tokens against an exact distribution, at p = 1e-4.

use tilewright::{Backend, SamplingParams, View, sampling::sample};

/// The critical value that a chi-square variable of `freedom` degrees exceeds with probability 1e-4 (Wilson–Hilferty
/// approximation, accurate to 1 % here).
fn critical(freedom: usize) -> f64 {
    let spread = 2.0 / (9.0 * freedom as f64);
    freedom as f64 * (1.0 - spread + 3.719 * spread.sqrt()).powi(3)
}

/// Number of draws per distribution.
pub(crate) fn draws_wanted() -> usize {
    40_000 / crate::judge::stride()
}

/// Draws from one row of logits with a row stride of 0, and with consecutive offsets.
pub(crate) fn draws<B: Backend>(backend: &B, logits: &[f32], params: SamplingParams) -> Vec<u32> {
    let logits = View::strided(logits, &[draws_wanted(), logits.len()], &[0, 1]).unwrap();
    let params: Vec<_> =
        (0..draws_wanted() as u64).map(|offset| SamplingParams { offset, ..params }).collect();
    let mut out = vec![Ok(0); draws_wanted()];
    sample(backend, logits, &params, &mut out).unwrap();
    out.into_iter().map(Result::unwrap).collect()
}

/// Fails if a token of probability 0 was drawn, or the counts are too unlikely. Tokens with an expected count below 5
/// share one cell.
pub(crate) fn assert_drawn_from(expected: &[f64], tokens: &[u32], what: &str) {
    let mut counts = vec![0.0; expected.len()];
    tokens.iter().for_each(|&token| counts[token as usize] += 1.0);
    let (mut statistic, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
    let mut cell = |count: f64, mean: f64| {
        statistic += (count - mean).powi(2) / mean;
        cells += 1;
    };
    for (token, (&count, &probability)) in counts.iter().zip(expected).enumerate() {
        let mean = probability * tokens.len() as f64;
        assert!(
            count == 0.0 || mean > 0.0,
            "{what}: token {token} was filtered out, yet drawn {count} times"
        );
        if mean >= 5.0 {
            cell(count, mean);
        } else {
            rare = (rare.0 + count, rare.1 + mean);
        }
    }
    if rare.1 >= 5.0 {
        cell(rare.0, rare.1);
    }
    if cells > 1 {
        assert!(statistic < critical(cells - 1), "{what}: chi-square {statistic} with {cells} cells");
    }
}
