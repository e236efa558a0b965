//! Chain speculative sampling with ids, parameters, tokens and counts in tensors.
//!
//! A GPU reads and writes them in stream order: the host copies nothing and waits for nothing, so a CUDA graph can record the call.

use super::{
    Scores, TensorParams,
    speculative::{OPERATOR, check_ids, check_target, target_name},
};
use crate::{Indices, IndicesMut, Operator, Result, TensorRef, TensorVisitor, View, dispatch};

/// Verifies drafted tokens, as [`chain_speculative_sampling`](super::chain_speculative_sampling) does: equal parameters give equal
/// tokens. The tokens of a request that fails are all -1, and its counts are 0.
#[derive(Debug)]
pub struct TensorChain<'a> {
    /// `[batch, n, vocab]`
    pub draft_probs: View<'a>,
    /// `[batch, n]`, row-major. On a device, an id outside of the vocabulary ends a draft like -1.
    pub draft_ids: Indices<'a>,
    /// `[batch, n + 1, vocab]`
    pub target: Scores<'a>,
    /// The parameters of the requests.
    pub params: TensorParams<'a>,
    /// `[batch, n + 1]`, row-major: the accepted tokens, one token from the target, then -1.
    pub tokens: IndicesMut<'a>,
    /// `[batch, 8]`: [`TensorChain::ACCEPTED`] and [`TensorChain::EMITTED`] are the columns of the counts; others are unspecified.
    pub outcomes: IndicesMut<'a>,
}

impl TensorChain<'_> {
    /// Columns of the outcomes.
    pub const OUTCOME_WORDS: usize = 8;
    /// The column of [`ChainCounts::accepted`](super::ChainCounts::accepted).
    pub const ACCEPTED: usize = 6;
    /// The column of [`ChainCounts::emitted`](super::ChainCounts::emitted).
    pub const EMITTED: usize = 7;
}

impl<'a> Operator<'a> for TensorChain<'a> {
    fn name(&self) -> &'static str {
        OPERATOR
    }

    fn check(&self) -> Result<()> {
        let Self { draft_probs, draft_ids, target, params, tokens, outcomes } = self;
        let [batch, n, vocab] = check_target(draft_probs, target)?;
        check_ids(*draft_ids, batch, n, vocab)?;
        params.check(OPERATOR, target, batch)?;
        for (name, out, columns) in [("tokens", tokens, n + 1), ("outcomes", outcomes, Self::OUTCOME_WORDS)] {
            let len = out.as_indices().len();
            crate::ensure!(
                len == batch * columns,
                OPERATOR,
                "{name} has {len} elements, expected {batch} x {columns}"
            );
        }
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("draft probs", TensorRef::Input(&mut self.draft_probs))?;
        visit("draft ids", TensorRef::Indices(&mut self.draft_ids))?;
        visit(target_name(&self.target), TensorRef::Input(self.target.view_mut()))?;
        self.params.visit(visit)?;
        visit("tokens", TensorRef::IndicesOut(&mut self.tokens))?;
        visit("outcomes", TensorRef::IndicesOut(&mut self.outcomes))
    }

    dispatch!(chain_tensors);
}
