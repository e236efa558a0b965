//! Appending to pages by the kernels of `tilewright_kernels::append`.

use super::{AppendPlaces, Gpu, geometry::extent};
use crate::machine::Machine;
use tilewright::{
    Result, View, ViewMut, kv,
    kv::{ScaleMut, Slots},
};
use tilewright_kernels::{
    append::{self as kernels, AppendParams, Cache, Scale, SlotMapping, dynamic},
    tile::Strided,
};

const OPERATOR: &str = "kv.append";

/// Tokens, pages and slots of all places, and where each page's begin, as the kernels take them.
struct Arrays {
    slots: Vec<u32>,
    pages: Vec<u32>,
}

impl Arrays {
    fn new(slots: &Slots<'_>) -> Self {
        let (mut arrays, mut begin) = (Self { slots: Vec::new(), pages: Vec::new() }, 0);
        for page in slots.pages() {
            // tokens and pages are counted by i32, so these fit
            let of = |slot: &kv::Slot| [slot.token as u32, slot.page as u32, slot.slot as u32];
            arrays.slots.extend(page.slots.iter().flat_map(of));
            let end = begin + page.slots.len() as u32;
            arrays.pages.extend([page.page as u32, begin, end, page.filled as u32]);
            begin = end;
        }
        arrays
    }
}

pub(super) fn append<M: Machine>(
    gpu: &Gpu<M>,
    new: View<'_>,
    cache: ViewMut<'_>,
    slots: &Slots<'_>,
    scale: ScaleMut<'_>,
) -> Result<()> {
    let [tokens, heads, dim] = [0, 1, 2].map(|axis| new.shape()[axis]);
    if tokens == 0 || heads == 0 || dim == 0 {
        return Ok(());
    }
    let to = Target {
        dtypes: (new.dtype(), cache.dtype()),
        shape: [extent(OPERATOR, "num_kv_heads", heads)?, extent(OPERATOR, "head_dim", dim)?],
        new: gpu.rows(OPERATOR, "new", &new)?,
        cache: Cache {
            address: gpu.address_mut(OPERATOR, "cache", &cache)?,
            strides: [slots.offset(1, 0, 0), slots.offset(0, 1, 0), slots.offset(0, 0, 1)]
                .map(|stride| stride as u64),
        },
    };
    let prepared = slots.prepared().and_then(|prepared| prepared.downcast_ref::<AppendPlaces>());
    if let (Some(prepared), ScaleMut::Static(scale)) = (prepared, &scale) {
        gpu.check_place(OPERATOR, "the plan", Some(prepared.place()))?;
        return to.given(gpu, prepared.table(tokens as u32), *scale);
    }
    let arrays = Arrays::new(slots);
    let count = arrays.slots.len() as u32 / 3;
    if count == 0 {
        return Ok(());
    }
    let at = gpu.upload(bytemuck::cast_slice(&arrays.slots))?;
    match scale {
        ScaleMut::Static(scale) => to.given(gpu, SlotMapping::Slots { slots: at.address(), count }, scale),
        ScaleMut::Dynamic(scales) => {
            let pages = gpu.upload(bytemuck::cast_slice(&arrays.pages))?;
            let pages = (pages.address(), arrays.pages.len() as u32 / 4);
            to.dynamic(gpu, at.address(), pages, &scales)
        }
    }
}

/// What is appended to what.
struct Target {
    dtypes: (tilewright::Dtype, tilewright::Dtype),
    shape: [u32; 2],
    new: Strided,
    cache: Cache,
}

impl Target {
    fn given<M: Machine>(&self, gpu: &Gpu<M>, slot_mapping: SlotMapping, scale: kv::Scale<'_>) -> Result<()> {
        let of = |at, page_stride, head_stride| Scale { at, page_stride, head_stride, factor: 1.0 };
        let mut of_this_call = None;
        let scale = match scale {
            kv::Scale::One => None,
            kv::Scale::Tensor(factor) => Some(Scale { factor, ..of(0, 0, 0) }),
            kv::Scale::Head(heads) => {
                let (address, memory) = gpu.factors(heads)?;
                of_this_call = memory;
                Some(of(address, 0, 1))
            }
            kv::Scale::Page(pages) => {
                let strides = pages.strides();
                let head = strides.get(1).map_or(0, |stride| *stride as u64);
                Some(of(gpu.address(OPERATOR, "scale", &pages)?, strides[0] as u64, head))
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
        let kernel = gpu.kernel(OPERATOR, &config.name(), |name| kernels::append(name, config))?;
        let (grid, args) = call.launch();
        let launched = gpu.machine.launch(&kernel, grid, &args);
        drop(of_this_call); // behind the launch
        launched
    }

    fn dynamic<M: Machine>(
        &self,
        gpu: &Gpu<M>,
        slots: u64,
        pages: (u64, u32),
        scales: &ViewMut<'_>,
    ) -> Result<()> {
        tilewright::ensure!(
            self.shape[0] <= 0xffff,
            OPERATOR,
            "num_kv_heads = {}, the most of one launch is 65535",
            self.shape[0]
        );
        let strides = scales.strides();
        let scales = Strided {
            address: gpu.address_mut(OPERATOR, "scale", scales)?,
            strides: [strides[0] as u64, strides[1] as u64],
        };
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
        let kernel = gpu.kernel(OPERATOR, &config.name(), |name| dynamic::append(name, config))?;
        let (grid, args) = call.launch();
        gpu.machine.launch(&kernel, grid, &args)
    }
}
