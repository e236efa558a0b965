//! Where a step's new tokens go, looked up once for all layers: a value, and what a backend made of it.
//!
//! A plan has room for so many tokens. Refilled, it keeps the memory that its backend has, at the same addresses, so that recorded
//! work which read the old places reads the new ones.

use super::{PageTable, Slot, append::check_positions, slots::Places};
use crate::{Backend, Result, attention::Prepared, backend::Opaque};

/// The checked places of new tokens.
#[derive(Debug, PartialEq, Eq)]
pub struct AppendPlan {
    places: Places,
    tokens: usize,
    page_size: usize,
    capacity: usize,
    prepared: Prepared,
}

impl AppendPlan {
    /// Looks every token up in the page table.
    ///
    /// `batch_indices` `[num_tokens]`: the request of each token; -1 skips the token, whatever its position. `positions`
    /// `[num_tokens]`: the position of each token in its request.
    ///
    /// # Errors
    /// When the two differ in length, the table is malformed, a token's request or position does not exist, or two tokens go to one
    /// slot.
    pub fn new<B: Backend + ?Sized>(
        backend: &B,
        table: &PageTable<'_>,
        (batch_indices, positions): (&[i32], &[i32]),
    ) -> Result<Self> {
        let tokens = (batch_indices, positions);
        Self::with_capacity(backend, batch_indices.len(), table, tokens)
    }

    /// [`AppendPlan::new`] with room for `capacity` tokens.
    ///
    /// # Errors
    /// As [`AppendPlan::new`], and when there are more tokens.
    pub fn with_capacity<B: Backend + ?Sized>(
        backend: &B,
        capacity: usize,
        table: &PageTable<'_>,
        tokens: (&[i32], &[i32]),
    ) -> Result<Self> {
        let (places, prepared) = (Places::default(), Prepared::default());
        let mut plan = Self { places, tokens: 0, page_size: table.page_size, capacity, prepared };
        plan.refill(backend, table, tokens)?;
        Ok(plan)
    }

    /// Other places, in the same memory.
    ///
    /// # Errors
    /// As [`AppendPlan::new`], and when there are more tokens than there is room for. The plan is what it was then, unless the backend
    /// failed.
    pub fn refill<B: Backend + ?Sized>(
        &mut self,
        backend: &B,
        table: &PageTable<'_>,
        (batch_indices, positions): (&[i32], &[i32]),
    ) -> Result<()> {
        const OPERATOR: &str = "kv.append_plan";
        let tokens = batch_indices.len();
        crate::ensure!(
            tokens <= self.capacity,
            OPERATOR,
            "there are {tokens} tokens, the capacity is {}",
            self.capacity
        );
        check_positions(OPERATOR, positions, tokens)?;
        self.places = Places::find(OPERATOR, table, (batch_indices, positions), None)?;
        (self.tokens, self.page_size) = (tokens, table.page_size);
        self.prepared = Prepared(backend.prepare_append(self)?);
        Ok(())
    }

    /// How many tokens there are, those included that are skipped.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The most tokens that it has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens a page holds.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Where tokens go, by page and slot; those that are skipped are not here.
    pub fn slots(&self) -> &[Slot] {
        &self.places.slots
    }

    /// What the backend's [`prepare_append`](Backend::prepare_append) made of it. While a plan is refilled that is what was made
    /// of it before.
    pub fn prepared(&self) -> Option<&Opaque> {
        self.prepared.0.as_ref()
    }

    pub(crate) fn places(&self) -> &Places {
        &self.places
    }
}
