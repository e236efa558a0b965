//! Owned tensor memory: elements on the host, or bytes on a device.
//!
//! A backend allocates it ([`crate::Backend::allocate`]); operators take views of it. Its length is fixed; a view may
//! cover a prefix.

use super::{Data, DataMut, DeviceMemory, View, ViewMut};
use crate::{Dtype, E4m3, E5m2, Error, Result};
use bytemuck::allocation::try_zeroed_vec;
use half::{bf16, f16};
use std::fmt;

/// Owned elements of one dtype.
pub struct Buffer {
    storage: Storage,
    dtype: Dtype,
    len: usize,
}

enum Storage {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    /// Bits of 8-bit floats.
    Bits(Vec<u8>),
    I8(Vec<i8>),
    Device(DeviceMemory),
}

impl Buffer {
    /// Allocates `len` zeroed elements in host memory.
    ///
    /// # Errors
    /// When the allocation fails.
    pub fn on_host(dtype: Dtype, len: usize) -> Result<Self> {
        let refused = |()| {
            let text = format!("{len} elements of {dtype} need memory that this machine does not give");
            Error::new("tensor.allocate", text)
        };
        let storage = match dtype {
            Dtype::F32 => try_zeroed_vec(len).map(Storage::F32),
            Dtype::F16 => try_zeroed_vec(len).map(Storage::F16),
            Dtype::Bf16 => try_zeroed_vec(len).map(Storage::Bf16),
            Dtype::E4m3 | Dtype::E5m2 => try_zeroed_vec(len).map(Storage::Bits),
            Dtype::I8 => try_zeroed_vec(len).map(Storage::I8),
        };
        Ok(Self { storage: storage.map_err(refused)?, dtype, len })
    }

    /// As many elements as fit into `memory`; they are uninitialized.
    pub fn on_device(dtype: Dtype, memory: DeviceMemory) -> Self {
        Self { len: memory.bytes() / dtype.size(), storage: Storage::Device(memory), dtype }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// The device memory; `None` for host memory.
    pub fn device(&self) -> Option<&DeviceMemory> {
        if let Storage::Device(memory) = &self.storage { Some(memory) } else { None }
    }

    /// A row-major view of the first elements.
    ///
    /// # Errors
    /// When `shape` needs more elements, or its rank is above [`super::MAX_RANK`].
    pub fn view(&self, shape: &[usize]) -> Result<View<'_>> {
        let len = self.check(shape)?;
        match self.elements() {
            Ok(elements) => View::new(elements.take(len), shape),
            Err(memory) => memory.view(self.dtype, 0, shape),
        }
    }

    /// A writable row-major view of the first elements.
    ///
    /// # Errors
    /// As [`Buffer::view`].
    pub fn view_mut(&mut self, shape: &[usize]) -> Result<ViewMut<'_>> {
        let len = self.check(shape)?;
        let dtype = self.dtype;
        match self.elements_mut() {
            Ok(elements) => ViewMut::new(elements.take(len), shape),
            Err(memory) => memory.view_mut(dtype, 0, shape),
        }
    }

    /// A view of the elements from `offset` on with explicit strides, in elements.
    ///
    /// # Errors
    /// When an index inside `shape` would fall outside the buffer.
    pub fn strided(&self, offset: usize, shape: &[usize], strides: &[usize]) -> Result<View<'_>> {
        match self.elements() {
            Ok(elements) => View::strided(elements.skip(offset), shape, strides),
            Err(memory) => memory.strided(self.dtype, self.byte(offset), shape, strides),
        }
    }

    /// A writable view of the elements from `offset` on with explicit strides, in elements.
    ///
    /// # Errors
    /// As [`Buffer::strided`], and when two indices would alias one element.
    pub fn strided_mut(&mut self, offset: usize, shape: &[usize], strides: &[usize]) -> Result<ViewMut<'_>> {
        let (dtype, byte) = (self.dtype, self.byte(offset));
        match self.elements_mut() {
            Ok(elements) => ViewMut::strided(elements.skip(offset), shape, strides),
            Err(memory) => memory.strided_mut(dtype, byte, shape, strides),
        }
    }

    /// [`DeviceMemory::columns_mut`] of a buffer in device memory.
    ///
    /// # Errors
    /// As there, and when the buffer is in host memory, where blocks of columns cannot be borrowed apart.
    pub fn columns_mut<const N: usize>(&mut self, shapes: [[usize; 3]; N]) -> Result<[ViewMut<'_>; N]> {
        let dtype = self.dtype;
        match self.elements_mut() {
            Ok(_) => {
                Err(Error::new("tensor.columns", "the buffer is in host memory, expected device memory"))
            }
            Err(memory) => memory.columns_mut(dtype, shapes),
        }
    }

    fn byte(&self, offset: usize) -> usize {
        offset.saturating_mul(self.dtype.size())
    }

    /// The number of elements of `shape`, if the buffer has that many.
    fn check(&self, shape: &[usize]) -> Result<usize> {
        let len = shape.iter().try_fold(1_usize, |n, &extent| n.checked_mul(extent));
        len.filter(|&len| len <= self.len).ok_or_else(|| {
            let text = format!("shape {shape:?} does not fit into a buffer of {} elements", self.len);
            Error::new("tensor.buffer", text)
        })
    }

    /// The host elements, or the device memory.
    fn elements(&self) -> std::result::Result<Data<'_>, &DeviceMemory> {
        Ok(match &self.storage {
            Storage::F32(values) => Data::F32(values),
            Storage::F16(values) => Data::F16(values),
            Storage::Bf16(values) => Data::Bf16(values),
            Storage::Bits(bits) => match self.dtype {
                Dtype::E4m3 => Data::E4m3(E4m3::slice_from_bits(bits)),
                _ => Data::E5m2(E5m2::slice_from_bits(bits)),
            },
            Storage::I8(values) => Data::I8(values),
            Storage::Device(memory) => return Err(memory),
        })
    }

    /// The host elements, or the device memory.
    fn elements_mut(&mut self) -> std::result::Result<DataMut<'_>, &mut DeviceMemory> {
        Ok(match &mut self.storage {
            Storage::F32(values) => DataMut::F32(values),
            Storage::F16(values) => DataMut::F16(values),
            Storage::Bf16(values) => DataMut::Bf16(values),
            Storage::Bits(bits) => match self.dtype {
                Dtype::E4m3 => DataMut::E4m3(E4m3::slice_from_bits_mut(bits)),
                _ => DataMut::E5m2(E5m2::slice_from_bits_mut(bits)),
            },
            Storage::I8(values) => DataMut::I8(values),
            Storage::Device(memory) => return Err(memory),
        })
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.dtype, self.len)?;
        self.device().map_or(Ok(()), |memory| write!(f, " on device {}", memory.device()))
    }
}
