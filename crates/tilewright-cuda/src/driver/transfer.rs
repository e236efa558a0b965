//! Bytes to the device, from it, and within it, in the order of a stream.

use super::{
    Result, Stream,
    error::driver,
    keep::Kept,
    staging::{Pinned, Slot, Staging},
};
use std::{ptr::copy_nonoverlapping, slice::from_raw_parts_mut};

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
        self.pieces(to, bytes.len(), &mut |at, piece| piece.copy_from_slice(&bytes[at..at + piece.len()]))
    }

    /// The same of so many words that `make` writes where they are sent from, so that nobody copies them before. It is called once
    /// if there are any, and finds any values.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_words(&self, to: u64, words: usize, make: &mut dyn FnMut(&mut [u32])) -> Result<()> {
        if words * size_of::<u32>() > Staging::MOST {
            let mut made = vec![0; words];
            make(&mut made);
            return self.write(to, bytemuck::cast_slice(&made));
        }
        self.pieces(to, words * size_of::<u32>(), &mut |_, piece| make(bytemuck::cast_slice_mut(piece)))
    }

    /// Sends so many bytes, which `make` is asked for in pieces of pinned memory: the first byte of each, and its place.
    fn pieces(&self, to: u64, bytes: usize, make: &mut dyn FnMut(usize, &mut [u8])) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.context().enter()?;
        if let Some(graph) = self.captured_graph()? {
            self.context().sweep();
            let pinned = Pinned::new(self.context(), bytes)?;
            let memory = pinned.memory();
            // the graph, which repeats this copy, keeps the memory
            self.context().keep(graph, Kept::Bytes(pinned))?;
            return self.send(memory, to, bytes, &mut |piece| make(0, piece));
        }
        let staging = self.context().staging();
        for at in (0..bytes).step_by(Staging::MOST) {
            let piece = (bytes - at).min(Staging::MOST);
            let slot = staging.take(piece)?;
            let sent = self.send(slot.memory(), to + at as u64, piece, &mut |piece| make(at, piece));
            let outcome = sent.and_then(|()| slot.used_on(self.raw()));
            staging.give(slot);
            outcome?;
        }
        Ok(())
    }

    /// Fills pinned memory, which nobody else has and nothing is copied from until this copy is done, and sends it.
    fn send(&self, from: *mut u8, to: u64, bytes: usize, make: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        // SAFETY: the memory has room for so many bytes, which the driver gave with values in them; it is ours alone, and lives
        // until the copy is done.
        unsafe {
            make(from_raw_parts_mut(from, bytes));
            driver!(cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw()))
        }
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
