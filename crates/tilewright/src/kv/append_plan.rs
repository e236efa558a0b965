//! An append plan: the slot mapping of a step's new tokens, looked up once for all layers.
//!
//! A plan has a fixed token capacity. A refill keeps the backend's memory at the same addresses, so captured work that
//! read the old slots reads the new ones.

use super::{PageTable, Slot, append::check_positions, slots::TokenSlots};
use crate::{Backend, Result, attention::BackendData, backend::Opaque};

/// Validated slots of new tokens.
#[derive(Debug, PartialEq, Eq)]
pub struct AppendPlan {
    token_slots: TokenSlots,
    tokens: usize,
    page_size: usize,
    capacity: usize,
    prepared: BackendData,
}

impl AppendPlan {
    /// Looks up every token in the page table.
    ///
    /// `batch_indices` `[num_tokens]`: the request of each token; -1 skips the token and ignores its position.
    /// `positions` `[num_tokens]`: the position of each token in its request.
    ///
    /// # Errors
    /// When the two differ in length, the table is malformed, a token's request or position does not exist, or two
    /// tokens map to one slot.
    pub fn new<B: Backend + ?Sized>(
        backend: &B,
        table: &PageTable<'_>,
        batch_indices: &[i32],
        positions: &[i32],
    ) -> Result<Self> {
        Self::with_capacity(backend, batch_indices.len(), table, batch_indices, positions)
    }

    /// [`AppendPlan::new`] with capacity for `capacity` tokens.
    ///
    /// # Errors
    /// As [`AppendPlan::new`], and when there are more tokens than the capacity.
    pub fn with_capacity<B: Backend + ?Sized>(
        backend: &B,
        capacity: usize,
        table: &PageTable<'_>,
        batch_indices: &[i32],
        positions: &[i32],
    ) -> Result<Self> {
        let (token_slots, prepared) = (TokenSlots::default(), BackendData::default());
        let mut plan = Self { token_slots, tokens: 0, page_size: table.page_size, capacity, prepared };
        plan.refill(backend, table, batch_indices, positions)?;
        Ok(plan)
    }

    /// Replaces the slots, in the same memory.
    ///
    /// # Errors
    /// As [`AppendPlan::new`], and when there are more tokens than the capacity. The plan is then unchanged, unless the
    /// backend failed.
    pub fn refill<B: Backend + ?Sized>(
        &mut self,
        backend: &B,
        table: &PageTable<'_>,
        batch_indices: &[i32],
        positions: &[i32],
    ) -> Result<()> {
        const OPERATOR: &str = "kv.append_plan";
        let tokens = batch_indices.len();
        crate::ensure!(
            tokens <= self.capacity,
            OPERATOR,
            "there are {tokens} tokens, the capacity is {}",
            self.capacity
        );
        check_positions(OPERATOR, positions.len(), tokens)?;
        self.token_slots = TokenSlots::look_up(OPERATOR, table, batch_indices, positions, None)?;
        (self.tokens, self.page_size) = (tokens, table.page_size);
        self.prepared = BackendData(backend.prepare_append(self)?);
        Ok(())
    }

    /// Number of tokens, including skipped ones.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Maximum number of tokens.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The slots, ordered by page and slot, without skipped tokens.
    pub fn slots(&self) -> &[Slot] {
        &self.token_slots.slots
    }

    /// The result of the backend's [`prepare_append`](Backend::prepare_append); during a refill, the previous result.
    pub fn prepared(&self) -> Option<&Opaque> {
        self.prepared.0.as_ref()
    }

    pub(crate) fn token_slots(&self) -> &TokenSlots {
        &self.token_slots
    }
}
