//! Tensor copies between host and device, or within either.

use super::{Data, DataMut, View, ViewMut, check_dtype, check_shape};
use crate::{Backend, Element, Result};

/// Copies all elements of `from` to `to`: host to device, device to host, or within one of them.
///
/// Both are contiguous and have the same shape and dtype. A copy to the host synchronizes with the work before it. After a copy
/// from the host returns, the caller may change `from`.
///
/// # Errors
/// When a shape or dtype differs, a tensor is not contiguous, or a tensor is on a device of another backend.
pub fn copy<B: Backend + ?Sized>(backend: &B, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
    const OPERATOR: &str = "tensor.copy";
    check_shape(OPERATOR, "to", to.shape(), from.shape(), "that of from")?;
    check_dtype(OPERATOR, "to", to.dtype(), from.dtype())?;
    for (name, dense, strides) in
        [("from", from.is_contiguous(), from.strides()), ("to", to.is_contiguous(), to.strides())]
    {
        crate::ensure!(dense, OPERATOR, "{name} has strides {strides:?}, expected a contiguous tensor");
    }
    backend.copy(from, to)
}

/// [`copy`] within host memory.
pub(crate) fn on_host(from: View<'_>, to: ViewMut<'_>) {
    fn each<T: Element>(from: &[T], to: &mut [T]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    }
    match (from.data(), to.into_data()) {
        (Data::F32(from), DataMut::F32(to)) => each(from, to),
        (Data::F16(from), DataMut::F16(to)) => each(from, to),
        (Data::Bf16(from), DataMut::Bf16(to)) => each(from, to),
        (Data::E4m3(from), DataMut::E4m3(to)) => each(from, to),
        (Data::E5m2(from), DataMut::E5m2(to)) => each(from, to),
        (Data::I8(from), DataMut::I8(to)) => each(from, to),
        _ => {} // dtypes are equal, as `copy` has checked
    }
}
