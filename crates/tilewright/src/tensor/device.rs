//! Memory of a device, as an argument: views of it have an address instead of a slice.
//!
//! A view never leaves its [`DeviceMemory`]; only whoever makes that of an address has to vouch for it.

use super::{Data, DataMut, View, ViewMut, contiguous, strided, unaliased};
use crate::{Dtype, Result, with_dtype};
use std::{any::Any, fmt, sync::Arc};

/// Bytes in the memory of a device. They stay there as long as their owner lives, of which this is a share.
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
    device: u32,
    /// Gives the memory back when the last share of it is dropped; nobody where the caller keeps the memory.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// Where the first element of a view is, when it is on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceAddress {
    /// Number of the device.
    pub device: u32,
    /// Address in its memory.
    pub address: u64,
    /// How many elements there are from it on, gaps included.
    pub len: usize,
}

impl DeviceMemory {
    /// `bytes` bytes at `address` of device number `device`, kept by `owner` or, if it is `None`, by the caller.
    ///
    /// # Safety
    /// The bytes must be there, and stay there, as long as this or a view of it is used: by this thread, and by work on the device
    /// that has been given the views.
    #[allow(unsafe_code, reason = "declares what the caller vouches for; does nothing unsafe itself")]
    pub unsafe fn from_raw(
        address: u64,
        bytes: usize,
        device: u32,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Self {
        Self { address, bytes, device, _owner: owner }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How much it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Where its bytes are.
    pub fn place(&self) -> DeviceAddress {
        DeviceAddress { device: self.device, address: self.address, len: self.bytes }
    }

    /// A row-major view of the bytes from `offset` on.
    ///
    /// # Errors
    /// When they are not there, `offset` is not a multiple of an element, or the rank is above [`super::MAX_RANK`].
    pub fn view(&self, dtype: Dtype, offset: usize, shape: &[usize]) -> Result<View<'_>> {
        let len = shape.iter().try_fold(1_usize, |n, &extent| n.checked_mul(extent)).unwrap_or(usize::MAX);
        let device = self.part(dtype, offset, len)?;
        let (shape, strides) = contiguous(len, shape)?;
        Ok(View { data: nothing(dtype), device: Some(device), shape, strides })
    }

    /// A row-major view of the bytes from `offset` on, to be written.
    ///
    /// # Errors
    /// As [`DeviceMemory::view`].
    pub fn view_mut(&mut self, dtype: Dtype, offset: usize, shape: &[usize]) -> Result<ViewMut<'_>> {
        let View { device, shape, strides, .. } = self.view(dtype, offset, shape)?;
        Ok(ViewMut { data: nothing_mut(dtype), device, shape, strides })
    }

    /// A view of the bytes from `offset` on with explicit strides, in elements.
    ///
    /// # Errors
    /// When an index inside `shape` would fall outside the memory, and as [`DeviceMemory::view`].
    pub fn strided(
        &self,
        dtype: Dtype,
        offset: usize,
        (shape, strides): (&[usize], &[usize]),
    ) -> Result<View<'_>> {
        let rest = self.bytes.saturating_sub(offset) / dtype.size();
        let device = self.part(dtype, offset, rest)?;
        let (shape, strides) = strided(rest, shape, strides)?;
        Ok(View { data: nothing(dtype), device: Some(device), shape, strides })
    }

    /// A view of the bytes from `offset` on with explicit strides, in elements, to be written.
    ///
    /// # Errors
    /// As [`DeviceMemory::strided`], and when two indices would name one element.
    pub fn strided_mut(
        &mut self,
        dtype: Dtype,
        offset: usize,
        geometry: (&[usize], &[usize]),
    ) -> Result<ViewMut<'_>> {
        let View { device, shape, strides, .. } = self.strided(dtype, offset, geometry)?;
        unaliased(&shape, &strides)?;
        Ok(ViewMut { data: nothing_mut(dtype), device, shape, strides })
    }

    /// `len` elements that begin `offset` bytes behind the first.
    fn part(&self, dtype: Dtype, offset: usize, len: usize) -> Result<DeviceAddress> {
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
        Ok(DeviceAddress { device: self.device, address: self.address + offset as u64, len })
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x} of device {}", self.bytes, self.address, self.device)
    }
}

/// No element of the host: what tells the dtype of a view of a device.
fn nothing(dtype: Dtype) -> Data<'static> {
    with_dtype!(dtype, T => Data::from(&[] as &[T]))
}

fn nothing_mut(dtype: Dtype) -> DataMut<'static> {
    with_dtype!(dtype, T => DataMut::from(&mut [] as &mut [T]))
}

impl View<'_> {
    /// Where its elements are, if on a device.
    pub fn device(&self) -> Option<DeviceAddress> {
        self.device
    }
}

impl ViewMut<'_> {
    /// Where its elements are, if on a device.
    pub fn device(&self) -> Option<DeviceAddress> {
        self.device
    }
}

/// Refuses tensor arguments that are on a device, for an operator that reads host memory.
pub(crate) fn check_on_host(
    operator: &'static str,
    arguments: &[(&str, Option<DeviceAddress>)],
) -> Result<()> {
    for (name, place) in arguments {
        if let Some(place) = place {
            return Err(crate::Error::new(
                operator,
                format!("{name} is in the memory of device {}, expected host memory", place.device),
            ));
        }
    }
    Ok(())
}
