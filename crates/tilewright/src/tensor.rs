//! Tensor views of caller-owned memory, with shape, strides and dtype.
//!
//! A view never owns memory and never allocates. Shapes and strides are in elements. Any strides that stay within the
//! memory are valid, so slices of fused projections (`q` inside `qkv`) need no copy.

mod buffer;
mod copy;
mod data;
mod device;
mod indices;
#[cfg(feature = "memmap2")]
mod map_file;

pub use buffer::Buffer;
pub use copy::copy;
pub(crate) use copy::on_host as copy_on_host;
pub(crate) use data::with_computable;
pub use data::{Data, DataMut};
pub use device::{DeviceAddress, DeviceMemory};
pub use indices::{IndexBuffer, Indices, IndicesMut, Integers};
pub(crate) use indices::{copy_i32, copy_i64, largest_i32};
#[cfg(feature = "memmap2")]
pub use map_file::map_file;

use crate::{Dtype, Element, Error, Result};
pub(crate) use data::each_data;
use std::fmt;

/// The largest number of dimensions of a view.
pub const MAX_RANK: usize = 4;

/// Up to [`MAX_RANK`] extents or strides, in elements. Compares and prints like a slice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    values: [usize; MAX_RANK],
    rank: usize,
}

impl Dims {
    fn new(values: &[usize]) -> Self {
        let mut dims = Self { values: [0; MAX_RANK], rank: values.len() };
        dims.values[..values.len()].copy_from_slice(values);
        dims
    }

    /// Row-major strides of `shape`.
    fn contiguous(shape: &[usize]) -> Self {
        let mut strides = Self::new(shape);
        let mut step = 1;
        for axis in (0..shape.len()).rev() {
            strides.values[axis] = step;
            // a shape with an extent of 0 or strides of 0 may span more than the address space
            step = step.saturating_mul(shape[axis]);
        }
        strides
    }
}

impl std::ops::Deref for Dims {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.values[..self.rank]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// A read-only tensor argument: elements, shape and strides.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The elements; empty for device memory.
    data: Data<'a>,
    device: Option<DeviceAddress>,
    shape: Dims,
    strides: Dims,
}

/// A writable tensor argument.
pub struct ViewMut<'a> {
    /// The elements; empty for device memory.
    data: DataMut<'a>,
    device: Option<DeviceAddress>,
    shape: Dims,
    strides: Dims,
}

impl<'a> View<'a> {
    /// A row-major view of all of `data`.
    ///
    /// # Errors
    /// When the product of `shape` differs from the number of elements, or the rank is above [`MAX_RANK`].
    pub fn new(data: impl Into<Data<'a>>, shape: &[usize]) -> Result<Self> {
        let data = data.into();
        let len = each_data!(data, Data, s => s.len());
        let (shape, strides) = contiguous(len, shape)?;
        Ok(Self { data, device: None, shape, strides })
    }

    /// A view with explicit strides, in elements.
    ///
    /// # Errors
    /// When an index inside `shape` would fall outside `data`.
    pub fn strided(data: impl Into<Data<'a>>, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let data = data.into();
        let len = each_data!(data, Data, s => s.len());
        let (shape, strides) = strided(len, shape, strides)?;
        Ok(Self { data, device: None, shape, strides })
    }

    /// Reshapes `[rows, dim]` to `[rows, 1, dim]`.
    pub(crate) fn with_single_head(self) -> Self {
        let (shape, strides) = ([self.shape[0], 1, self.shape[1]], [self.strides[0], 0, self.strides[1]]);
        Self { shape: Dims::new(&shape), strides: Dims::new(&strides), ..self }
    }

    /// The elements as a typed slice, in memory order (strides apply); empty for device memory.
    pub fn as_slice<T: Element>(&self) -> Option<&'a [T]> {
        T::slice(self.data)
    }

    /// The elements, in memory order (strides apply); empty for device memory.
    pub fn data(&self) -> Data<'a> {
        self.data
    }

    /// The exact value at `index`.
    ///
    /// # Panics
    /// When `index` is out of bounds, or the view is on a device. For tests and oracles; operators check first.
    pub fn at(&self, index: &[usize]) -> f32 {
        let at = offset(&self.shape, &self.strides, index);
        each_data!(self.data, Data, s => s[at].to_f32())
    }
}

impl<'a> ViewMut<'a> {
    /// A row-major view of all of `data`.
    ///
    /// # Errors
    /// When the product of `shape` differs from the number of elements, or the rank is above [`MAX_RANK`].
    pub fn new(data: impl Into<DataMut<'a>>, shape: &[usize]) -> Result<Self> {
        let data = data.into();
        let len = each_data!(&data, DataMut, s => s.len());
        let (shape, strides) = contiguous(len, shape)?;
        Ok(Self { data, device: None, shape, strides })
    }

    /// A view with explicit strides, in elements.
    ///
    /// # Errors
    /// When an index inside `shape` would fall outside `data`, or two indices would alias one element.
    pub fn strided(data: impl Into<DataMut<'a>>, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let data = data.into();
        let len = each_data!(&data, DataMut, s => s.len());
        let (shape, strides) = strided(len, shape, strides)?;
        unaliased(&shape, &strides)?;
        Ok(Self { data, device: None, shape, strides })
    }

    /// The elements as a typed slice, in memory order (strides apply); empty for device memory.
    pub fn as_slice<T: Element>(&mut self) -> Option<&mut [T]> {
        T::slice_mut(self.reborrow().data)
    }

    /// Rounds `value` and stores it at `index`.
    ///
    /// # Panics
    /// When `index` is out of bounds, or the view is on a device. For tests and small outputs; operators check first.
    pub fn set(&mut self, index: &[usize], value: f32) {
        let at = offset(&self.shape, &self.strides, index);
        each_data!(&mut self.data, DataMut, s => s[at] = Element::from_f32(value));
    }

    /// A view of the same memory with a shorter lifetime, so that it can be passed on and used again.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        let data = each_data!(&mut self.data, DataMut, s => DataMut::from(&mut **s));
        ViewMut { data, device: self.device, shape: self.shape, strides: self.strides }
    }

    /// A read-only view of the same memory.
    pub fn as_view(&self) -> View<'_> {
        let data = each_data!(&self.data, DataMut, s => Data::from(&**s));
        View { data, device: self.device, shape: self.shape, strides: self.strides }
    }

    /// The elements, in memory order (strides apply), for the whole lifetime of the view.
    pub fn into_data(self) -> DataMut<'a> {
        self.data
    }

    /// The elements as a typed slice for the whole lifetime of the view.
    pub fn into_slice<T: Element>(self) -> Option<&'a mut [T]> {
        T::slice_mut(self.data)
    }
}

macro_rules! geometry {
    ($View:ident, $Enum:ident) => {
        impl $View<'_> {
            /// The extents, in elements.
            pub fn shape(&self) -> &[usize] {
                &self.shape
            }

            /// The distance between consecutive indices of each axis, in elements.
            pub fn strides(&self) -> &[usize] {
                &self.strides
            }

            /// The element type.
            pub fn dtype(&self) -> Dtype {
                match self.data {
                    $Enum::F32(_) => Dtype::F32,
                    $Enum::F16(_) => Dtype::F16,
                    $Enum::Bf16(_) => Dtype::Bf16,
                    $Enum::E4m3(_) => Dtype::E4m3,
                    $Enum::E5m2(_) => Dtype::E5m2,
                    $Enum::I8(_) => Dtype::I8,
                }
            }

            /// Whether the view covers its memory densely in row-major order.
            pub fn is_contiguous(&self) -> bool {
                let dense = Dims::contiguous(&self.shape);
                self.shape
                    .iter()
                    .zip(self.strides.iter().zip(dense.iter()))
                    .all(|(&n, (a, b))| n <= 1 || a == b)
            }
        }

        impl fmt::Debug for $View<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}{:?} strides {:?}", self.dtype(), self.shape, self.strides)?;
                self.device.map_or(Ok(()), |at| write!(f, " on device {}", at.device))
            }
        }
    };
}

geometry!(View, Data);
geometry!(ViewMut, DataMut);

fn contiguous(len: usize, shape: &[usize]) -> Result<(Dims, Dims)> {
    check_rank("tensor.new", shape)?;
    let count = if shape.contains(&0) {
        Some(0)
    } else {
        shape.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent))
    };
    crate::ensure!(
        count == Some(len),
        "tensor.new",
        "shape {shape:?} needs {} elements, the data has {len}",
        count.map_or("more than 2^64".to_owned(), |n| n.to_string())
    );
    Ok((Dims::new(shape), Dims::contiguous(shape)))
}

fn strided(len: usize, shape: &[usize], strides: &[usize]) -> Result<(Dims, Dims)> {
    check_rank("tensor.strided", shape)?;
    crate::ensure!(
        shape.len() == strides.len(),
        "tensor.strided",
        "shape {shape:?} has {} axes, strides {strides:?} have {}",
        shape.len(),
        strides.len()
    );
    let end = shape.iter().zip(strides).try_fold(1usize, |end, (&extent, &stride)| {
        end.checked_add(extent.saturating_sub(1).checked_mul(stride)?)
    });
    crate::ensure!(
        shape.contains(&0) || end.is_some_and(|end| end <= len),
        "tensor.strided",
        "shape {shape:?} with strides {strides:?} reaches beyond the {len} elements of the data"
    );
    Ok((Dims::new(shape), Dims::new(strides)))
}

/// Rejects aliasing strides: in ascending stride order, each stride must be at least the span of all smaller
/// axes.
fn unaliased(shape: &Dims, strides: &Dims) -> Result<()> {
    if shape.contains(&0) {
        return Ok(()); // no index exists, so no two alias
    }
    let mut axes: Vec<(usize, usize)> =
        strides.iter().copied().zip(shape.iter().copied()).filter(|&(_, extent)| extent > 1).collect();
    axes.sort_unstable();
    let mut span = 1;
    for (stride, extent) in axes {
        crate::ensure!(
            stride >= span,
            "tensor.strided",
            "shape {shape:?} with strides {strides:?} names one element twice, which an output must not"
        );
        span += (extent - 1) * stride;
    }
    Ok(())
}

fn check_rank(operator: &'static str, shape: &[usize]) -> Result<()> {
    crate::ensure!(
        shape.len() <= MAX_RANK,
        operator,
        "shape {shape:?} has {} axes, the most is {MAX_RANK}",
        shape.len()
    );
    Ok(())
}

fn offset(shape: &Dims, strides: &Dims, index: &[usize]) -> usize {
    assert!(
        index.len() == shape.len() && index.iter().zip(shape.iter()).all(|(i, n)| i < n),
        "index {index:?} is outside {shape:?}"
    );
    index.iter().zip(strides.iter()).map(|(i, s)| i * s).sum()
}

/// Rejects a tensor argument whose shape is not `expected`; `layout` names the axes, as in
/// `[tokens, heads, head_dim]`.
pub(crate) fn check_shape(
    operator: &'static str,
    argument: &str,
    actual: &[usize],
    expected: &[usize],
    layout: &str,
) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(Error::new(operator, format!("{argument} has shape {actual:?}, expected {layout} = {expected:?}")))
}

/// Rejects a tensor argument of another dtype.
pub(crate) fn check_dtype(
    operator: &'static str,
    argument: &str,
    actual: Dtype,
    expected: Dtype,
) -> Result<()> {
    crate::ensure!(actual == expected, operator, "{argument} is {actual}, expected {expected}");
    Ok(())
}

/// Rejects a tensor argument whose dtype is restricted to KV caches.
pub(crate) fn check_computable(operator: &'static str, argument: &str, actual: Dtype) -> Result<()> {
    crate::ensure!(!actual.is_cache_only(), operator, "{argument} is {actual}, expected f32, f16 or bf16");
    Ok(())
}
