//! Inputs of a step, shared by all layers and stored in the backend's memory: tokens, positions, append plan, attention plans.
//!
//! Invariant: a refill keeps every address, so recorded work reads the new step. When the capacity is too small the plans are
//! reallocated and [`StepInputs::reallocations`] increases.

use crate::{engine::SPLIT, step::Step};
use tilewright::{
    Attention, Backend, Plan, Result,
    attention::Capacity,
    kv::AppendPlan,
    tensor::{IndexBuffer, Indices},
};

/// Device-side inputs of one step.
#[derive(Debug)]
pub(crate) struct StepInputs {
    tokens: IndexBuffer,
    positions: IndexBuffer,
    logit_rows: IndexBuffer,
    /// Slots that receive the step's keys and values.
    pub(crate) append: AppendPlan,
    /// The attention plans of the step, one per attention operator of the model.
    pub(crate) plans: Vec<Plan>,
    /// Rows, padding included.
    pub(crate) rows: usize,
    /// Rows for which logits are computed.
    pub(crate) num_logits: usize,
    /// Whether logits are computed for every row, in order.
    pub(crate) all_logits: bool,
    /// Number of reallocations; work recorded before one reads stale addresses.
    pub(crate) reallocations: usize,
}

/// Capacity for a decode step whose requests grow to twice their length.
fn capacity(step: &Step) -> Capacity {
    let (pages, kv_len) = step.kv_extent();
    let doubled = |now: usize| (2 * now).next_power_of_two();
    Capacity::decode(step.rows(), doubled(pages)).with_kv_len(doubled(kv_len))
}

/// Plans of that capacity.
fn refillable_plans<B: Backend>(attention: &[Attention<B>], step: &Step) -> Result<Vec<Plan>> {
    let capacity = capacity(step);
    let plan = |attention: &Attention<B>| attention.plan_with_capacity(&capacity, &step.batch(), SPLIT);
    attention.iter().map(plan).collect()
}

impl StepInputs {
    /// The inputs of `step`, with capacity for exactly its rows.
    pub(crate) fn new<B: Backend>(backend: &B, attention: &[Attention<B>], step: &Step) -> Result<Self> {
        let plans = attention.iter().map(|attention| attention.plan_with(&step.batch(), SPLIT));
        Self::with_plans(backend, step, plans.collect::<Result<_>>()?)
    }

    /// Same, for later [`refill`](Self::refill) with as many rows: the number of keys may double before a reallocation.
    pub(crate) fn refillable<B: Backend>(
        backend: &B,
        attention: &[Attention<B>],
        step: &Step,
    ) -> Result<Self> {
        Self::with_plans(backend, step, refillable_plans(attention, step)?)
    }

    fn with_plans<B: Backend>(backend: &B, step: &Step, plans: Vec<Plan>) -> Result<Self> {
        let rows = step.rows();
        let mut inputs = Self {
            tokens: backend.allocate_indices(rows)?,
            positions: backend.allocate_indices(rows)?,
            logit_rows: backend.allocate_indices(rows)?,
            append: AppendPlan::new(backend, &step.table(), &step.batch_indices, &step.positions)?,
            plans,
            rows: 0,
            num_logits: 0,
            all_logits: false,
            reallocations: 0,
        };
        inputs.write(backend, step)?;
        Ok(inputs)
    }

    /// Overwrites the inputs with another step of as many rows; reallocates the plans if their capacity is exceeded.
    pub(crate) fn refill<B: Backend>(
        &mut self,
        backend: &B,
        attention: &[Attention<B>],
        step: &Step,
    ) -> Result<()> {
        self.append.refill(backend, &step.table(), &step.batch_indices, &step.positions)?;
        let fits =
            |plan: &Plan| plan.capacity().is_some_and(|capacity| step.fits(capacity.pages, capacity.kv_len));
        if self.plans.iter().all(fits) {
            for (plan, attention) in self.plans.iter_mut().zip(attention) {
                attention.replan(plan, &step.batch())?;
            }
        } else {
            self.plans = refillable_plans(attention, step)?;
            self.reallocations += 1;
        }
        self.write(backend, step)
    }

    fn write<B: Backend>(&mut self, backend: &B, step: &Step) -> Result<()> {
        backend.write_indices(&step.tokens, &mut self.tokens)?;
        backend.write_indices(&step.positions, &mut self.positions)?;
        (self.rows, self.num_logits) = (step.rows(), step.logit_rows.len());
        self.all_logits = step.all_logits();
        if !self.all_logits {
            backend.write_indices(&step.logit_rows, &mut self.logit_rows)?;
        }
        Ok(())
    }

    /// `[rows]`
    pub(crate) fn tokens(&self) -> Result<Indices<'_>> {
        self.tokens.first(self.rows)
    }

    /// `[rows]`
    pub(crate) fn positions(&self) -> Result<Indices<'_>> {
        self.positions.first(self.rows)
    }

    /// `[num_logits]`
    pub(crate) fn logit_rows(&self) -> Result<Indices<'_>> {
        self.logit_rows.first(self.num_logits)
    }
}
