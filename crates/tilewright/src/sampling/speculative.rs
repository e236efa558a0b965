//! Chain speculative sampling: verification of a chain of drafted tokens that preserves the target's distribution.
//!
//! Drafted token `d` at position `i` is accepted with probability `min(1, q_i(d) / p_i(d))`, where `p_i` is the draft's
//! distribution and `q_i` the target's. The first rejected token is replaced by a draw from the normalised
//! `max(q_i - p_i, 0)`, or from `q_i` if that is 0 everywhere, and ends the chain. If all are accepted, a draw from the next
//! target distribution follows (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023;
//! Chen et al., "Accelerating large language model decoding with speculative sampling", 2023).
//!
//! For any draft, the emitted tokens are distributed as if the target had drawn them one by one.

use super::{SamplingParams, Scores, draw::check_params};
use crate::{
    Backend, Indices, Operator, Result, TensorRef, TensorVisitor, View, check_computable, check_rows,
    check_shape, dispatch,
};

pub(super) const OPERATOR: &str = "sampling.chain_speculative_sampling";

/// The tokens and probabilities of a draft model.
#[derive(Debug, Clone, Copy)]
pub struct Drafts<'a> {
    /// `[batch, n, vocab]`: the probabilities, or any weights, from which each token was drawn.
    pub probs: View<'a>,
    /// `[batch, n]`, row-major: the tokens. A shorter draft is padded with -1. For padded positions `probs` and the target are
    /// not read, except the target at the first of them.
    pub ids: &'a [i32],
}

/// Acceptance counts of a draft chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ChainCounts {
    /// Drafted tokens that pass their test, each with its own random number, including those after a rejection. Divided
    /// by the draft length, it estimates the acceptance rate. (FlashInfer's count also tests the
    /// rejected token a second time.)
    pub accepted: u64,
    /// Drafted tokens that were emitted; one more token follows them.
    pub emitted: u64,
}

impl std::ops::AddAssign for ChainCounts {
    fn add_assign(&mut self, other: Self) {
        self.accepted += other.accepted;
        self.emitted += other.emitted;
    }
}

/// Output of [`chain_speculative_sampling`].
#[derive(Debug)]
pub struct ChainOutput<'a> {
    /// `[batch, n + 1]`, row-major: the accepted tokens, one token from the target, then -1. All -1 for
    /// a request with an error.
    pub tokens: &'a mut [i32],
    /// `[batch]`: the counts, or the request's error: NaN, a negative number, infinity or no mass in a row that
    /// was read. Other requests are unaffected.
    pub chains: &'a mut [Result<ChainCounts>],
    /// `[batch]`: running totals, to which the counts of this call are added.
    pub totals: Option<&'a mut [ChainCounts]>,
}

/// Verifies drafted tokens against the target's scores; emits the longest accepted prefix and one more token.
///
/// `drafts`: `[batch, n, vocab]` and `[batch, n]`, `n` may be 0; `target`: `[batch, n + 1, vocab]`, position `i` after
/// the first `i` drafted tokens; both f32, f16 or bf16 with stride 1 along the last axis. `params`: `[batch]`; temperature
/// and filters apply to the target's scores at every position, as in [`super::sample`] for logits and as in
/// [`super::sampling_from_probs`] for probabilities. Rows need not sum to 1. A drafted token of probability 0 under the
/// draft is accepted if the target's is above 0.
///
/// **Random numbers.** With `offset` the number of tokens that the request has drawn, position `i` uses the two numbers
/// [`super::rng::speculative_pair`]`(seed, offset + i)`: the first tests the drafted token, the second draws its
/// replacement or the extra token. No number is used twice if the next offset is `offset + emitted + 1`. Batch slot and
/// other requests have no effect. Drafts may be drawn by [`super::sample`] with the same seed and offsets, because it uses
/// different numbers.
///
/// # Errors
/// When shapes disagree, a last axis is not dense, a parameter is out of range, a token is neither in `0..vocab` nor -1,
/// or a token follows a -1; then nothing is written.
pub fn chain_speculative_sampling<B: Backend + ?Sized>(
    backend: &B,
    drafts: Drafts<'_>,
    target: Scores<'_>,
    params: &[SamplingParams],
    out: ChainOutput<'_>,
) -> Result<()> {
    ChainVerification { drafts, target, params, out }.run(backend)
}

/// The arguments of [`chain_speculative_sampling`].
#[derive(Debug)]
pub struct ChainVerification<'a> {
    /// The drafted tokens.
    pub drafts: Drafts<'a>,
    /// `[batch, n + 1, vocab]`
    pub target: Scores<'a>,
    /// `[batch]`
    pub params: &'a [SamplingParams],
    /// The results.
    pub out: ChainOutput<'a>,
}

impl<'a> Operator<'a> for ChainVerification<'a> {
    fn name(&self) -> &'static str {
        OPERATOR
    }

    fn check(&self) -> Result<()> {
        let Self { drafts, target, params, out } = self;
        let [batch, n, vocab] = check_target(&drafts.probs, target)?;
        check_ids(drafts.ids.into(), batch, n, vocab)?;
        check_params(OPERATOR, batch, target, params)?;
        let lens = [
            ("out.tokens", out.tokens.len(), batch * (n + 1), "batch x (n + 1)"),
            ("out.chains", out.chains.len(), batch, "batch"),
            ("out.totals", out.totals.as_ref().map_or(batch, |totals| totals.len()), batch, "batch"),
        ];
        for (argument, len, expected, layout) in lens {
            crate::ensure!(
                len == expected,
                OPERATOR,
                "{argument} has {len} elements, expected {layout} = {expected}"
            );
        }
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("draft probs", TensorRef::Input(&mut self.drafts.probs))?;
        visit(target_name(&self.target), TensorRef::Input(self.target.view_mut()))
    }

    dispatch!(chain_speculative_sampling);
}

/// The argument name of the target's scores.
pub(super) fn target_name(target: &Scores<'_>) -> &'static str {
    if matches!(target, Scores::Logits(_)) { "target logits" } else { "target probs" }
}

/// Checks both tensors and returns batch, n and vocab.
pub(super) fn check_target(drafts: &View<'_>, target: &Scores<'_>) -> Result<[usize; 3]> {
    let scores = target.view();
    let argument = target_name(target);
    let shape = scores.shape();
    crate::ensure!(
        shape.len() == 3 && shape[1] > 0 && (1..=i32::MAX as usize).contains(&shape[2]),
        OPERATOR,
        "{argument} has shape {shape:?}, expected [batch, n + 1, vocab] with vocab in 1..={}",
        i32::MAX
    );
    let (batch, n, vocab) = (shape[0], shape[1] - 1, shape[2]);
    check_shape(OPERATOR, "draft probs", drafts.shape(), &[batch, n, vocab], "[batch, n, vocab]")?;
    check_computable(OPERATOR, argument, scores.dtype())?;
    check_computable(OPERATOR, "draft probs", drafts.dtype())?;
    check_rows(OPERATOR, argument, (shape, scores.strides()))?;
    check_rows(OPERATOR, "draft probs", (drafts.shape(), drafts.strides()))?;
    Ok([batch, n, vocab])
}

/// Checks the number of ids, and the values of those on the host.
pub(super) fn check_ids(ids: Indices<'_>, batch: usize, n: usize, vocab: usize) -> Result<()> {
    crate::ensure!(
        ids.len() == batch * n,
        OPERATOR,
        "draft ids has {} elements, expected batch x n = {batch} x {n}",
        ids.len()
    );
    for (request, chain) in ids.host().unwrap_or_default().chunks(n.max(1)).enumerate() {
        let len = chain.iter().position(|&id| id == -1).unwrap_or(n);
        let foreign = chain.iter().position(|&id| id < -1 || id >= vocab as i32);
        if let Some(i) = foreign {
            let text = format!("ids[{i}] = {} is neither in 0..{vocab} nor -1", chain[i]);
            return Err(crate::Error::new(OPERATOR, format!("request {request}: {text}")));
        }
        if let Some(i) = chain[len..].iter().position(|&id| id != -1) {
            let text = format!("ids[{}] = {} follows a -1, which ends a draft", len + i, chain[len + i]);
            return Err(crate::Error::new(OPERATOR, format!("request {request}: {text}")));
        }
    }
    Ok(())
}
