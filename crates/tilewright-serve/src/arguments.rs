//! What all layers of a step read beside weights and activations: tokens, positions, places and plan, in memory of the backend.
//!
//! It has room for so many rows. Refilled, everything stays at its address, as far as the backend keeps what it has prepared in its
//! place, so that recorded work reads the new step.

use crate::{engine::SPLIT, step::Step};
use tilewright::{
    Attention, Backend, Opaque, Plan, Result,
    attention::Capacity,
    kv::AppendPlan,
    tensor::{IndexBuffer, Indices},
};

/// A step's arguments.
#[derive(Debug)]
pub(crate) struct Arguments {
    tokens: IndexBuffer,
    positions: IndexBuffer,
    wanted_rows: IndexBuffer,
    /// Where the step's keys and values go.
    pub(crate) append: AppendPlan,
    /// Its attention.
    pub(crate) plan: Plan,
    /// Rows, those included that are padding.
    pub(crate) rows: usize,
    /// Rows whose logits are wanted.
    pub(crate) wanted: usize,
    /// Whether these are all rows, in order.
    pub(crate) all_wanted: bool,
}

/// Room for a decoding step, and for its requests to become twice as long.
fn capacity(step: &Step) -> Capacity {
    let (pages, kv_len) = step.longest();
    let room = |now: usize| (2 * now).next_power_of_two();
    Capacity::decode(step.rows(), room(pages)).with_kv_len(room(kv_len))
}

impl Arguments {
    /// The arguments of `step`, with room for as many rows as it has.
    pub(crate) fn new<B: Backend>(backend: &B, attention: &Attention<B>, step: &Step) -> Result<Self> {
        Self::with_plan(backend, step, attention.plan_with(&step.batch(), SPLIT)?)
    }

    /// The same, to be refilled with steps of as many rows: keys may double before something has to move.
    pub(crate) fn refillable<B: Backend>(backend: &B, attention: &Attention<B>, step: &Step) -> Result<Self> {
        let capacity = capacity(step);
        Self::with_plan(backend, step, attention.plan_with_capacity(&capacity, &step.batch(), SPLIT)?)
    }

    fn with_plan<B: Backend>(backend: &B, step: &Step, plan: Plan) -> Result<Self> {
        let rows = step.rows();
        let places = (&step.batch_indices[..], &step.positions[..]);
        let mut arguments = Self {
            tokens: backend.allocate_indices(rows)?,
            positions: backend.allocate_indices(rows)?,
            wanted_rows: backend.allocate_indices(rows)?,
            append: AppendPlan::new(backend, &step.table(), places)?,
            plan,
            rows: 0,
            wanted: 0,
            all_wanted: false,
        };
        arguments.write(backend, step)?;
        Ok(arguments)
    }

    /// Those of another step of as many rows. What it does not have room for moves.
    pub(crate) fn refill<B: Backend>(
        &mut self,
        backend: &B,
        attention: &Attention<B>,
        step: &Step,
    ) -> Result<()> {
        self.append.refill(backend, &step.table(), (&step.batch_indices, &step.positions))?;
        if self.plan.capacity().is_some_and(|room| step.fits(room.pages, room.kv_len)) {
            attention.replan(&mut self.plan, &step.batch())?;
        } else {
            self.plan = attention.plan_with_capacity(&capacity(step), &step.batch(), SPLIT)?;
        }
        self.write(backend, step)
    }

    fn write<B: Backend>(&mut self, backend: &B, step: &Step) -> Result<()> {
        backend.write_indices(&step.tokens, &mut self.tokens)?;
        backend.write_indices(&step.positions, &mut self.positions)?;
        (self.rows, self.wanted) = (step.rows(), step.wanted_rows.len());
        self.all_wanted = step.all_wanted();
        if !self.all_wanted {
            backend.write_indices(&step.wanted_rows, &mut self.wanted_rows)?;
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

    /// `[wanted]`
    pub(crate) fn wanted_rows(&self) -> Result<Indices<'_>> {
        self.wanted_rows.first(self.wanted)
    }

    /// What the backend has prepared: recorded work is right only as long as these are the same.
    pub(crate) fn prepared(&self) -> [Option<Opaque>; 2] {
        [self.append.prepared().cloned(), self.plan.prepared().cloned()]
    }
}
