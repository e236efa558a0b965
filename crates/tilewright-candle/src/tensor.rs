//! Storage of candle tensors on the CPU as views: f32, f16 and bf16; strides are kept.

use candle_core::{CpuStorage, Layout, backend::BackendStorage as _};
use tilewright::{Error, Result, View, ViewMut};

const OPERATOR: &str = "candle.tensor";

/// A view of a tensor's storage. `name` is the argument in errors.
///
/// # Errors
/// If the dtype is not f32, f16 or bf16, or the rank is above [`tilewright::tensor::MAX_RANK`].
pub fn view<'a>(name: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<View<'a>> {
    let start = layout.start_offset();
    let (shape, strides) = (layout.dims(), layout.stride());
    match storage {
        CpuStorage::F32(values) => View::strided(from(values, start), shape, strides),
        CpuStorage::F16(values) => View::strided(from(values, start), shape, strides),
        CpuStorage::BF16(values) => View::strided(from(values, start), shape, strides),
        other => Err(unsupported(other.dtype())),
    }
    .map_err(|error| named(name, &error))
}

fn from<T>(values: &[T], start: usize) -> &[T] {
    values.get(start..).unwrap_or_default()
}

/// Writable views of K and V in the storage of a cache `[2, ...]`.
pub(crate) fn halves_mut<'a>(storage: &'a mut CpuStorage, [k, v]: &[Layout; 2]) -> Result<[ViewMut<'a>; 2]> {
    macro_rules! split {
        ($values:expr) => {{
            let (low, high) = $values.split_at_mut_checked(v.start_offset()).ok_or_else(out_of_bounds)?;
            let low = low.get_mut(k.start_offset()..).ok_or_else(out_of_bounds)?;
            Ok([ViewMut::strided(low, k.dims(), k.stride())?, ViewMut::strided(high, v.dims(), v.stride())?])
        }};
    }
    match storage {
        CpuStorage::F32(values) => split!(values),
        CpuStorage::F16(values) => split!(values),
        CpuStorage::BF16(values) => split!(values),
        other => Err(unsupported(other.dtype())),
    }
    .map_err(|error: Error| named("cache", &error))
}

/// The layouts of K and V in a cache `[2, num_pages, ...]`.
pub(crate) fn halves(cache: &Layout) -> Result<[Layout; 2]> {
    let (dims, strides, start) = (cache.dims(), cache.stride(), cache.start_offset());
    if dims.len() != 5 || dims[0] != 2 {
        let expected = "[2, num_pages, page_size, num_kv_heads, head_dim], or heads before page_size for HND";
        return Err(Error::new(OPERATOR, format!("cache has shape {dims:?}, expected {expected}")));
    }
    let half = |start| Layout::new(dims[1..].into(), strides[1..].to_vec(), start);
    Ok([half(start), half(start + strides[0])])
}

pub(crate) fn out_of_bounds() -> Error {
    Error::new(OPERATOR, "the layout exceeds the storage")
}

pub(crate) fn unsupported(dtype: candle_core::DType) -> Error {
    Error::new(OPERATOR, format!("dtype = {}, expected f32, f16 or bf16", dtype.as_str()))
}

/// Prefixes the message of an error with an argument.
pub(crate) fn named(name: &str, error: &Error) -> Error {
    Error::new(OPERATOR, format!("{name}: {}", error.message()))
}
