//! Append to the paged KV cache with the kernels of `tilewright_kernels::append`.

use super::append_slots::AppendSlots;
use crate::{
    backend::{Gpu, address, extent, head_stride, rows},
    machine::Machine,
};
use tilewright::{
    DeviceMemory, Operator, Result, View,
    kv::{self, KvStrides, ScaleMut, SlotArrays, Slots, append::KvAppend},
};
use tilewright_kernels::{
    append::{self as kernels, AppendParams, Cache, Scale, SlotMapping, SlotTable, dynamic},
    tile::Strided,
};

/// The slots of all tokens and the ranges of each page, in the kernels' layout.
struct SlotWords {
    slots: Vec<u32>,
    pages: Vec<u32>,
}

impl SlotWords {
    fn new(slots: &Slots<'_>) -> Self {
        let (mut arrays, mut begin) = (Self { slots: Vec::new(), pages: Vec::new() }, 0);
        for page in slots.pages() {
            // the engine counts tokens and pages by i32, so the casts are lossless
            let of = |slot: &kv::Slot| [slot.token as u32, slot.page as u32, slot.slot as u32];
            arrays.slots.extend(page.slots.iter().flat_map(of));
            let end = begin + page.slots.len() as u32;
            arrays.pages.extend([page.page as u32, begin, end, page.filled as u32]);
            begin = end;
        }
        arrays
    }
}

pub(in crate::backend) fn append<M: Machine>(gpu: &Gpu<M>, operator: KvAppend<'_>) -> Result<()> {
    let (name, KvAppend { new, cache, strides, slots, scale, .. }) = (operator.name(), &operator);
    let [tokens, heads, dim] = [0, 1, 2].map(|axis| new.shape()[axis]);
    if tokens == 0 || heads == 0 || dim == 0 {
        return Ok(());
    }
    let to = AppendTarget {
        operator: name,
        dtypes: (new.dtype(), cache.dtype()),
        shape: [extent(name, "num_kv_heads", heads)?, extent(name, "head_dim", dim)?],
        new: rows(new),
        cache: paged(&cache.as_view(), *strides),
    };
    let slots = match (slots, scale) {
        (kv::AppendSlots::Checked(slots), _) => slots,
        (kv::AppendSlots::Device { arrays, num_pages }, ScaleMut::Static(scale)) => {
            let (slot_mapping, _uploaded) = gpu.slot_mapping(name, arrays, *num_pages)?;
            return to.append_scaled(gpu, slot_mapping, *scale);
        }
        // rejected by the engine
        (kv::AppendSlots::Device { .. }, ScaleMut::Dynamic(_)) => return Ok(()),
    };
    let prepared = slots.prepared().and_then(|prepared| prepared.downcast_ref::<AppendSlots>());
    if let (Some(prepared), ScaleMut::Static(scale)) = (prepared, scale) {
        gpu.use_slots(name, prepared)?;
        return to.append_scaled(gpu, prepared.mapping(tokens as u32), *scale);
    }
    let arrays = SlotWords::new(slots);
    let count = arrays.slots.len() as u32 / 3;
    if count == 0 {
        return Ok(());
    }
    let at = gpu.upload(bytemuck::cast_slice(&arrays.slots))?;
    match scale {
        ScaleMut::Static(scale) => {
            to.append_scaled(gpu, SlotMapping::Slots { slots: at.address(), count }, *scale)
        }
        ScaleMut::Dynamic(scales) => {
            let pages = gpu.upload(bytemuck::cast_slice(&arrays.pages))?;
            let pages = (pages.address(), arrays.pages.len() as u32 / 4);
            to.append_dynamic(gpu, at.address(), pages, &scales.as_view())
        }
    }
}

impl<M: Machine> Gpu<M> {
    /// The mapping of arrays on the device. Those on the host are uploaded; the returned memory must live until the work is
    /// submitted.
    fn slot_mapping(
        &self,
        operator: &'static str,
        arrays: &SlotArrays<'_>,
        num_pages: usize,
    ) -> Result<(SlotMapping, Vec<DeviceMemory>)> {
        let page_size = extent(operator, "page_size", arrays.page_size())?;
        let count = extent(operator, "num_tokens", arrays.tokens())?;
        let mut uploaded = Vec::new();
        let mapping = match *arrays {
            SlotArrays::Paged { batch_indices, positions, indptr, indices, .. } => {
                let num_requests = extent(operator, "num_requests", indptr.len() - 1)?;
                let num_indices = extent(operator, "kv indices", indices.len())?;
                let mut upload = |name, array| -> Result<u64> {
                    let (address, memory) = self.integers(operator, name, array)?;
                    uploaded.extend(memory);
                    Ok(address)
                };
                let table = SlotTable {
                    batch_indices: upload("batch_indices", batch_indices)?,
                    positions: upload("positions", positions)?,
                    indptr: upload("kv indptr", indptr)?,
                    indices: upload("kv indices", indices)?,
                    page_size,
                };
                let num_pages = extent(operator, "num_pages", num_pages)?;
                SlotMapping::Unchecked { table, num_requests, num_indices, num_pages, count }
            }
            SlotArrays::Mapping { slot_mapping, .. } => {
                let (numbers, memory) = self.integers(operator, "slot_mapping", slot_mapping)?;
                uploaded.extend(memory);
                let num_slots = num_pages.saturating_mul(page_size as usize);
                let num_slots = extent(operator, "slots of the cache", num_slots)?;
                SlotMapping::Numbers { numbers, page_size, num_slots, count }
            }
        };
        Ok((mapping, uploaded))
    }
}

/// A paged cache as kernels take it.
pub(super) fn paged(cache: &View<'_>, strides: KvStrides) -> Cache {
    let strides = [strides.page, strides.token, strides.head].map(|stride| stride as u64);
    Cache { address: address(cache), strides }
}

/// The source and destination of an append.
struct AppendTarget {
    operator: &'static str,
    dtypes: (tilewright::Dtype, tilewright::Dtype),
    shape: [u32; 2],
    new: Strided,
    cache: Cache,
}

impl AppendTarget {
    fn append_scaled<M: Machine>(
        &self,
        gpu: &Gpu<M>,
        slot_mapping: SlotMapping,
        scale: kv::Scale<'_>,
    ) -> Result<()> {
        let of = |at, page_stride, head_stride| Scale { at, page_stride, head_stride, factor: 1.0 };
        let mut temporary = None;
        let scale = match scale {
            kv::Scale::One => None,
            kv::Scale::Tensor(factor) => Some(Scale { factor, ..of(0, 0, 0) }),
            kv::Scale::Head(heads) => {
                let (address, memory) = gpu.constants(heads)?;
                temporary = memory;
                Some(of(address, 0, 1))
            }
            kv::Scale::Values(scales) => Some(of(address(&scales), 0, head_stride(&scales))),
            kv::Scale::Page(pages) => {
                let strides = pages.strides();
                let head = strides.get(1).map_or(0, |stride| *stride as u64);
                Some(of(address(&pages), strides[0] as u64, head))
            }
        };
        let call = AppendParams {
            dtypes: self.dtypes,
            shape: self.shape,
            new: self.new,
            cache: self.cache,
            slot_mapping,
            scale,
        };
        let config = call.config();
        let kernel = gpu.kernel(self.operator, &config.name(), |name| kernels::append(name, config))?;
        let (grid, args) = call.launch();
        let launched = gpu.machine.launch(&kernel, grid, &args);
        drop(temporary); // freed in stream order, after the launch
        launched
    }

    fn append_dynamic<M: Machine>(
        &self,
        gpu: &Gpu<M>,
        slots: u64,
        pages: (u64, u32),
        scales: &View<'_>,
    ) -> Result<()> {
        tilewright::ensure!(
            self.shape[0] <= 0xffff,
            self.operator,
            "num_kv_heads = {}, the most of one launch is 65535",
            self.shape[0]
        );
        let strides = scales.strides();
        let scales = Strided { address: address(scales), strides: [strides[0] as u64, strides[1] as u64] };
        let call = dynamic::DynamicAppendParams {
            dtypes: self.dtypes,
            shape: self.shape,
            new: self.new,
            cache: self.cache,
            slots,
            pages,
            scales,
        };
        let config = dynamic::DynamicAppendConfig { dtypes: self.dtypes };
        let kernel = gpu.kernel(self.operator, &config.name(), |name| dynamic::append(name, config))?;
        let (grid, args) = call.launch();
        gpu.machine.launch(&kernel, grid, &args)
    }
}
