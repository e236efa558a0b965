//! Statistics of a plan, as numbers and as text.

use super::{
    cascade::SharedPrefix, picture::counted, problem::Problem, schedule::Split, side_by_side::describe_runs,
};
use crate::{Estimate, Roofline};
use std::fmt;

/// Statistics of a plan; prints as a short report.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The problem.
    pub problem: Problem,
    /// The KV split policy.
    pub split: Split,
    /// Requests of the batch.
    pub requests: usize,
    /// Query rows of the batch.
    pub rows: usize,
    /// Work items.
    pub items: usize,
    /// Those that are [runs](super::Schedule::runs).
    pub runs: usize,
    /// Whether two CTAs execute each of these together.
    pub has_paired_runs: bool,
    /// [`super::Plan::part_of_runs`].
    pub part_of_runs: Option<f64>,
    /// Merges of split units.
    pub merges: usize,
    /// Workers.
    pub workers: usize,
    /// (row, key) pairs of the most loaded worker, per query head of a group.
    pub max_load: usize,
    /// (row, key) pairs per worker, on average.
    pub mean_load: f64,
    /// K and V bytes read by all items.
    pub kv_bytes: usize,
    /// Distinct K and V bytes: a token shared by several items counts once.
    pub kv_bytes_unique: usize,
    /// Detected shared prefixes, with the decision about each.
    pub prefixes: Vec<SharedPrefix>,
    /// Bytes of Q and O.
    pub qo_bytes: usize,
    /// Floating-point operations on visible (row, key) pairs: 2 per multiply-add, `q · k` and `p · v`.
    pub flops: usize,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
}

impl Explanation {
    /// The lower bound of the run time by `roofline`.
    pub fn estimate(&self, roofline: &Roofline) -> Estimate {
        roofline.estimate((self.kv_bytes + self.qo_bytes) as f64, self.flops as f64)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let balance = if self.max_load == 0 { 1.0 } else { self.mean_load / self.max_load as f64 };
        writeln!(f, "{}", self.problem)?;
        let (requests, rows) = (counted(self.requests, "request"), counted(self.rows, "query row"));
        let (items, workers) = (counted(self.items, "work item"), counted(self.workers, "worker"));
        let merges = counted(self.merges, "merge");
        writeln!(f, "  {requests}, {rows}, keys split: {}", self.split)?;
        writeln!(f, "  {items} on {workers} ({:.0} % balanced), {merges}", 100.0 * balance)?;
        writeln!(
            f,
            "  reads {:.3} MB of KV, {:.3} MB of it for the first time, moves {:.3} MB of Q and O, {:.3} GFLOP",
            self.kv_bytes as f64 / 1e6,
            self.kv_bytes_unique as f64 / 1e6,
            self.qo_bytes as f64 / 1e6,
            self.flops as f64 / 1e9
        )?;
        let prefixes = self.prefixes.iter().map(ToString::to_string);
        let runs = describe_runs(self.runs, self.has_paired_runs, self.part_of_runs);
        runs.into_iter().chain(prefixes).try_for_each(|line| writeln!(f, "  {line}"))?;
        write!(f, "  workspace {:.3} MB", self.workspace_bytes as f64 / 1e6)
    }
}
