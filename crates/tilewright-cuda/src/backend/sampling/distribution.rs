//! Distributions: softmax and the renormalizing filters are requests without other parameters.

use super::{kind_of, name_of, threads_of, top_k::top_k_mask, vocab_of, with_elements};
use crate::{backend::Gpu, machine::Machine};
use tilewright::{
    Result, View, ViewMut,
    sampling::{Filter, SamplingParams, Scores},
};
use tilewright_kernels::sampling::{self, SampleConfig};
use tilewright_ptx::sim::Arg;

pub(in crate::backend) fn distribution<M: Machine>(
    gpu: &Gpu<M>,
    scores: Scores<'_>,
    params: &[SamplingParams],
    out: ViewMut<'_>,
) -> Result<()> {
    let argument = if matches!(scores, Scores::Logits(_)) { "logits" } else { "probs" };
    run(gpu, ("sampling.distribution", argument), (scores, params), out)
}

pub(in crate::backend) fn softmax<M: Machine>(
    gpu: &Gpu<M>,
    logits: View<'_>,
    temperature: &[f32],
    out: ViewMut<'_>,
) -> Result<()> {
    let of = |&temperature: &f32| SamplingParams { temperature, ..SamplingParams::default() };
    let params: Vec<_> = temperature.iter().map(of).collect();
    run(gpu, ("sampling.softmax", "logits"), (Scores::Logits(logits), &params), out)
}

pub(in crate::backend) fn filter<M: Machine>(
    gpu: &Gpu<M>,
    filter: Filter<'_>,
    x: View<'_>,
    out: ViewMut<'_>,
) -> Result<()> {
    let plain = SamplingParams::default();
    let (operator, params): (_, Vec<_>) = match filter {
        Filter::TopKMask(counts) => return top_k_mask(gpu, counts, x, out),
        Filter::TopKRenorm(counts) => (
            "sampling.top_k_renorm_probs",
            counts.iter().map(|&k| SamplingParams { top_k: Some(k), ..plain }).collect(),
        ),
        Filter::TopPRenorm(shares) => (
            "sampling.top_p_renorm_probs",
            shares.iter().map(|&top_p| SamplingParams { top_p, ..plain }).collect(),
        ),
    };
    run(gpu, (operator, "probs"), (Scores::Probs(x), &params), out)
}

fn run<M: Machine>(
    gpu: &Gpu<M>,
    (operator, argument): (&'static str, &str),
    (scores, params): (Scores<'_>, &[SamplingParams]),
    out: ViewMut<'_>,
) -> Result<()> {
    let (view, kind) = (scores.view(), kind_of(&scores));
    let [rows, vocab] = [view.shape()[0], view.shape()[1]];
    let (from, to) = (gpu.address(operator, argument, &view)?, gpu.address_mut(operator, "out", &out)?);
    let columns = vocab_of(operator, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let config = SampleConfig { kind, threads: threads_of(vocab) };
    let name = format!("distribution_{}_{}_{}_{}", name_of(kind), view.dtype(), out.dtype(), config.threads);
    let kernel = with_elements!(operator, view.dtype(), T => with_elements!(operator, out.dtype(), O => {
        gpu.kernel(operator, &name, |name| sampling::distribution::<T, O>(name, config))
    }))?;
    let requests = gpu.upload_requests(params)?;
    let args = [
        Arg::U64(from),
        Arg::U64(requests.address()),
        Arg::U64(to),
        Arg::U64(view.strides()[0] as u64),
        Arg::U64(out.strides()[0] as u64),
        Arg::U32(columns),
    ];
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &args)
}
