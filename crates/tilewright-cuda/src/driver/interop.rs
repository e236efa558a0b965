//! Streams and slices of cudarc's safe API as streams and memory of this crate (feature `cudarc`).
//!
//! cudarc orders work on a slice by events: an access waits for the previous ones, and its end is recorded. [`CudarcSlice`] and
//! [`CudarcSliceMut`] are such accesses: drop them after the calls that use them.

use super::{Context, DriverError, Result, Stream, stream::Owner};
use bytemuck::Pod;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use std::{ops::Deref, sync::Arc};
use tilewright::{Dtype, ViewMut, tensor::DeviceMemory};

/// A slice that operators read; it dereferences to its memory.
#[derive(Debug)]
pub struct CudarcSlice<'a> {
    memory: DeviceMemory,
    _access: SyncOnDrop<'a>,
}

/// A slice that operators write. It dereferences to its memory; `DerefMut` would let callers swap the memory out of the access.
#[derive(Debug)]
pub struct CudarcSliceMut<'a> {
    memory: DeviceMemory,
    _access: SyncOnDrop<'a>,
}

impl Stream {
    /// Opens the GPU of a cudarc stream and uses this stream, which stays alive as long as the result.
    ///
    /// # Errors
    /// As [`Context::open`], and if the stream does not belong to the primary context.
    pub fn from_cudarc(stream: Arc<CudaStream>) -> Result<Self> {
        let (ordinal, handle) = (stream.context().ordinal(), stream.cu_stream() as u64);
        Context::open(ordinal)?.stream_owned_by(Owner::Cudarc(stream), handle)
    }

    /// A slice, read by later work of this stream: a `CudaSlice` or one of its views.
    ///
    /// # Errors
    /// If the slice belongs to another GPU, or this stream is not [`Stream::from_cudarc`].
    pub fn slice<'a, T: Pod>(&'a self, slice: &'a impl DevicePtr<T>) -> Result<CudarcSlice<'a>> {
        let stream = self.cudarc_stream("stream.slice", slice)?;
        let bytes = slice.num_bytes();
        let (address, access) = slice.device_ptr(stream);
        Ok(CudarcSlice { memory: self.slice_memory(address, bytes), _access: access })
    }

    /// Same, written by later work of this stream.
    ///
    /// # Errors
    /// As [`Stream::slice`].
    pub fn slice_mut<'a, T: Pod>(
        &'a self,
        slice: &'a mut impl DevicePtrMut<T>,
    ) -> Result<CudarcSliceMut<'a>> {
        let stream = self.cudarc_stream("stream.slice_mut", slice)?;
        let bytes = slice.num_bytes();
        let (address, access) = slice.device_ptr_mut(stream);
        Ok(CudarcSliceMut { memory: self.slice_memory(address, bytes), _access: access })
    }

    /// The cudarc stream to access `slice` with.
    fn cudarc_stream<T>(&self, call: &str, slice: &impl DeviceSlice<T>) -> Result<&CudaStream> {
        let Owner::Cudarc(stream) = self.owner() else {
            let why = "the stream is not a stream of cudarc, expected one from Stream::from_cudarc";
            return Err(DriverError::new(call, why));
        };
        let (owner, here) = (slice.stream().context().ordinal(), self.context().ordinal());
        if owner != here {
            let why = format!("the slice belongs to GPU {owner}, the stream to GPU {here}");
            return Err(DriverError::new(call, why));
        }
        Ok(stream)
    }

    fn slice_memory(&self, address: u64, bytes: usize) -> DeviceMemory {
        // SAFETY: `DevicePtr` returns the address of allocated bytes, as cudarc's copies assume. The result is neither moved out of
        // `CudarcSlice` nor cloned, so it cannot outlive the borrow. Work of this stream may: cudarc frees a slice after the event
        // that the access records.
        unsafe { DeviceMemory::from_raw(address, bytes, self.context().ordinal() as u32, None) }
    }
}

impl CudarcSliceMut<'_> {
    /// As [`DeviceMemory::view_mut`].
    ///
    /// # Errors
    /// As [`DeviceMemory::view_mut`].
    pub fn view_mut(
        &mut self,
        dtype: Dtype,
        offset: usize,
        shape: &[usize],
    ) -> tilewright::Result<ViewMut<'_>> {
        self.memory.view_mut(dtype, offset, shape)
    }

    /// As [`DeviceMemory::strided_mut`].
    ///
    /// # Errors
    /// As [`DeviceMemory::strided_mut`].
    pub fn strided_mut(
        &mut self,
        dtype: Dtype,
        offset: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> tilewright::Result<ViewMut<'_>> {
        self.memory.strided_mut(dtype, offset, shape, strides)
    }
}

impl Deref for CudarcSlice<'_> {
    type Target = DeviceMemory;

    fn deref(&self) -> &DeviceMemory {
        &self.memory
    }
}

impl Deref for CudarcSliceMut<'_> {
    type Target = DeviceMemory;

    fn deref(&self) -> &DeviceMemory {
        &self.memory
    }
}
