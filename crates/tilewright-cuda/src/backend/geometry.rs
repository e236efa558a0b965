//! Addresses, strides and extents of tensor arguments, as kernels take them.

use tilewright::{Error, Result, View};
use tilewright_kernels::tile::Strided;

/// The address of a view of an operator that [`on_device`](super::Gpu::on_device) has checked.
pub(super) fn address(view: &View<'_>) -> u64 {
    view.device().map_or(0, |location| location.address)
}

/// The stride of scales `[1]` or `[num_kv_heads]`.
pub(super) fn head_stride(scales: &View<'_>) -> u64 {
    if scales.shape()[0] > 1 { scales.strides()[0] as u64 } else { 0 }
}

/// The rows of a view with two or three axes; with two, there is one head. As [`address`].
pub(super) fn rows(view: &View<'_>) -> Strided {
    Strided { address: address(view), strides: outer(view.strides()) }
}

/// The strides of tokens and heads.
fn outer(strides: &[usize]) -> [u64; 2] {
    let of = |axis: usize| if axis + 1 < strides.len() { strides[axis] as u64 } else { 0 };
    [of(0), of(1)]
}

/// Tokens, heads and elements of a shape with two or three axes; `None` if it is empty.
pub(super) fn extents(operator: &'static str, shape: &[usize]) -> Result<Option<[u32; 3]>> {
    if shape.contains(&0) {
        return Ok(None);
    }
    let heads = if shape.len() == 3 { shape[1] } else { 1 };
    let all = [shape[0], heads, shape[shape.len() - 1]];
    let most = all[0].checked_mul(heads).filter(|rows| *rows < 1 << 31);
    tilewright::ensure!(
        most.is_some() && all[2] < 1 << 31,
        operator,
        "shape {shape:?} has more rows or longer ones than 2^31 - 1, the most of one launch"
    );
    Ok(Some(all.map(|extent| extent as u32)))
}

/// Checks that an extent is below 2^31.
pub(super) fn extent(operator: &'static str, name: &str, extent: usize) -> Result<u32> {
    u32::try_from(extent)
        .ok()
        .filter(|extent| *extent < 1 << 31)
        .ok_or_else(|| Error::new(operator, format!("{name} = {extent}, the most of one launch is 2^31 - 1")))
}
