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
//! Measured: [record](../../../../../benches/record/h100/attention-mixed-2026-11-27.csv).

use super::flatten::workers_items;
use tilewright::{Plan, attention::WorkItem};
use tilewright_kernels::attention::{body::wgmma::Q_ROWS, params::PlanArrays};

/// Items that are executed beside runs, each as a worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct SideBySide {
    /// Number of the items.
    pub(super) others: u32,
    /// The arrays of the plan, with the items as workers.
    pub(super) arrays: PlanArrays,
    /// The part of the SMs on which the runs begin.
    pub(super) part_of_runs: f64,
}

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

/// The part of the SMs for the runs of a plan.
pub(super) fn part_of_runs(plan: &Plan) -> f64 {
    let (problem, runs) = (plan.problem(), plan.schedule().runs());
    let dims = (problem.head_dim().qk + problem.head_dim().vo) as f64;
    let keys = |item: &WorkItem| (item.kv.end - item.kv.start) as usize;
    let sms = plan.tiling().many_rows.map_or(0, |many| many.workers);
    if runs.len() > MAX_WAVES * sms {
        return MIN_PART;
    }
    // tiles of fewer rows take as long as full ones
    let keys_of_runs: usize = runs.iter().map(|item| keys(item) + RUN_OVERHEAD).sum();
    let flops = (2 * Q_ROWS * keys_of_runs) as f64 * dims;
    let keys_of_others: usize = workers_items(plan).iter().map(|item| item.kv_heads.len() * keys(item)).sum();
    let bytes = (problem.dtype_kv().size() * keys_of_others) as f64 * dims;
    part(flops, bytes)
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
