//! Distributions: softmax and the renormalizing filters are requests without other parameters.

use super::{kind_of, top_k::top_k_mask, vocab_of};
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use tilewright::{
    Operator, Result, View,
    sampling::{Filter, SamplingDistribution, SamplingParams, ScoreFilter, Scores, TensorDistribution},
};
use tilewright_kernels::sampling::{RequestSources, SampleConfig, SamplingKernel, cta_threads};
use tilewright_ptx::Arg;

pub(in crate::backend) fn distribution<M: Machine>(
    gpu: &Gpu<M>,
    operator: SamplingDistribution<'_>,
) -> Result<()> {
    let (requests, _uploaded) = gpu.upload_requests(operator.params)?;
    run(gpu, operator.name(), operator.scores, &requests, &operator.out.as_view())
}

pub(in crate::backend) fn distribution_tensors<M: Machine>(
    gpu: &Gpu<M>,
    operator: TensorDistribution<'_>,
) -> Result<()> {
    let (requests, _uploaded) = gpu.request_sources(operator.name(), &operator.params)?;
    run(gpu, operator.name(), operator.scores, &requests, &operator.out.as_view())
}

pub(in crate::backend) fn filter<M: Machine>(gpu: &Gpu<M>, operator: ScoreFilter<'_>) -> Result<()> {
    let plain = SamplingParams::default();
    let params: Vec<_> = match operator.filter {
        Filter::Softmax(temperatures) => {
            temperatures.iter().map(|&temperature| SamplingParams { temperature, ..plain }).collect()
        }
        Filter::TopKMask(counts) => return top_k_mask(gpu, operator, counts),
        Filter::TopKRenorm(counts) => {
            counts.iter().map(|&k| SamplingParams { top_k: Some(k), ..plain }).collect()
        }
        Filter::TopPRenorm(shares) => shares.iter().map(|&top_p| SamplingParams { top_p, ..plain }).collect(),
    };
    let scores = match operator.filter {
        Filter::Softmax(_) => Scores::Logits(operator.x),
        _ => Scores::Probs(operator.x),
    };
    let (requests, _uploaded) = gpu.upload_requests(&params)?;
    run(gpu, operator.name(), scores, &requests, &operator.out.as_view())
}

fn run<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    scores: Scores<'_>,
    requests: &RequestSources,
    out: &View<'_>,
) -> Result<()> {
    let (view, kind) = (scores.view(), kind_of(&scores));
    let [rows, vocab] = [view.shape()[0], view.shape()[1]];
    let columns = vocab_of(operator, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let config = SampleConfig { kind, threads: cta_threads(vocab) };
    let dtypes = [view.dtype(), out.dtype()];
    let kernel = gpu.sampling_kernel(operator, SamplingKernel::Distribution(config, dtypes))?;
    let args = [
        Arg::U64(address(&view)),
        Arg::U64(address(out)),
        Arg::U64(view.strides()[0] as u64),
        Arg::U64(out.strides()[0] as u64),
        Arg::U32(columns),
    ];
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &[&args[..], &requests.args()].concat())
}
