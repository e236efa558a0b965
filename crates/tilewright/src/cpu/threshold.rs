//! The smallest value that a top-k or top-p filter keeps, exact to the bit and without sorting.
//!
//! A radix search: floats map to integers of the same order, and one pass per 11 bits adds up how much each bucket
//! holds. The answer is the largest `v` at which `Σ {measure(x) : x >= v}` reaches the target. No value is NaN.

use std::ops::Range;

const DIGIT: u32 = 11;
const BUCKETS: usize = 1 << DIGIT;

/// The largest `v` among `values` such that the measures of all values >= `v` add up to `target`; the smallest with
/// a measure above 0 if they never do.
pub(super) fn search(values: &[f32], measure: impl Fn(f32) -> f64, target: f64) -> f32 {
    let (mut prefix, mut above) = (0, 0.0);
    // 11 + 11 + 10 bits: in the last pass a bucket holds equal values only.
    for shift in [21, 10, 0] {
        let digit = if shift == 0 { DIGIT - 1 } else { DIGIT };
        let mut buckets = [0.0; BUCKETS];
        for &value in values {
            let key = u64::from(key(value));
            if key >> (shift + digit) == prefix {
                buckets[(key >> shift) as usize & ((1 << digit) - 1)] += measure(value);
            }
        }
        let (bucket, before) = descend(&buckets, above, target);
        prefix = prefix << digit | bucket as u64;
        above = before;
    }
    unkey(prefix as u32)
}

/// Where values equal to `floor`, the `k`-th largest of `values`, count among exactly `k`: the range of indices that
/// holds as many of them as there is room for, the last ones if `highest`, else the first.
pub(super) fn ties_within(values: &[f32], floor: f32, k: usize, highest: bool) -> Range<usize> {
    let room = k - values.iter().filter(|&&value| value > floor).count();
    let mut ties = values.iter().enumerate().filter(|&(_, &value)| value == floor).map(|(i, _)| i);
    if highest {
        ties.nth_back(room - 1).unwrap_or(0)..values.len()
    } else {
        0..ties.nth(room - 1).map_or(values.len(), |last| last + 1)
    }
}

/// The highest bucket with which the sum, starting at `above`, reaches `target`, and the sum before it.
fn descend(buckets: &[f64; BUCKETS], mut above: f64, target: f64) -> (usize, f64) {
    let mut chosen = (0, above);
    for (bucket, &held) in buckets.iter().enumerate().rev() {
        if held > 0.0 {
            chosen = (bucket, above);
            above += held;
            // Sums in another order may end a rounding error short; then the lowest bucket that holds anything
            // is the answer.
            if above >= target {
                break;
            }
        }
    }
    chosen
}

/// An integer of the same order: negative floats count downwards.
fn key(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn unkey(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}
