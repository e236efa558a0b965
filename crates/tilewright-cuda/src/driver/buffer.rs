//! Memory on the device.

use super::{Device, Result, error::called};
use cudarc::driver::result;
use std::marker::PhantomData;

/// Elements on the device, given back when dropped.
#[derive(Debug)]
pub struct Buffer<'d, T> {
    address: u64,
    len: usize,
    device: PhantomData<(&'d Device, T)>,
}

impl Device {
    /// Room for `len` elements, whose bytes are all `fill`.
    ///
    /// # Errors
    /// When there is too little memory.
    pub fn filled<T: Copy>(&self, len: usize, fill: u8) -> Result<Buffer<'_, T>> {
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: a new allocation, filled as far as it goes.
        unsafe {
            let address = called("cuMemAlloc", result::malloc_sync(bytes))?;
            called("cuMemsetD8", result::memset_d8_sync(address, fill, bytes))?;
            Ok(Buffer { address, len, device: PhantomData })
        }
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// When there is too little memory.
    pub fn upload<T: Copy>(&self, values: &[T]) -> Result<Buffer<'_, T>> {
        let buffer = self.filled(values.len(), 0)?;
        if !values.is_empty() {
            // SAFETY: the buffer has room for all of them.
            called("cuMemcpyHtoD", unsafe { result::memcpy_htod_sync(buffer.address, values) })?;
        }
        Ok(buffer)
    }
}

impl<T: Copy + Default> Buffer<'_, T> {
    /// Its elements, when all work is done.
    ///
    /// # Errors
    /// Those of the work.
    pub fn download(&self) -> Result<Vec<T>> {
        let mut values = vec![T::default(); self.len];
        if !values.is_empty() {
            // SAFETY: as many elements as the buffer has.
            called("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(&mut values, self.address) })?;
        }
        Ok(values)
    }
}

impl<T> Buffer<'_, T> {
    /// Its address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> Drop for Buffer<'_, T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `filled`, and nobody else has it. An error here has nobody to tell.
        let _ = unsafe { result::free_sync(self.address) };
    }
}
