//! Tensor memory of the engine's `Backend`: buffers, and copies to, from and within the device.

use super::{Gpu, geometry::address};
use crate::machine::Machine;
use tilewright::{
    Buffer, DeviceMemory, Dtype, Error, Result, View, ViewMut, kv::PageCopies, tensor::IndexBuffer,
};

pub(super) fn allocate<M: Machine>(gpu: &Gpu<M>, dtype: Dtype, len: usize) -> Result<Buffer> {
    let bytes = len.checked_mul(dtype.size()).ok_or_else(|| {
        let text = format!("{len} elements of {dtype} are more bytes than can be counted");
        Error::new("tensor.allocate", text)
    })?;
    Ok(Buffer::on_device(dtype, gpu.machine.allocate(bytes.max(1))?))
}

pub(super) fn allocate_indices<M: Machine>(gpu: &Gpu<M>, len: usize) -> Result<IndexBuffer> {
    Ok(IndexBuffer::on_device(gpu.machine.allocate(len.max(1).saturating_mul(size_of::<i32>()))?))
}

/// The engine has checked that both are contiguous and have the same shape and dtype.
pub(super) fn copy<M: Machine>(gpu: &Gpu<M>, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
    const OPERATOR: &str = "tensor.copy";
    let bytes = from.shape().iter().product::<usize>() * from.dtype().size();
    if bytes == 0 {
        return Ok(());
    }
    match (from.device(), to.device()) {
        (None, Some(_)) => {
            let to = gpu.address_mut(OPERATOR, "to", &to)?;
            gpu.machine.write(to, &from.data().bytes()[..bytes])
        }
        (Some(_), None) => {
            let from = gpu.address(OPERATOR, "from", &from)?;
            gpu.machine.read(from, &mut to.into_data().into_bytes()[..bytes])
        }
        _ => {
            let (from, to) = (gpu.address(OPERATOR, "from", &from)?, gpu.address_mut(OPERATOR, "to", &to)?);
            gpu.machine.copy(from, to, bytes)
        }
    }
}

pub(super) fn write_indices<M: Machine>(gpu: &Gpu<M>, from: &[i32], to: &mut IndexBuffer) -> Result<()> {
    const OPERATOR: &str = "tensor.write_indices";
    let (len, location) = (to.len(), to.device().map(DeviceMemory::device_address));
    tilewright::ensure!(
        from.len() <= len,
        OPERATOR,
        "there are {} indices, the buffer has room for {len}",
        from.len()
    );
    let to = gpu.check_device(OPERATOR, "to", location)?;
    if from.is_empty() {
        return Ok(());
    }
    gpu.machine.write(to, bytemuck::cast_slice(from))
}

/// One copy per page: a fork of a request copies only its last, partial page.
pub(super) fn copy_pages<M: Machine>(gpu: &Gpu<M>, operator: PageCopies<'_>) -> Result<()> {
    let PageCopies { pages, copies } = operator;
    let start = address(&pages.as_view());
    let bytes = pages.shape()[1..].iter().product::<usize>() * pages.dtype().size();
    let page = |number: usize| start + (number * bytes) as u64;
    copies.iter().try_for_each(|&(from, to)| gpu.machine.copy(page(from), page(to), bytes))
}
