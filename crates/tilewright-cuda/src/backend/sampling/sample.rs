//! Token sampling: one launch, then one copy of the outcomes of all rows.

use super::{error_of, kind_of, name_of, row_error, threads_of, vocab_of, with_elements};
use crate::{backend::Gpu, machine::Machine};
use tilewright::{
    Result,
    sampling::{Sampled, SamplingParams, Scores},
};
use tilewright_kernels::sampling::{self, ROW_OUTCOME_WORDS, SampleConfig};
use tilewright_ptx::sim::Arg;

pub(in crate::backend) fn sample<M: Machine>(
    gpu: &Gpu<M>,
    scores: Scores<'_>,
    params: &[SamplingParams],
    out: &mut [Sampled],
) -> Result<()> {
    let (operator, argument) = match scores {
        Scores::Logits(_) => ("sampling.sample", "logits"),
        Scores::Probs(_) => ("sampling.sampling_from_probs", "probs"),
    };
    let (view, kind) = (scores.view(), kind_of(&scores));
    let [rows, vocab] = [view.shape()[0], view.shape()[1]];
    let address = gpu.address(operator, argument, &view)?;
    let columns = vocab_of(operator, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let config = SampleConfig { kind, threads: threads_of(vocab) };
    let name = format!("sample_{}_{}_{}", name_of(kind), view.dtype(), config.threads);
    let kernel = with_elements!(operator, view.dtype(), T => {
        gpu.kernel(operator, &name, |name| sampling::sample::<T>(name, config))
    })?;
    let (requests, outcomes) = (gpu.upload_requests(params)?, gpu.allocate(rows * ROW_OUTCOME_WORDS * 4)?);
    let args = [
        Arg::U64(address),
        Arg::U64(requests.address()),
        Arg::U64(outcomes.address()),
        Arg::U64(view.strides()[0] as u64),
        Arg::U32(columns),
    ];
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &args)?;
    let outcomes = gpu.read_words(&outcomes, rows * ROW_OUTCOME_WORDS)?;
    for (row, (out, outcome)) in out.iter_mut().zip(outcomes.chunks_exact(ROW_OUTCOME_WORDS)).enumerate() {
        *out = row_error(kind, outcome).map_or(Ok(outcome[1]), |why| Err(error_of(operator, row, &why)));
    }
    Ok(())
}
