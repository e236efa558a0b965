//! Chain speculative sampling: a target model's answer to a chain of drafted tokens, distributed as its own.
//!
//! Drafted token `d` at position `i` is kept with probability `min(1, q_i(d) / p_i(d))`, where `p_i` is the draft's
//! distribution and `q_i` the target's. The first that is not kept is replaced by a token of the normalised
//! `max(q_i - p_i, 0)`, or of `q_i` if that is 0 everywhere, and ends the chain; if all are kept, a token of the next
//! target distribution follows (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023;
//! Chen et al., "Accelerating large language model decoding with speculative sampling", 2023).
//!
//! Whatever the draft, the tokens that come out are distributed as if the target had drawn them one by one.

use super::{SamplingParams, Scores, draw::check_params};
use crate::{
    Backend, Result, View,
    rows::check_rows,
    tensor::{check_computable, check_shape},
};

const OPERATOR: &str = "sampling.chain_speculative_sampling";

/// What a draft model proposes.
#[derive(Debug, Clone, Copy)]
pub struct Drafts<'a> {
    /// `[batch, n, vocab]`: the probabilities, or any weights, from which each token was drawn.
    pub probs: View<'a>,
    /// `[batch, n]`, row-major: the tokens. A shorter draft ends with -1s; what `probs` and the target hold for these
    /// positions is not read, but for the target's at the first of them.
    pub ids: &'a [i32],
}

/// How a chain of drafted tokens fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ChainCounts {
    /// How many drafted tokens pass their test, each judged by its own random number, those after a rejection
    /// included: divided by their number, an estimate of the draft's acceptance rate. (FlashInfer's also tests the
    /// rejected token a second time.)
    pub accepted: u64,
    /// How many drafted tokens were emitted; one more token follows them.
    pub emitted: u64,
}

impl std::ops::AddAssign for ChainCounts {
    fn add_assign(&mut self, other: Self) {
        self.accepted += other.accepted;
        self.emitted += other.emitted;
    }
}

/// Where the answer goes.
#[derive(Debug)]
pub struct ChainOutput<'a> {
    /// `[batch, n + 1]`, row-major: the drafted tokens that were kept, one token of the target's, then -1s. All -1 for
    /// a request that has an error.
    pub tokens: &'a mut [i32],
    /// `[batch]`: the counts, or why a request has none: NaN, a negative number, infinity or no mass in a row that
    /// was read. Other requests have theirs all the same.
    pub chains: &'a mut [Result<ChainCounts>],
    /// `[batch]`: sums over calls, to which the counts of this one are added.
    pub totals: Option<&'a mut [ChainCounts]>,
}

/// Judges drafted tokens by the target's scores and emits the longest chain that it may, with one token more.
///
/// `drafts`: `[batch, n, vocab]` and `[batch, n]`, `n` may be 0; `target`: `[batch, n + 1, vocab]`, position `i` after
/// the first `i` drafted tokens; both f32, f16 or bf16 with stride 1 along the last axis. `params`: `[batch]`; temperature
/// and filters apply to the target's scores at every position, as in [`super::sample`] for logits and as in
/// [`super::sampling_from_probs`] for probabilities. Rows need not sum to 1. A drafted token of probability 0 under the
/// draft is kept if the target's is above 0.
///
/// **Random numbers.** With `offset` the number of tokens that the request has drawn, position `i` has the two numbers
/// [`super::rng::speculative_pair`]`(seed, offset + i)`: the first judges the drafted token, the second draws one in its
/// place, or after all of them. They are used once in a request's life if the next offset is `offset + emitted + 1`,
/// and neither the batch slot nor other requests matter. Drafts may be drawn by [`super::sample`] with the same seed and
/// offsets, whose numbers are others.
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
    let (batch, n, vocab) = check_target(&drafts, &target)?;
    check_ids(drafts.ids, (batch, n, vocab))?;
    check_params(OPERATOR, batch, &target, params)?;
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
    backend.chain_speculative_sampling(drafts, target, params, out)
}

/// Checks both tensors and returns batch, n and vocab.
fn check_target(drafts: &Drafts<'_>, target: &Scores<'_>) -> Result<(usize, usize, usize)> {
    let (Scores::Logits(scores) | Scores::Probs(scores)) = target;
    let argument = if matches!(target, Scores::Logits(_)) { "target logits" } else { "target probs" };
    let shape = scores.shape();
    crate::ensure!(
        shape.len() == 3 && shape[1] > 0 && (1..=i32::MAX as usize).contains(&shape[2]),
        OPERATOR,
        "{argument} has shape {shape:?}, expected [batch, n + 1, vocab] with vocab in 1..={}",
        i32::MAX
    );
    let (batch, n, vocab) = (shape[0], shape[1] - 1, shape[2]);
    check_shape(OPERATOR, "draft probs", (drafts.probs.shape(), &[batch, n, vocab]), "[batch, n, vocab]")?;
    check_computable(OPERATOR, argument, scores.dtype())?;
    check_computable(OPERATOR, "draft probs", drafts.probs.dtype())?;
    check_rows(OPERATOR, argument, (shape, scores.strides()))?;
    check_rows(OPERATOR, "draft probs", (drafts.probs.shape(), drafts.probs.strides()))?;
    Ok((batch, n, vocab))
}

fn check_ids(ids: &[i32], (batch, n, vocab): (usize, usize, usize)) -> Result<()> {
    crate::ensure!(
        ids.len() == batch * n,
        OPERATOR,
        "draft ids has {} elements, expected batch x n = {batch} x {n}",
        ids.len()
    );
    for (request, chain) in ids.chunks(n.max(1)).enumerate() {
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
