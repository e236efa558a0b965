//! Copies to, from and within the device, in stream order.

use super::{PinnedMemory, Result, Retained, Slot, Staging, Stream, error::driver};
use std::{ptr::copy_nonoverlapping, slice::from_raw_parts_mut};

impl Stream {
    /// Copies bytes to the device in stream order. They may be reused on return. The call blocks only if the pinned staging
    /// memory is full: more than 4 MiB or 64 writes in flight.
    ///
    /// During a capture, the graph keeps a copy of the bytes and writes it at each launch.
    ///
    /// # Errors
    /// If the driver rejects the copy, for example because the context is lost.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.write_pieces(to, bytes.len(), &mut |at, piece| {
            piece.copy_from_slice(&bytes[at..at + piece.len()]);
        })
    }

    /// Same for `words` words that `make` writes directly into the staging memory, whose content is unspecified. `make` is called
    /// once, or not at all if `words` is 0.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_words(&self, to: u64, words: usize, make: &mut dyn FnMut(&mut [u32])) -> Result<()> {
        if words * size_of::<u32>() > Staging::MAX_BYTES {
            let mut buffer = vec![0; words];
            make(&mut buffer);
            return self.write(to, bytemuck::cast_slice(&buffer));
        }
        self.write_pieces(to, words * size_of::<u32>(), &mut |_, piece| make(bytemuck::cast_slice_mut(piece)))
    }

    /// Sends `bytes` bytes in pieces of pinned memory. `make` gets the offset of each piece and its memory.
    fn write_pieces(&self, to: u64, bytes: usize, make: &mut dyn FnMut(usize, &mut [u8])) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let current = self.context().enter()?;
        if let Some(graph) = self.captured_graph(&current)? {
            self.context().free_deferred();
            let pinned = PinnedMemory::new(self.context(), bytes)?;
            let memory = pinned.memory();
            // the graph repeats this copy, so it keeps the memory
            self.context().retain(graph, Retained::Bytes(pinned))?;
            return self.send(memory, to, bytes, &mut |piece| make(0, piece));
        }
        let staging = self.context().staging();
        for at in (0..bytes).step_by(Staging::MAX_BYTES) {
            let piece = (bytes - at).min(Staging::MAX_BYTES);
            let slot = staging.take(piece)?;
            let sent = self.send(slot.memory(), to + at as u64, piece, &mut |piece| make(at, piece));
            let outcome = sent.and_then(|()| slot.record_on(self.raw()));
            staging.put_back(slot);
            outcome?;
        }
        Ok(())
    }

    /// Fills pinned memory and sends it. The caller has exclusive access until the copy is done.
    fn send(&self, from: *mut u8, to: u64, bytes: usize, make: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        // SAFETY: the memory has `bytes` initialized bytes (the driver returned them so), no one else accesses it, and it lives
        // until the copy is done.
        unsafe {
            make(from_raw_parts_mut(from, bytes));
            driver!(cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw()))
        }
    }

    /// Copies bytes from the device in stream order and waits for the copy.
    ///
    /// # Errors
    /// Errors of the work; if the stream is being captured.
    pub fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.ensure_not_captured("stream.read")?;
        if bytes.is_empty() {
            return self.synchronize();
        }
        let _current = self.context().enter()?;
        if bytes.len() > Staging::SMALL_BYTES {
            // SAFETY: the driver writes to `bytes` only until the stream is synchronized, below.
            unsafe {
                driver!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw()))
            }?;
            return self.synchronize();
        }
        let staging = self.context().staging();
        let slot = staging.take(bytes.len())?;
        let outcome = self.receive(&slot, from, bytes);
        staging.put_back(slot);
        outcome
    }

    fn receive(&self, slot: &Slot, from: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the slot has at least `bytes.len()` bytes and is taken, so no other thread accesses it.
        unsafe { driver!(cuMemcpyDtoHAsync_v2(slot.memory().cast(), from, bytes.len(), self.raw())) }?;
        slot.record_on(self.raw())?;
        self.synchronize()?;
        // SAFETY: the slot holds `bytes.len()` bytes that the finished copy wrote; the two ranges cannot overlap.
        unsafe { copy_nonoverlapping(slot.memory(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Sets bytes of the device in stream order.
    ///
    /// # Errors
    /// If the driver rejects the fill.
    pub fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context().enter()?;
        // SAFETY: the caller guarantees that the range is device memory that it may write, as for launches.
        unsafe { driver!(cuMemsetD8Async(to, value, bytes, self.raw())) }
    }

    /// Copies bytes within the device in stream order. The two ranges must not overlap.
    ///
    /// # Errors
    /// If the driver rejects the copy.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context().enter()?;
        // SAFETY: the caller guarantees that both ranges are device memory that it may access, as for launches.
        unsafe { driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw())) }
    }
}
