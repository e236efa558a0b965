//! The chi-square test of drawn tokens against an exact distribution; critical values are those of p = 1e-4.

/// The value that a chi-square variable of `freedom` degrees exceeds once in 10,000 times (Wilson and Hilferty's
/// approximation, good to 1 % here).
fn critical(freedom: usize) -> f64 {
    let spread = 2.0 / (9.0 * freedom as f64);
    freedom as f64 * (1.0 - spread + 3.719 * spread.sqrt()).powi(3)
}

/// Fails if a token of probability 0 was drawn, or the counts are too unlikely. Tokens expected fewer than 5 times
/// are counted as one.
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
