//! Chain speculative sampling: one launch with one CTA per request. With tokens and counts on the host, one copy of each follows.

use super::{error_of, kind_of, row_error, vocab_of};
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use tilewright::{
    Result, View,
    sampling::{ChainCounts, ChainOutput, ChainVerification, Scores, TensorChain},
};
use tilewright_kernels::sampling::{
    CHAIN_OUTCOME_WORDS, RequestSources, RowKind, SampleConfig, SamplingKernel, large_kernel_threads,
};
use tilewright_ptx::Arg;

const OPERATOR: &str = "sampling.chain_speculative_sampling";
const _: () = assert!(CHAIN_OUTCOME_WORDS == TensorChain::OUTCOME_WORDS);

pub(in crate::backend) fn chain_speculative_sampling<M: Machine>(
    gpu: &Gpu<M>,
    operator: ChainVerification<'_>,
) -> Result<()> {
    let ChainVerification { drafts, target, params, out } = operator;
    let [batch, positions] = [0, 1].map(|axis| target.view().shape()[axis]);
    if batch == 0 {
        return Ok(());
    }
    let (requests, _uploaded) = gpu.upload_requests(params)?;
    let ids = gpu.upload_words(drafts.ids.iter().map(|id| id.cast_unsigned()))?;
    let tokens = gpu.allocate(4 * batch * positions)?;
    let outcomes = gpu.allocate(4 * batch * CHAIN_OUTCOME_WORDS)?;
    gpu.machine.fill(outcomes.address(), 0, outcomes.bytes())?;
    let arrays = ChainArrays { ids: ids.address(), tokens: tokens.address(), outcomes: outcomes.address() };
    launch(gpu, &drafts.probs, &target, arrays, &requests)?;
    let tokens = gpu.read_words(&tokens, batch * positions)?;
    let outcomes = gpu.read_words(&outcomes, batch * CHAIN_OUTCOME_WORDS)?;
    report(kind_of(&target), &tokens, &outcomes, out);
    Ok(())
}

pub(in crate::backend) fn chain_tensors<M: Machine>(gpu: &Gpu<M>, operator: TensorChain<'_>) -> Result<()> {
    let TensorChain { draft_probs, draft_ids, target, params, tokens, outcomes } = operator;
    if target.view().shape()[0] == 0 {
        return Ok(());
    }
    let (requests, _uploaded) = gpu.request_sources(OPERATOR, &params)?;
    let (ids, _uploaded_ids) = gpu.integers(OPERATOR, "draft ids", draft_ids)?;
    let arrays = ChainArrays {
        ids,
        tokens: gpu.check_device(OPERATOR, "tokens", tokens.as_indices().device())?,
        outcomes: gpu.check_device(OPERATOR, "outcomes", outcomes.as_indices().device())?,
    };
    launch(gpu, &draft_probs, &target, arrays, &requests)
}

/// Addresses of the integers of a launch.
struct ChainArrays {
    ids: u64,
    tokens: u64,
    outcomes: u64,
}

fn launch<M: Machine>(
    gpu: &Gpu<M>,
    drafts: &View<'_>,
    target: &Scores<'_>,
    arrays: ChainArrays,
    requests: &RequestSources,
) -> Result<()> {
    let (view, kind) = (target.view(), kind_of(target));
    let [batch, positions, vocab] = [view.shape()[0], view.shape()[1], view.shape()[2]];
    let columns = vocab_of(OPERATOR, vocab)?;
    let config = SampleConfig { kind, threads: large_kernel_threads(vocab) };
    let dtypes = [drafts.dtype(), view.dtype()];
    let kernel = gpu.sampling_kernel(OPERATOR, SamplingKernel::Chain(config, dtypes))?;
    let stride = |strides: &[usize], axis: usize| Arg::U64(strides[axis] as u64);
    let args = [
        Arg::U64(address(drafts)),
        Arg::U64(address(&view)),
        Arg::U64(arrays.ids),
        Arg::U64(arrays.tokens),
        Arg::U64(arrays.outcomes),
        stride(drafts.strides(), 0),
        stride(drafts.strides(), 1),
        stride(view.strides(), 0),
        stride(view.strides(), 1),
        Arg::U32(positions as u32 - 1),
        Arg::U32(columns),
    ];
    gpu.machine.launch(&kernel, [batch as u32, 1, 1], &[&args[..], &requests.args()].concat())
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
