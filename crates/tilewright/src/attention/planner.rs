//! Planning without a backend: a problem and a tiling.
//!
//! [`Attention`](super::Attention) uses the tiling of its backend. A planner takes any tiling, so plans can be built,
//! timed and inspected for absent devices.

use super::{
    Problem,
    batch::Batch,
    capacity::{ArraySizes, Capacity, FixedCapacity},
    cascade::CostModel,
    plan::Plan,
    schedule::{self, MAX_ITEMS, ScheduleInputs, Split, Tiling},
};
use crate::Result;

const PLAN: &str = "attention.plan";
const REPLAN: &str = "attention.replan";

/// Maximum page indices of a capacity: 1 GiB.
const MAX_PAGES: usize = 1 << 28;
/// Maximum bytes of masks of a capacity.
const MAX_MASK_BYTES: usize = 1 << 32;
/// Maximum sources of merges of a capacity: 1 GiB.
const MAX_SOURCES: usize = 1 << 28;

/// Builds plans of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planner {
    problem: Problem,
    tiling: Tiling,
}

impl Planner {
    /// A planner of `problem` for a device with this `tiling`.
    pub fn new(problem: Problem, tiling: Tiling) -> Self {
        Self { problem, tiling }
    }

    /// [`super::Attention::plan_with`]
    ///
    /// # Errors
    /// As [`super::Attention::plan_with`].
    pub fn plan_with(&self, batch: &Batch<'_>, split: Split) -> Result<Plan> {
        let mut plan = self.empty(split)?;
        self.rewrite(PLAN, &mut plan, batch)?;
        Ok(plan)
    }

    /// [`super::Attention::plan_with_capacity`]
    ///
    /// # Errors
    /// As [`super::Attention::plan_with_capacity`].
    pub fn plan_with_capacity(&self, capacity: &Capacity, batch: &Batch<'_>, split: Split) -> Result<Plan> {
        let mut plan = self.empty(split)?;
        batch.resolve(PLAN, &self.problem, &mut plan.requests)?;
        let fixed = FixedCapacity::new(*capacity, &self.problem, &self.tiling, split, &plan.requests);
        let (sizes, rows) = (fixed.sizes, u32::try_from(fixed.sizes.partial_rows));
        crate::ensure!(
            sizes.items <= MAX_ITEMS && rows.is_ok(),
            PLAN,
            "a capacity of {} work items and {} partial rows, the most is {MAX_ITEMS} and {}: fewer rows, or fewer keys in one request, are needed",
            sizes.items,
            sizes.partial_rows,
            u32::MAX
        );
        check_capacity(&sizes)?;
        plan.reserve(&sizes);
        plan.fixed_capacity = Some(fixed);
        self.rewrite(PLAN, &mut plan, batch)?;
        Ok(plan)
    }

    /// [`super::Attention::replan`]
    ///
    /// # Errors
    /// As [`super::Attention::replan`].
    pub fn replan(&self, plan: &mut Plan, batch: &Batch<'_>) -> Result<()> {
        plan.check_origin(REPLAN, self, plan.problem == self.problem)?;
        self.rewrite(REPLAN, plan, batch)
    }

    fn empty(&self, split: Split) -> Result<Plan> {
        crate::ensure!(
            split != Split::Fixed { tokens: 0 },
            PLAN,
            "split = 0 tokens, expected at least 1 (or Split::Never)"
        );
        Ok(Plan::empty(self.problem, self.tiling, split))
    }

    /// Rewrites `plan` for `batch`; an error leaves an empty plan.
    fn rewrite(&self, operator: &'static str, plan: &mut Plan, batch: &Batch<'_>) -> Result<()> {
        let written = self.write(operator, plan, batch);
        if written.is_err() {
            plan.clear();
        }
        written
    }

    fn write(&self, operator: &'static str, plan: &mut Plan, batch: &Batch<'_>) -> Result<()> {
        plan.prefixes.clear();
        batch.resolve(operator, &self.problem, &mut plan.requests)?;
        if batch.detects_levels() {
            let tile_tokens = schedule::tile_tokens(&self.problem, &self.tiling);
            let group = self.problem.heads().group();
            plan.prefixes =
                plan.requests.share_prefixes(CostModel { tiling: &self.tiling, tile_tokens, group });
        }
        if let Some(fixed) = &plan.fixed_capacity {
            fixed.check_batch(operator, &plan.requests)?;
        }
        let many_rows = self.tiling.many_rows.filter(|_| plan.fixed_capacity.is_none());
        let inputs = ScheduleInputs {
            operator,
            problem: &self.problem,
            requests: &plan.requests,
            tiling: &Tiling { many_rows, ..self.tiling },
            split: plan.split,
        };
        plan.schedule.rewrite(&inputs, &mut plan.scratch)?;
        plan.fixed_capacity.map_or(Ok(()), |fixed| fixed.check_schedule(operator, &plan.schedule))
    }
}

/// Rejects a capacity with arrays that no step needs.
fn check_capacity(sizes: &ArraySizes) -> Result<()> {
    for (name, value, limit) in [
        ("requests", sizes.requests, MAX_ITEMS),
        ("pages", sizes.pages, MAX_PAGES),
        ("bytes of masks", sizes.mask_bytes, MAX_MASK_BYTES),
        ("merges", sizes.merges, MAX_ITEMS),
        ("states to merge", sizes.sources, MAX_SOURCES),
    ] {
        crate::ensure!(value <= limit, PLAN, "a capacity of {value} {name}, the most is {limit}");
    }
    Ok(())
}

impl Plan {
    /// Rejects a plan of another problem, unless it `serves` that of the operator, and one of another device.
    pub(super) fn check_origin(&self, operator: &'static str, of: &Planner, serves: bool) -> Result<()> {
        crate::ensure!(
            serves,
            operator,
            "the plan was made by another operator: for {}, this is {}",
            self.problem,
            of.problem
        );
        let text =
            |tiling: &Tiling| format!("{} workers, tiles of {} keys", tiling.workers, tiling.kv_tokens);
        crate::ensure!(
            self.tiling == of.tiling,
            operator,
            "the plan was made for another device ({}), this operator has {}",
            text(&self.tiling),
            text(&of.tiling)
        );
        Ok(())
    }
}
