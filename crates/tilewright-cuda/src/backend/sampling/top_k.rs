//! Top-k: the `k` largest elements per row, and masking of all others to -inf.

use super::{threads_of_large, vocab_of, with_elements};
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use tilewright::{
    Operator, Result, View,
    sampling::{ScoreFilter, TensorTopKMask, TieBreak, TopKSelection},
};
use tilewright_kernels::sampling::{self, LAST_FIRST, SORTED};
use tilewright_ptx::sim::Arg;

pub(in crate::backend) fn top_k<M: Machine>(gpu: &Gpu<M>, operator: TopKSelection<'_>) -> Result<()> {
    const OPERATOR: &str = "sampling.top_k";
    let TopKSelection { scores, top_k, values, indices } = operator;
    let [rows, vocab] = [scores.shape()[0], scores.shape()[1]];
    let columns = vocab_of(OPERATOR, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let threads = threads_of_large(vocab);
    let name = format!("top_k_{}_{threads}", scores.dtype());
    let kernel = with_elements!(OPERATOR, scores.dtype(), T => {
        gpu.kernel(OPERATOR, &name, |name| sampling::top_k::<T>(name, threads))
    })?;
    let sorted = if top_k.sorted { SORTED } else { 0 };
    let last_first = if top_k.ties == TieBreak::Highest { LAST_FIRST } else { 0 };
    let on_host = indices.as_indices().host().map(|values| gpu.allocate(4 * values.len())).transpose()?;
    let to = match &on_host {
        Some(memory) => memory.address(),
        None => gpu.check_device(OPERATOR, "indices", indices.as_indices().device())?,
    };
    let args = [
        Arg::U64(address(&scores)),
        Arg::U64(address(&values.as_view())),
        Arg::U64(to),
        Arg::U64(scores.strides()[0] as u64),
        Arg::U64(values.strides()[0] as u64),
        Arg::U32(columns),
        Arg::U32(top_k.k as u32),
        Arg::U32(sorted | last_first),
    ];
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &args)?;
    let (Some(memory), Some(indices)) = (on_host, indices.into_host()) else { return Ok(()) };
    gpu.machine.read(memory.address(), bytemuck::cast_slice_mut(indices))
}

pub(super) fn top_k_mask<M: Machine>(gpu: &Gpu<M>, operator: ScoreFilter<'_>, counts: &[u32]) -> Result<()> {
    let (name, ScoreFilter { x, out, .. }) = (operator.name(), &operator);
    let counts = gpu.upload_words(counts.iter().copied())?;
    launch_mask(gpu, name, (x, &out.as_view()), counts.address())
}

pub(in crate::backend) fn top_k_mask_tensors<M: Machine>(
    gpu: &Gpu<M>,
    operator: TensorTopKMask<'_>,
) -> Result<()> {
    let (name, TensorTopKMask { logits, top_k, out }) = (operator.name(), &operator);
    let (counts, _uploaded) = gpu.integers(name, "top_k", *top_k)?;
    launch_mask(gpu, name, (logits, &out.as_view()), counts)
}

fn launch_mask<M: Machine>(
    gpu: &Gpu<M>,
    operator_name: &'static str,
    (x, out): (&View<'_>, &View<'_>),
    counts: u64,
) -> Result<()> {
    let [rows, vocab] = [x.shape()[0], x.shape()[1]];
    let columns = vocab_of(operator_name, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let threads = threads_of_large(vocab);
    let name = format!("top_k_mask_{}_{threads}", x.dtype());
    let kernel = with_elements!(operator_name, x.dtype(), T => {
        gpu.kernel(operator_name, &name, |name| sampling::top_k_mask::<T>(name, threads))
    })?;
    let args = [
        Arg::U64(address(x)),
        Arg::U64(counts),
        Arg::U64(address(out)),
        Arg::U64(x.strides()[0] as u64),
        Arg::U64(out.strides()[0] as u64),
        Arg::U32(columns),
    ];
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &args)
}
