//! Token sampling: one launch. With parameters on the host, one copy of the outcomes of all rows follows.

use super::{error_of, kind_of, row_error, vocab_of};
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use std::sync::PoisonError;
use tilewright::{
    Operator, Result, View,
    sampling::{Scores, TensorParam, TensorParams, TensorSampling, TokenSampling},
    tensor::{DeviceMemory, Integers},
};
use tilewright_kernels::sampling::{
    ParamSource, ROW_OUTCOME_WORDS, RequestSources, RowCtas, SampleParams, SamplingKernel, request_flags,
};

pub(in crate::backend) fn sample<M: Machine>(gpu: &Gpu<M>, operator: TokenSampling<'_>) -> Result<()> {
    let name = operator.name();
    let TokenSampling { scores, params, out } = operator;
    let (rows, kind) = (out.len(), kind_of(&scores));
    if rows == 0 {
        return Ok(());
    }
    let (requests, _uploaded) = gpu.upload_requests(params)?;
    let outcomes = gpu.allocate(rows * ROW_OUTCOME_WORDS * 4)?;
    let params = SampleParams { outcomes: outcomes.address(), ..plain(name, &scores, requests)? };
    launch(gpu, name, &scores, rows, &params)?;
    let outcomes = gpu.read_words(&outcomes, rows * ROW_OUTCOME_WORDS)?;
    for (row, (out, outcome)) in out.iter_mut().zip(outcomes.chunks_exact(ROW_OUTCOME_WORDS)).enumerate() {
        *out = row_error(kind, outcome).map_or(Ok(outcome[1]), |why| Err(error_of(name, row, &why)));
    }
    Ok(())
}

pub(in crate::backend) fn sample_tensors<M: Machine>(
    gpu: &Gpu<M>,
    operator: TensorSampling<'_>,
) -> Result<()> {
    let name = operator.name();
    let TensorSampling { scores, rows, params, tokens, valid } = operator;
    let tokens = tokens.as_indices();
    if tokens.is_empty() {
        return Ok(());
    }
    let (requests, _uploaded) = gpu.request_sources(name, &params)?;
    let (row_ids, _uploaded_rows) = match rows {
        Some(rows) => gpu.integers(name, "rows", rows)?,
        None => (0, None),
    };
    let params = SampleParams {
        row_ids,
        tokens: gpu.check_device(name, "tokens", tokens.device())?,
        valid: valid.map_or(0, |valid| address(&valid.as_view())),
        ..plain(name, &scores, requests)?
    };
    launch(gpu, name, &scores, tokens.len(), &params)
}

/// Arguments of a launch without outputs.
fn plain(operator: &'static str, scores: &Scores<'_>, requests: RequestSources) -> Result<SampleParams> {
    let view = scores.view();
    Ok(SampleParams {
        scores: address(&view),
        stride: view.strides()[0] as u64,
        shape: [view.shape()[0] as u32, vocab_of(operator, view.shape()[1])?],
        row_ids: 0,
        outcomes: 0,
        tokens: 0,
        valid: 0,
        requests,
    })
}

fn launch<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    scores: &Scores<'_>,
    tokens: usize,
    params: &SampleParams,
) -> Result<()> {
    let (view, kind, limits) = (scores.view(), kind_of(scores), &gpu.limits);
    let of_row = RowCtas::choose([tokens, view.shape()[1]], limits.arch, limits.multiprocessors);
    let kernel = sampler(gpu, operator, SamplingKernel::Sample(kind, view.dtype(), of_row))?;
    gpu.machine.launch(&kernel, [tokens as u32 * of_row.ctas, 1, 1], &params.all_args())
}

/// The kernel of a draw: that of the last one if it is the same.
fn sampler<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    selected: SamplingKernel,
) -> Result<M::Function> {
    let last = || gpu.last_sampler.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, kernel)) = last().as_ref().filter(|(known, _)| *known == selected) {
        return Ok(kernel.clone());
    }
    let kernel = gpu.sampling_kernel(operator, selected)?;
    *last() = Some((selected, kernel.clone()));
    Ok(kernel)
}

impl<M: Machine> Gpu<M> {
    /// The sources of parameters. Integers on the host are uploaded; the returned memory must live until the work is submitted.
    pub(super) fn request_sources(
        &self,
        operator: &'static str,
        params: &TensorParams<'_>,
    ) -> Result<(RequestSources, [Option<DeviceMemory>; 3])> {
        let float = |param: &TensorParam<f32, View<'_>>| match param {
            TensorParam::All(value) => ParamSource::constant(value.to_bits().into()),
            TensorParam::Each(values) => ParamSource::array(address(values), size_of::<f32>() as u32),
        };
        let (top_k, counts) = match params.top_k {
            TensorParam::All(count) => (ParamSource::constant(count.unwrap_or(u32::MAX).into()), None),
            TensorParam::Each(counts) => self.array(operator, "top_k", counts)?,
        };
        let counter = |name, param: &TensorParam<u64, Integers<'_, u64>>| match param {
            TensorParam::All(value) => Ok((ParamSource::constant(*value), None)),
            TensorParam::Each(values) => self.array(operator, name, *values),
        };
        let (seed, seeds) = counter("seed", &params.seed)?;
        let (offset, offsets) = counter("offset", &params.offset)?;
        let sources = RequestSources {
            temperature: float(&params.temperature),
            top_k,
            top_p: float(&params.top_p),
            min_p: float(&params.min_p),
            flags: ParamSource::constant(request_flags(params.top_k_ties, params.order).into()),
            seed,
            offset,
            offset_step: params.offset_step,
        };
        Ok((sources, [counts, seeds, offsets]))
    }

    /// The source of integers, which are uploaded if they are on the host.
    fn array<T: bytemuck::Pod>(
        &self,
        operator: &'static str,
        name: &str,
        values: Integers<'_, T>,
    ) -> Result<(ParamSource, Option<DeviceMemory>)> {
        let (address, uploaded) = self.integers(operator, name, values)?;
        // one element holds for all tokens
        let stride = if values.len() == 1 { 0 } else { size_of::<T>() as u32 };
        Ok((ParamSource::array(address, stride), uploaded))
    }
}
