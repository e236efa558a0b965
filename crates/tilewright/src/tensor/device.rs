//! Device memory as tensor arguments: views hold an address instead of a slice.
//!
//! A view borrows its [`DeviceMemory`]. Only its constructor, [`DeviceMemory::from_raw`], is unsafe.

use super::{Data, DataMut, View, ViewMut, contiguous, strided, unaliased};
use crate::{Dtype, Result, with_dtype};
use std::{any::Any, fmt, sync::Arc};

/// A range of bytes in device memory, which is valid while its shared owner lives.
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
    device: u32,
    /// Frees the memory when the last reference is dropped; `None` when the caller owns the memory.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// The address of the first element of a view on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceAddress {
    /// Device ordinal.
    pub device: u32,
    /// Device address.
    pub address: u64,
    /// The number of elements from there on, gaps included.
    pub len: usize,
}

impl DeviceMemory {
    /// `bytes` bytes at `address` of device `device`, owned by `owner` or, if it is `None`, by the caller.
    ///
    /// # Safety
    /// The bytes must stay valid while this or a view of it is used, by this thread or by device work that was passed the
    /// views.
    #[allow(unsafe_code, reason = "states the caller's obligation; performs no unsafe operation itself")]
    pub unsafe fn from_raw(
        address: u64,
        bytes: usize,
        device: u32,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Self {
        Self { address, bytes, device, owner }
    }

    /// The same memory, which keeps `owner` alive instead of its owner before.
    #[must_use]
    pub fn owned_by(self, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { owner: Some(owner), ..self }
    }

    /// The first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The object that keeps the memory alive; `None` if the caller does.
    pub fn owner(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.owner.as_deref()
    }

    /// The device ordinal.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The address range; its length is in bytes.
    pub fn device_address(&self) -> DeviceAddress {
        DeviceAddress { device: self.device, address: self.address, len: self.bytes }
    }

    /// A row-major view of the bytes from `offset` on.
    ///
    /// # Errors
    /// When the range is out of bounds, the address is not aligned to the element, or the rank is above [`super::MAX_RANK`].
    pub fn view(&self, dtype: Dtype, offset: usize, shape: &[usize]) -> Result<View<'_>> {
        let len = shape.iter().try_fold(1_usize, |n, &extent| n.checked_mul(extent)).unwrap_or(usize::MAX);
        let device = self.element_range(dtype, offset, len)?;
        let (shape, strides) = contiguous(len, shape)?;
        Ok(View { data: empty_data(dtype), device: Some(device), shape, strides })
    }

    /// A writable row-major view of the bytes from `offset` on.
    ///
    /// # Errors
    /// As [`DeviceMemory::view`].
    pub fn view_mut(&mut self, dtype: Dtype, offset: usize, shape: &[usize]) -> Result<ViewMut<'_>> {
        let View { device, shape, strides, .. } = self.view(dtype, offset, shape)?;
        Ok(ViewMut { data: empty_data_mut(dtype), device, shape, strides })
    }

    /// A view of the bytes from `offset` on with explicit strides, in elements.
    ///
    /// # Errors
    /// When an index inside `shape` would fall outside the memory, and as [`DeviceMemory::view`].
    pub fn strided(
        &self,
        dtype: Dtype,
        offset: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<View<'_>> {
        let rest = self.bytes.saturating_sub(offset) / dtype.size();
        let device = self.element_range(dtype, offset, rest)?;
        let (shape, strides) = strided(rest, shape, strides)?;
        Ok(View { data: empty_data(dtype), device: Some(device), shape, strides })
    }

    /// A writable view of the bytes from `offset` on with explicit strides, in elements.
    ///
    /// # Errors
    /// As [`DeviceMemory::strided`], and when two indices would alias one element.
    pub fn strided_mut(
        &mut self,
        dtype: Dtype,
        offset: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<ViewMut<'_>> {
        let View { device, shape, strides, .. } = self.strided(dtype, offset, shape, strides)?;
        unaliased(&shape, &strides)?;
        Ok(ViewMut { data: empty_data_mut(dtype), device, shape, strides })
    }

    /// Adjacent column blocks of one matrix, which begins at byte 0: block `i` is `shapes[i]`, `[rows, heads, dim]`. All have as many
    /// rows.
    ///
    /// # Errors
    /// When the rows differ, and as [`DeviceMemory::strided_mut`].
    pub fn columns_mut<const N: usize>(
        &mut self,
        dtype: Dtype,
        shapes: [[usize; 3]; N],
    ) -> Result<[ViewMut<'_>; N]> {
        const OPERATOR: &str = "tensor.columns";
        let alike = shapes.iter().all(|shape| shape[0] == shapes[0][0]);
        crate::ensure!(alike, OPERATOR, "shapes are {shapes:?}, expected as many rows in each block");
        let pitch: usize = shapes.iter().map(|[_, heads, dim]| heads * dim).sum();
        let (mut blocks, mut column) = (Vec::with_capacity(N), 0);
        for shape in shapes {
            let [_, heads, dim] = shape;
            let at = column * dtype.size();
            let View { device, shape, strides, .. } = self.strided(dtype, at, &shape, &[pitch, dim, 1])?;
            blocks.push(ViewMut { data: empty_data_mut(dtype), device, shape, strides });
            column += heads * dim;
        }
        blocks.try_into().map_err(|_| crate::Error::new(OPERATOR, "a block is missing"))
    }

    /// The address of `len` elements at byte `offset`.
    fn element_range(&self, dtype: Dtype, offset: usize, len: usize) -> Result<DeviceAddress> {
        const OPERATOR: &str = "tensor.device";
        crate::ensure!(
            offset.is_multiple_of(dtype.size()),
            OPERATOR,
            "offset = {offset} bytes is not a multiple of {}, the size of {dtype}",
            dtype.size()
        );
        let end = len.checked_mul(dtype.size()).and_then(|bytes| bytes.checked_add(offset));
        crate::ensure!(
            end.is_some_and(|end| end <= self.bytes),
            OPERATOR,
            "{len} elements of {dtype} from byte {offset} on do not fit into {} bytes",
            self.bytes
        );
        let address = self.address + offset as u64;
        crate::ensure!(
            len == 0 || address.is_multiple_of(dtype.size() as u64),
            OPERATOR,
            "address = {address:#x} is not a multiple of {}, the size of {dtype}",
            dtype.size()
        );
        Ok(DeviceAddress { device: self.device, address, len })
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x} of device {}", self.bytes, self.address, self.device)
    }
}

/// An empty host slice that carries the dtype of a device view.
fn empty_data(dtype: Dtype) -> Data<'static> {
    with_dtype!(dtype, T => Data::from(&[] as &[T]))
}

fn empty_data_mut(dtype: Dtype) -> DataMut<'static> {
    with_dtype!(dtype, T => DataMut::from(&mut [] as &mut [T]))
}

impl View<'_> {
    /// The device address; `None` for host memory.
    pub fn device(&self) -> Option<DeviceAddress> {
        self.device
    }
}

impl ViewMut<'_> {
    /// The device address; `None` for host memory.
    pub fn device(&self) -> Option<DeviceAddress> {
        self.device
    }
}
