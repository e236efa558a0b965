//! Exact top-k and top-p thresholds by radix select, without sorting.
//!
//! 1. Map floats to integers of the same order. Values must not be NaN.
//! 2. For each digit of 11 bits, sum the measures per bucket and select the bucket that reaches the target.
//! 3. The result is the maximum `v` for which `Σ {measure(x) : x >= v}` reaches the target.

use std::ops::Range;

const DIGIT_BITS: u32 = 11;
const BUCKETS: usize = 1 << DIGIT_BITS;

/// The maximum `v` in `values` for which the measures of all values >= `v` sum to at least `target`. If no `v` reaches it, the
/// minimum with a measure above 0.
pub(super) fn search(values: &[f32], measure: impl Fn(f32) -> f64, target: f64) -> f32 {
    let (mut prefix, mut above) = (0, 0.0);
    // 11 + 11 + 10 bits: buckets of the last pass contain equal values only.
    for shift in [21, 10, 0] {
        let digit = if shift == 0 { DIGIT_BITS - 1 } else { DIGIT_BITS };
        let mut buckets = [0.0; BUCKETS];
        for &value in values {
            let key = u64::from(ordered_key(value));
            if key >> (shift + digit) == prefix {
                buckets[(key >> shift) as usize & ((1 << digit) - 1)] += measure(value);
            }
        }
        let (bucket, before) = select_bucket(&buckets, above, target);
        prefix = prefix << digit | bucket as u64;
        above = before;
    }
    from_ordered_key(prefix as u32)
}

/// Breaks ties at `floor`, the `k`-th largest of `values`: returns an index range in which values equal to `floor` complete
/// exactly `k` kept values. It contains the last ties if `highest`, otherwise the first.
pub(super) fn ties_within(values: &[f32], floor: f32, k: usize, highest: bool) -> Range<usize> {
    let remaining = k - values.iter().filter(|&&value| value > floor).count();
    let mut ties = values.iter().enumerate().filter(|&(_, &value)| value == floor).map(|(i, _)| i);
    if highest {
        ties.nth_back(remaining - 1).unwrap_or(0)..values.len()
    } else {
        0..ties.nth(remaining - 1).map_or(values.len(), |last| last + 1)
    }
}

/// The highest bucket at which the sum, starting at `above`, reaches `target`, and the sum before this bucket.
fn select_bucket(buckets: &[f64; BUCKETS], mut above: f64, target: f64) -> (usize, f64) {
    let mut chosen = (0, above);
    for (bucket, &sum) in buckets.iter().enumerate().rev() {
        if sum > 0.0 {
            chosen = (bucket, above);
            above += sum;
            // A different summation order can leave the sum below `target`; then the lowest nonempty bucket is selected.
            if above >= target {
                break;
            }
        }
    }
    chosen
}

/// An integer of the same order: the order of negative floats is reversed.
fn ordered_key(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn from_ordered_key(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}
