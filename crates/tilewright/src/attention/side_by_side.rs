//! Runs and other items that are executed side by side, and the part of the SMs on which the runs begin.
//!
//! Products bound runs, and bytes bound items of few rows, for which a part of the SMs draws the full bandwidth. With a part `p` of the
//! SMs, runs take `R / p` and the others `D / min(1, 4 (1 - p))`, where `R` and `D` are their times on all SMs, and 4 fits measured
//! batches. Both end together if
//!
//! ```text
//! p = 4 r / (1 + 4 r),   r = R / D
//! ```
//!
//! This matters for few runs: one more on an SM delays the end by a large part. More than [`MAX_WAVES`] per SM fill gaps themselves, and
//! the least part is best. SMs without items begin to draw runs.
//! Measured: [record](../../../../benches/record/h100/attention-mixed-2026-11-27.csv).

use super::{Plan, picture::counted, schedule::workers_of};

/// Maximum runs per SM with a part of their own.
const MAX_WAVES: usize = 4;
/// The minimum part: on an H200, the best of 0.33 to 0.67 for most of four mixed batches that decode for longer than they prefill.
const MIN_PART: f64 = 0.55;
/// Floating-point operations of products in the time of a byte: 227 on an H100, 156 on an H200.
const FLOPS_PER_BYTE: f64 = 220.0;
/// Fixed time of the launch of items, in bytes: 10 µs.
const LAUNCH_BYTES: f64 = 30e6;
/// Fixed cost of a run, in keys.
const RUN_OVERHEAD: usize = 128;

impl Plan {
    /// The part of the SMs on which [runs](super::Schedule::runs) begin beside other items; `None` if there is only one kind. With levels
    /// of shared keys, it has as many SMs as the runs need to end no later than on all.
    pub fn part_of_runs(&self) -> Option<f64> {
        let (runs, others) = (self.schedule.runs(), self.schedule.items_of_workers());
        let many = self.tiling.many_rows?;
        if runs.is_empty() || others.is_empty() {
            return None;
        }
        if self.requests.segments.iter().any(|segment| segment.shared) {
            return Some(workers_of(runs.len(), many.workers) as f64 / many.workers as f64);
        }
        if runs.len() > MAX_WAVES * many.workers {
            return Some(MIN_PART);
        }
        let dims = (self.problem.head_dim().qk + self.problem.head_dim().vo) as f64;
        // tiles of fewer rows take as long as full ones
        let keys_of_runs: usize = runs.iter().map(|item| item.kv.len() + RUN_OVERHEAD).sum();
        let flops = (2 * many.q_rows * keys_of_runs) as f64 * dims;
        let keys_of_others: usize = others.iter().map(|item| item.kv_heads.len() * item.kv.len()).sum();
        let bytes = (self.problem.dtype_kv().size() * keys_of_others) as f64 * dims;
        Some(part(flops, bytes))
    }
}

/// Names runs, if there are any, whether workers execute them in pairs, and their part of the SMs.
pub(super) fn describe_runs(runs: usize, are_paired: bool, part: Option<f64>) -> Option<String> {
    let pairs = if are_paired { ", each executed by two CTAs" } else { "" };
    let begin = part.map(|part| format!(", which begin on {:.0} % of the SMs", 100.0 * part));
    let text =
        || format!("{} of segments of many rows{pairs}{}", counted(runs, "item"), begin.unwrap_or_default());
    (runs > 0).then(text)
}

/// The part for runs of `flops` operations beside items of `bytes` bytes.
fn part(flops: f64, bytes: f64) -> f64 {
    let ratio = 4.0 * (flops / FLOPS_PER_BYTE) / (bytes + LAUNCH_BYTES);
    (ratio / (1.0 + ratio)).max(MIN_PART)
}

#[cfg(test)]
mod tests {
    use super::{MIN_PART, part};

    #[test]
    fn runs_that_take_longer_get_more_sms() {
        assert_eq!(part(0.0, 0.0), MIN_PART);
        // 2,048 tokens beside 128 decode steps at 2,048
        assert_eq!(part(34e9, 1.07e9), MIN_PART);
        // 1,024 tokens at 4,096 beside 64 decode steps at 1,024
        assert!((0.78..0.82).contains(&part(62e9, 268e6)));
        assert!((0.98..1.0).contains(&part(2e12, 4e6)));
    }
}
