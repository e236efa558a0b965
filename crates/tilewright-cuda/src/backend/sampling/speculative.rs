//! Chain speculative sampling: one launch with one CTA per request; tokens and counts are one copy each.

use super::{error_of, kind_of, name_of, row_error, threads_of_large, vocab_of, with_elements};
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use tilewright::{
    Result,
    sampling::{ChainCounts, ChainOutput, ChainVerification},
};
use tilewright_kernels::sampling::{self, CHAIN_OUTCOME_WORDS, RowKind, SampleConfig};
use tilewright_ptx::sim::Arg;

const OPERATOR: &str = "sampling.chain_speculative_sampling";

pub(in crate::backend) fn chain_speculative_sampling<M: Machine>(
    gpu: &Gpu<M>,
    operator: ChainVerification<'_>,
) -> Result<()> {
    let ChainVerification { drafts, target, params, out } = operator;
    let (view, kind) = (target.view(), kind_of(&target));
    let [batch, positions, vocab] = [view.shape()[0], view.shape()[1], view.shape()[2]];
    let columns = vocab_of(OPERATOR, vocab)?;
    if batch == 0 {
        return Ok(());
    }
    let config = SampleConfig { kind, threads: threads_of_large(vocab) };
    let (of_draft, of_target) = (drafts.probs.dtype(), view.dtype());
    let name = format!("chain_{}_{of_draft}_{of_target}_{}", name_of(kind), config.threads);
    let kernel = with_elements!(OPERATOR, of_draft, D => with_elements!(OPERATOR, of_target, T => {
        gpu.kernel(OPERATOR, &name, |name| sampling::chain::<D, T>(name, config))
    }))?;
    let (requests, _uploaded) = gpu.upload_requests(params)?;
    let ids = gpu.upload_words(drafts.ids.iter().map(|id| id.cast_unsigned()))?;
    let tokens = gpu.allocate(4 * batch * positions)?;
    let outcomes = gpu.allocate(4 * batch * CHAIN_OUTCOME_WORDS)?;
    gpu.machine.fill(outcomes.address(), 0, outcomes.bytes())?;
    let stride = |strides: &[usize], axis: usize| Arg::U64(strides[axis] as u64);
    let args = [
        Arg::U64(address(&drafts.probs)),
        Arg::U64(address(&view)),
        Arg::U64(ids.address()),
        Arg::U64(tokens.address()),
        Arg::U64(outcomes.address()),
        stride(drafts.probs.strides(), 0),
        stride(drafts.probs.strides(), 1),
        stride(view.strides(), 0),
        stride(view.strides(), 1),
        Arg::U32(positions as u32 - 1),
        Arg::U32(columns),
    ];
    gpu.machine.launch(&kernel, [batch as u32, 1, 1], &[&args[..], &requests.args()].concat())?;
    let tokens = gpu.read_words(&tokens, batch * positions)?;
    let outcomes = gpu.read_words(&outcomes, batch * CHAIN_OUTCOME_WORDS)?;
    report(kind, &tokens, &outcomes, out);
    Ok(())
}

/// Writes the results of all chains to `out`.
fn report(kind: RowKind, tokens: &[u32], outcomes: &[u32], out: ChainOutput<'_>) {
    let ChainOutput { tokens: to, chains, totals } = out;
    to.iter_mut().zip(tokens).for_each(|(to, &token)| *to = token.cast_signed());
    let positions = to.len() / chains.len();
    for (request, (chain, outcome)) in
        chains.iter_mut().zip(outcomes.chunks_exact(CHAIN_OUTCOME_WORDS)).enumerate()
    {
        let of_target = outcome[4] == 1;
        let (row, kind) = if of_target { ("target", kind) } else { ("draft", RowKind::Probs) };
        *chain = match row_error(kind, outcome) {
            None => Ok(ChainCounts { accepted: outcome[6].into(), emitted: outcome[7].into() }),
            Some(why) => {
                to[request * positions..][..positions].fill(-1);
                Err(error_of(OPERATOR, request, &format!("{row} at position {}: {why}", outcome[5])))
            }
        };
    }
    for (total, chain) in totals.into_iter().flatten().zip(chains) {
        *total += chain.as_ref().copied().unwrap_or_default();
    }
}
