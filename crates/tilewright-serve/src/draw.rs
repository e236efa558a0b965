//! Sampling of one token per request, with the edits of each request's logits.

use crate::{request::Request, scheduler::Scheduler};
use tilewright::{
    Backend, Dtype, Result, View,
    sampling::{self, Bias, History, Penalties, Sampled},
    tensor::copy,
};

/// Samples a token for each of the running `requests` from its row of `logits`.
pub(crate) fn draw<B: Backend>(
    backend: &B,
    scheduler: &Scheduler,
    requests: &[usize],
    logits: View<'_>,
) -> Result<Vec<(usize, Sampled)>> {
    let rows: Vec<&Request> = requests.iter().map(|&at| &scheduler.running[at]).collect();
    let params: Vec<_> = rows.iter().map(|request| request.sampling()).collect();
    let mut drawn = vec![Ok(0); requests.len()];
    if rows.iter().any(|request| request.has_edits()) {
        // A copy, because forks share one row of the logits.
        let mut copied = backend.allocate(Dtype::F32, logits.shape().iter().product())?;
        let shape = [rows.len(), logits.shape()[1]];
        copy(backend, logits, copied.view_mut(&shape)?)?;
        let prompts: Vec<_> = rows.iter().map(|request| request.prompt()).collect();
        let outputs: Vec<_> = rows.iter().map(|request| request.output()).collect();
        let penalties: Vec<Penalties> = rows.iter().map(|request| request.penalties()).collect();
        let history = History::Tokens { prompt: &prompts, output: &outputs };
        sampling::apply_penalties(backend, copied.view_mut(&shape)?, &penalties, history)?;
        let excluded: Vec<Vec<Bias>> = rows.iter().map(|request| request.excluded()).collect();
        let excluded: Vec<&[Bias]> = excluded.iter().map(Vec::as_slice).collect();
        sampling::apply_logit_bias(backend, copied.view_mut(&shape)?, &excluded)?;
        sampling::sample(backend, copied.view(&shape)?, &params, &mut drawn)?;
    } else {
        sampling::sample(backend, logits, &params, &mut drawn)?;
    }
    Ok(requests.iter().copied().zip(drawn).collect())
}
