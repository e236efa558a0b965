//! Top-k: the `k` largest elements per row, and masking of all others to -inf.

use super::vocab_of;
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use tilewright::{
    Error, Operator, Result, View,
    sampling::{IndexMapping, ScoreFilter, TensorTopKMask, TieBreak, TopKSelection, TopKTransform},
    tensor::{DeviceMemory, Indices, IndicesMut},
};
use tilewright_kernels::sampling::{LAST_FIRST, SORTED, SamplingKernel, large_kernel_threads};
use tilewright_ptx::Arg;

pub(in crate::backend) fn top_k<M: Machine>(gpu: &Gpu<M>, operator: TopKSelection<'_>) -> Result<()> {
    const OPERATOR: &str = "sampling.top_k";
    let TopKSelection { scores, top_k, values, indices } = operator;
    let [rows, vocab] = [scores.shape()[0], scores.shape()[1]];
    let columns = vocab_of(OPERATOR, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let threads = large_kernel_threads(vocab);
    let kernel = gpu.sampling_kernel(OPERATOR, SamplingKernel::TopK(scores.dtype(), threads))?;
    let sorted = if top_k.sorted { SORTED } else { 0 };
    let last_first = if top_k.ties == TieBreak::Highest { LAST_FIRST } else { 0 };
    let indices = Written::new(gpu, OPERATOR, "indices", indices)?;
    let args = [
        Arg::U64(address(&scores)),
        Arg::U64(address(&values.as_view())),
        Arg::U64(indices.address),
        Arg::U64(scores.strides()[0] as u64),
        Arg::U64(values.strides()[0] as u64),
        Arg::U32(columns),
        Arg::U32(top_k.k as u32),
        Arg::U32(sorted | last_first),
    ];
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &args)?;
    indices.read(gpu)
}

pub(in crate::backend) fn top_k_transform<M: Machine>(
    gpu: &Gpu<M>,
    operator: TopKTransform<'_>,
) -> Result<()> {
    let (operator_name, rows) = (operator.name(), operator.scores.shape()[0]);
    let TopKTransform { scores, lengths, starts, k, ties, mapping, indices, window_indices } = operator;
    let max_len = vocab_of(operator_name, scores.shape()[1])?;
    if rows == 0 {
        return Ok(());
    }
    let threads = large_kernel_threads(max_len as usize);
    let kernel =
        gpu.sampling_kernel(operator_name, SamplingKernel::TopKTransform(scores.dtype(), threads))?;
    let mut uploaded = Vec::new();
    let mut array = |name: &str, indices: Option<Indices<'_>>| {
        let Some(indices) = indices else { return Ok(Arg::U64(0)) };
        let (at, memory) = gpu.integers(operator_name, name, indices)?;
        uploaded.push(memory);
        Ok::<_, Error>(Arg::U64(at))
    };
    let arrays = [array("lengths", Some(lengths))?, array("starts", starts)?];
    let (mapping, sizes) = match mapping {
        IndexMapping::Offsets(offsets) => (
            [array("offsets", Some(offsets))?, Arg::U64(0), Arg::U64(0)],
            [Arg::U32(0), Arg::U32(0), Arg::U32(0)],
        ),
        IndexMapping::Pages(pages) => {
            let sizes = [pages.width, pages.num_tables(), pages.page_size.trailing_zeros() as usize];
            let bases = array("table_starts", pages.starts)?;
            let tables = [array("table", Some(pages.table))?, array("table_rows", pages.table_rows)?];
            let [table, table_rows] = tables;
            ([bases, table, table_rows], sizes.map(|size| Arg::U32(size as u32)))
        }
    };
    let indices = Written::new(gpu, operator_name, "indices", indices)?;
    let window_indices = window_indices.map(|to| Written::new(gpu, operator_name, "window_indices", to));
    let window_indices = window_indices.transpose()?;
    let last_first = if ties == TieBreak::Highest { LAST_FIRST } else { 0 };
    let mut args = vec![Arg::U64(address(&scores))];
    args.extend(arrays.into_iter().chain(mapping));
    args.extend([indices.address, window_indices.as_ref().map_or(0, |to| to.address)].map(Arg::U64));
    args.push(Arg::U64(scores.strides()[0] as u64));
    args.extend([max_len, k as u32].map(Arg::U32).into_iter().chain(sizes).chain([Arg::U32(last_first)]));
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &args)?;
    indices.read(gpu)?;
    window_indices.map_or(Ok(()), |to| to.read(gpu))
}

/// Indices that a kernel writes: those of the host through device memory.
struct Written<'a> {
    address: u64,
    to_host: Option<(DeviceMemory, &'a mut [i32])>,
}

impl<'a> Written<'a> {
    fn new<M: Machine>(
        gpu: &Gpu<M>,
        operator: &'static str,
        name: &str,
        indices: IndicesMut<'a>,
    ) -> Result<Self> {
        if indices.as_indices().host().is_none() {
            let address = gpu.check_device(operator, name, indices.as_indices().device())?;
            return Ok(Self { address, to_host: None });
        }
        let memory = gpu.allocate(4 * indices.as_indices().len())?;
        Ok(Self { address: memory.address(), to_host: indices.into_host().map(|host| (memory, host)) })
    }

    /// Reads them back to the host, which waits for the kernel.
    fn read<M: Machine>(self, gpu: &Gpu<M>) -> Result<()> {
        let Some((memory, host)) = self.to_host else { return Ok(()) };
        gpu.machine.read(memory.address(), bytemuck::cast_slice_mut(host))
    }
}

pub(super) fn top_k_mask<M: Machine>(gpu: &Gpu<M>, operator: ScoreFilter<'_>, counts: &[u32]) -> Result<()> {
    let (name, ScoreFilter { x, out, .. }) = (operator.name(), &operator);
    let counts = gpu.upload_words(counts.iter().copied())?;
    launch_mask(gpu, name, x, &out.as_view(), counts.address())
}

pub(in crate::backend) fn top_k_mask_tensors<M: Machine>(
    gpu: &Gpu<M>,
    operator: TensorTopKMask<'_>,
) -> Result<()> {
    let (name, TensorTopKMask { logits, top_k, out }) = (operator.name(), &operator);
    let (counts, _uploaded) = gpu.integers(name, "top_k", *top_k)?;
    launch_mask(gpu, name, logits, &out.as_view(), counts)
}

fn launch_mask<M: Machine>(
    gpu: &Gpu<M>,
    operator_name: &'static str,
    x: &View<'_>,
    out: &View<'_>,
    counts: u64,
) -> Result<()> {
    let [rows, vocab] = [x.shape()[0], x.shape()[1]];
    let columns = vocab_of(operator_name, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let threads = large_kernel_threads(vocab);
    let kernel = gpu.sampling_kernel(operator_name, SamplingKernel::TopKMask(x.dtype(), threads))?;
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
