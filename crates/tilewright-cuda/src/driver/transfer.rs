//! Bytes to the device, from it, and within it, in the order of a stream.

use super::{
    Result, Stream,
    error::driver,
    keep::Kept,
    staging::{Pinned, Slot, Staging},
};
use cudarc::driver::sys;
use std::ptr::copy_nonoverlapping;

impl Stream {
    /// Copies bytes to the device, behind the work that was asked for up to now. They may be reused on return. Nothing waits, but
    /// for room in the pinned memory that they go through, where more than 4 MiB, or 64 writes, are on their way.
    ///
    /// While the stream is being captured, the graph gets a copy of the bytes as they are now, and writes these whenever it is
    /// launched.
    ///
    /// # Errors
    /// When the driver refuses, for instance because the context is lost.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = self.context().enter()?;
        if let Some(graph) = self.captured_graph()? {
            return self.write_captured(graph, to, bytes);
        }
        let staging = self.context().staging();
        for (at, piece) in bytes.chunks(Staging::MOST).enumerate() {
            let slot = staging.take(piece.len())?;
            let outcome = self.send(&slot, to + (at * Staging::MOST) as u64, piece);
            staging.give(slot);
            outcome?;
        }
        Ok(())
    }

    fn send(&self, slot: &Slot, to: u64, piece: &[u8]) -> Result<()> {
        // SAFETY: the slot has room for the piece, and nothing is copied from it; it is used again when the event that is
        // recorded behind this copy is done.
        unsafe {
            copy_nonoverlapping(piece.as_ptr(), slot.memory(), piece.len());
            driver!(cuMemcpyHtoDAsync_v2(to, slot.memory().cast(), piece.len(), self.raw()))?;
        }
        slot.used_on(self.raw())
    }

    fn write_captured(&self, graph: sys::CUgraph, to: u64, bytes: &[u8]) -> Result<()> {
        self.context().sweep();
        let pinned = Pinned::new(self.context(), bytes.len())?;
        let memory = pinned.memory();
        // SAFETY: it has room for so many.
        unsafe { copy_nonoverlapping(bytes.as_ptr(), memory, bytes.len()) };
        self.context().keep(graph, Kept::Bytes(pinned))?;
        // SAFETY: the graph, which repeats this copy, keeps the memory.
        unsafe { driver!(cuMemcpyHtoDAsync_v2(to, memory.cast(), bytes.len(), self.raw())) }
    }

    /// Copies bytes from the device, behind the work that was asked for up to now, and waits for it.
    ///
    /// # Errors
    /// Those of the work; while the stream is being captured.
    pub fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.not_captured("stream.read")?;
        if bytes.is_empty() {
            return self.synchronize();
        }
        let _current = self.context().enter()?;
        if bytes.len() > Staging::FEW {
            // SAFETY: the driver writes into the bytes before it says that the stream is done.
            unsafe {
                driver!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw()))
            }?;
            return self.synchronize();
        }
        let staging = self.context().staging();
        let slot = staging.take(bytes.len())?;
        let outcome = self.receive(&slot, from, bytes);
        staging.give(slot);
        outcome
    }

    fn receive(&self, slot: &Slot, from: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the slot has room for them, and nobody else has it.
        unsafe { driver!(cuMemcpyDtoHAsync_v2(slot.memory().cast(), from, bytes.len(), self.raw())) }?;
        slot.used_on(self.raw())?;
        self.synchronize()?;
        // SAFETY: as many as were copied there.
        unsafe { copy_nonoverlapping(slot.memory(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Sets bytes of the device, behind the work that was asked for up to now.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context().enter()?;
        // SAFETY: whose memory it is, is the caller's to know, as for launches.
        unsafe { driver!(cuMemsetD8Async(to, value, bytes, self.raw())) }
    }

    /// Copies bytes within the device, behind the work that was asked for up to now. The two ranges have nothing in common.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context().enter()?;
        // SAFETY: whose memory it is, is the caller's to know, as for launches.
        unsafe { driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw())) }
    }
}
