//! Typed device buffers, for tests and benches.

use super::{Memory, Result, Stream};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use std::marker::PhantomData;

/// Elements in device memory, freed when dropped.
#[derive(Debug)]
pub struct Buffer<T> {
    memory: Memory,
    len: usize,
    of: PhantomData<T>,
}

impl Stream {
    /// Allocates `len` elements with each byte set to `fill`.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn filled<T: Pod>(&self, len: usize, fill: u8) -> Result<Buffer<T>> {
        let memory = self.allocate(len.saturating_mul(size_of::<T>()))?;
        self.fill(memory.address(), fill, memory.bytes())?;
        Ok(Buffer { memory, len, of: PhantomData })
    }

    /// Copies `values` to the device.
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<T>> {
        let memory = self.allocate(size_of_val(values))?;
        self.write(memory.address(), cast_slice(values))?;
        Ok(Buffer { memory, len: values.len(), of: PhantomData })
    }
}

impl<T: Pod> Buffer<T> {
    /// Copies the elements to the host after all work of the stream.
    ///
    /// # Errors
    /// Errors of the work.
    pub fn download(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.len];
        self.memory.stream().read(self.memory.address(), cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

impl<T> Buffer<T> {
    /// Its address.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
