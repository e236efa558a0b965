//! Token sampling: one launch, then one copy of the outcomes of all rows.

use super::{error_of, kind_of, name_of, row_error, vocab_of, with_elements};
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use tilewright::{Operator, Result, sampling::TokenSampling};
use tilewright_kernels::sampling::{self, ROW_OUTCOME_WORDS, RowCtas};
use tilewright_ptx::sim::Arg;

pub(in crate::backend) fn sample<M: Machine>(gpu: &Gpu<M>, operator: TokenSampling<'_>) -> Result<()> {
    let name = operator.name();
    let TokenSampling { scores, params, out } = operator;
    let (view, kind) = (scores.view(), kind_of(&scores));
    let [rows, vocab] = [view.shape()[0], view.shape()[1]];
    let columns = vocab_of(name, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let limits = &gpu.limits;
    let of_row = RowCtas::choose([rows, vocab], limits.arch, limits.multiprocessors);
    let kernel_name = format!("sample_{}_{}_{}x{}", name_of(kind), view.dtype(), of_row.ctas, of_row.threads);
    let kernel = with_elements!(name, view.dtype(), T => {
        gpu.kernel(name, &kernel_name, |name| sampling::sample::<T>(name, kind, of_row))
    })?;
    let (requests, outcomes) = (gpu.upload_requests(params)?, gpu.allocate(rows * ROW_OUTCOME_WORDS * 4)?);
    let args = [
        Arg::U64(address(&view)),
        Arg::U64(requests.address()),
        Arg::U64(outcomes.address()),
        Arg::U64(view.strides()[0] as u64),
        Arg::U32(columns),
    ];
    gpu.machine.launch(&kernel, [rows as u32 * of_row.ctas, 1, 1], &args)?;
    let outcomes = gpu.read_words(&outcomes, rows * ROW_OUTCOME_WORDS)?;
    for (row, (out, outcome)) in out.iter_mut().zip(outcomes.chunks_exact(ROW_OUTCOME_WORDS)).enumerate() {
        *out = row_error(kind, outcome).map_or(Ok(outcome[1]), |why| Err(error_of(name, row, &why)));
    }
    Ok(())
}
