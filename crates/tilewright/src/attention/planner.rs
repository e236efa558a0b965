//! Planning without a device: a problem, and how a device wants its work to be cut.
//!
//! [`Attention`](super::Attention) plans with the tiling of its backend. A planner takes any, so that plans can be made, timed
//! and looked at for devices that are not there.

use super::{
    Problem,
    batch::Batch,
    cascade::Cutting,
    plan::{Plan, Prepared},
    requests::Requests,
    schedule::{self, Asked, Schedule, Scratch, Split, Tiling},
};
use crate::Result;

/// Makes plans of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planner {
    problem: Problem,
    tiling: Tiling,
}

impl Planner {
    /// A planner of `problem` for a device that wants its work cut as `tiling` says.
    pub fn new(problem: Problem, tiling: Tiling) -> Self {
        Self { problem, tiling }
    }

    /// [`super::Attention::plan_with`]
    ///
    /// # Errors
    /// As [`super::Attention::plan_with`].
    pub fn plan_with(&self, batch: &Batch<'_>, split: Split) -> Result<Plan> {
        const OPERATOR: &str = "attention.plan";
        crate::ensure!(
            split != Split::Fixed { tokens: 0 },
            OPERATOR,
            "split = 0 tokens, expected at least 1 (or Split::Never)"
        );
        let mut requests = Requests::default();
        batch.resolve(OPERATOR, &self.problem, &mut requests)?;
        let prefixes = match batch.finds_levels() {
            true => {
                let tile_tokens = schedule::tile_tokens(&self.problem, &self.tiling);
                requests.share_prefixes(Cutting { tiling: &self.tiling, tile_tokens })
            }
            false => Vec::new(),
        };
        let asked = Asked {
            operator: OPERATOR,
            problem: &self.problem,
            requests: &requests,
            tiling: &self.tiling,
            split,
        };
        let mut schedule = Schedule::default();
        schedule.rewrite(&asked, &mut Scratch::default())?;
        let prepared = Prepared::default();
        Ok(Plan { problem: self.problem, tiling: self.tiling, requests, schedule, split, prefixes, prepared })
    }
}
