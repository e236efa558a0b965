//! Verification of drafted tokens: chain speculative sampling.

use crate::{
    AnyBackend, Keywords, Named, Queue, TensorArg, TensorDtype, TokenParams, check_separate, invalid, raised,
    sampling::{ParamFields, RowError, of_kind},
};
use pyo3::prelude::*;
use tilewright::{
    Error, Operator, Result,
    sampling::{ChainCounts, ChainOutput, Drafts, Scores, TensorChain, chain_speculative_sampling},
    tensor::{Indices, IndicesMut},
};

pub(crate) const CHAIN: &str = "sampling.chain_speculative_sampling";

/// The tensors of a verification: draft probabilities, ids int32, target, tokens int32, outcomes int32.
#[derive(FromPyObject)]
pub(crate) struct ChainTensors(TensorArg, TensorArg, TensorArg, TensorArg, TensorArg);

/// The tensors of a verification that it reads.
pub(crate) struct ChainInputs<'a> {
    pub(crate) draft_probs: &'a TensorArg,
    pub(crate) draft_ids: &'a TensorArg,
    /// The elements of `draft_ids`.
    pub(crate) ids: Indices<'a>,
    pub(crate) target: &'a TensorArg,
}

impl ChainInputs<'_> {
    /// Verifies drafted tokens. `outcomes` share no memory with other arguments.
    pub(crate) fn verify(
        &self,
        backend: &AnyBackend,
        params: &TokenParams,
        tokens: &mut TensorArg,
        outcomes: IndicesMut<'_>,
    ) -> Result<()> {
        let &Self { draft_probs, ids, target, .. } = self;
        for input in params.named().chain(self.named()) {
            check_separate(CHAIN, tokens.named("tokens"), input)?;
        }
        TensorChain {
            draft_probs: draft_probs.view(CHAIN, "draft probs")?,
            draft_ids: ids,
            target: Scores::Probs(target.view(CHAIN, "target probs")?),
            params: params.tensors(CHAIN)?,
            tokens: tokens.indices_mut(CHAIN, "tokens")?,
            outcomes,
        }
        .run(backend)
    }

    fn named(&self) -> [Named<'_>; 3] {
        let Self { draft_probs, draft_ids, target, .. } = self;
        [draft_probs.named("draft probs"), draft_ids.named("draft ids"), target.named("target probs")]
    }
}

/// Verifies drafted tokens with parameters that stay where they are; the target has probabilities.
#[pyfunction]
pub(crate) fn chain_tensors(
    py: Python<'_>,
    queue: &Queue,
    params: TokenParams,
    tensors: ChainTensors,
) -> PyResult<()> {
    let ChainTensors(draft_probs, draft_ids, target, mut tokens, mut outcomes) = tensors;
    py.detach(|| {
        let ids = draft_ids.integers(CHAIN, "draft ids")?;
        let inputs = ChainInputs { draft_probs: &draft_probs, draft_ids: &draft_ids, ids, target: &target };
        for input in params.named().chain(inputs.named()) {
            check_separate(CHAIN, outcomes.named("outcomes"), input)?;
        }
        check_separate(CHAIN, tokens.named("tokens"), outcomes.named("outcomes"))?;
        inputs.verify(&queue.backend, &params, &mut tokens, outcomes.indices_mut(CHAIN, "outcomes")?)
    })
    .map_err(raised)
}

/// Drafted tokens and the target's scores.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct ChainFields {
    draft_probs: TensorArg,
    draft_ids: TensorArg,
    target: TensorArg,
    probs: bool,
    params: ParamFields,
}

/// Tokens, `(accepted, emitted)` of each request, and the reasons of failed requests.
type ChainResult = (Vec<i32>, Vec<(u64, u64)>, Vec<RowError>);

/// Verifies drafted tokens.
#[pyfunction]
pub(crate) fn chain_sample(
    py: Python<'_>,
    queue: &Queue,
    fields: Keywords<ChainFields>,
) -> PyResult<ChainResult> {
    let Keywords(fields) = fields;
    let ChainFields { draft_probs, draft_ids, target, probs, params } = fields;
    let &[batch, drafted] = draft_ids.shape() else {
        return Err(invalid(
            CHAIN,
            format!("draft_ids has shape {:?}, expected [batch, n]", draft_ids.shape()),
        ));
    };
    let verified = py.detach(|| {
        let ids: Vec<i32> = match draft_ids.dtype() {
            TensorDtype::I32 => bytemuck::pod_collect_to_vec(draft_ids.dense_host(CHAIN, "draft_ids")?),
            other => return Err(Error::new(CHAIN, format!("draft_ids is {other}, expected int32"))),
        };
        let params = params.rows(CHAIN, batch)?;
        let mut tokens = vec![-1; batch.saturating_mul(drafted + 1)];
        let mut chains: Vec<Result<ChainCounts>> = vec![Ok(ChainCounts::default()); batch];
        let drafts = Drafts { probs: draft_probs.view(CHAIN, "draft_probs")?, ids: &ids };
        let target = of_kind(&target, CHAIN, probs)?;
        let out = ChainOutput { tokens: &mut tokens, chains: &mut chains, totals: None };
        chain_speculative_sampling(&queue.backend, drafts, target, &params, out)?;
        Ok((tokens, chains))
    });
    let (tokens, chains) = verified.map_err(raised)?;
    let error = |(row, chain): (usize, &Result<ChainCounts>)| Some((row, chain.as_ref().err()?.to_string()));
    let errors = chains.iter().enumerate().filter_map(error).collect();
    let counts =
        chains.into_iter().map(|chain| chain.map_or((0, 0), |counts| (counts.accepted, counts.emitted)));
    Ok((tokens, counts.collect(), errors))
}
