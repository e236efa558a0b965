//! Pinned memory that uploads go through, so that their bytes may be reused at once and nothing waits for the copy.
//!
//! Slots of two sizes are made as they are needed, up to a number of each; a slot is used again when the event behind its copy is
//! done. Only where all are on their way does a write wait, for the oldest.

use super::{
    Context, Result,
    current::Apart,
    error::driver,
    event,
    handle::{Handle, lock},
    keep::free_pinned,
};
use cudarc::driver::sys;
use std::{
    collections::VecDeque,
    ptr::null_mut,
    sync::{Condvar, Mutex, PoisonError},
};

/// Slots of a size.
#[derive(Debug, Clone, Copy)]
struct Size {
    bytes: usize,
    /// How many there are at most.
    most: usize,
    /// How many are made at once: pinning may have to wait for the device.
    at_once: usize,
}

const SMALL: Size = Size { bytes: 64 << 10, most: 64, at_once: 16 };
/// Enough for one copy to be on its way while the next is written.
const LARGE: Size = Size { bytes: 4 << 20, most: 4, at_once: 2 };

/// The slots of a context, which live as long as it: to the end of the process.
#[derive(Debug, Default)]
pub(super) struct Staging {
    small: Pool,
    large: Pool,
}

#[derive(Debug, Default)]
struct Pool {
    ring: Mutex<Ring>,
    given: Condvar,
}

/// Slots of a size that are free or on their way, those that were used last at the end.
#[derive(Debug, Default)]
struct Ring {
    slots: VecDeque<Slot>,
    made: usize,
}

/// Pinned memory, and the event behind its last copy.
#[derive(Debug)]
pub(super) struct Slot {
    memory: Handle<u8>,
    event: Handle<sys::CUevent_st>,
    large: bool,
}

impl Staging {
    /// The most bytes that one slot takes.
    pub(super) const MOST: usize = LARGE.bytes;
    /// Bytes that fit into a small one.
    pub(super) const FEW: usize = SMALL.bytes;

    /// A slot for so many bytes, at most [`MOST`](Self::MOST), that nothing is copied from any more. The context is current.
    pub(super) fn take(&self, bytes: usize) -> Result<Slot> {
        let large = bytes > SMALL.bytes;
        let (pool, size) = if large { (&self.large, LARGE) } else { (&self.small, SMALL) };
        // what is asked here is no part of any capture
        let _apart = Apart::enter()?;
        let mut ring = lock(&pool.ring);
        loop {
            if let Some(slot) = ring.done(1)? {
                return Ok(slot);
            }
            if ring.made < size.most {
                ring.make(size, large)?;
                continue;
            }
            if let Some(slot) = ring.done(size.most)? {
                return Ok(slot);
            }
            if let Some(oldest) = ring.slots.front() {
                oldest.wait()?;
            } else {
                // other threads are writing into all of them
                ring = pool.given.wait(ring).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Gives a slot back, behind whatever was asked of it.
    pub(super) fn give(&self, slot: Slot) {
        let pool = if slot.large { &self.large } else { &self.small };
        lock(&pool.ring).slots.push_back(slot);
        pool.given.notify_one();
    }
}

impl Ring {
    /// Makes some more, which are free: an event that was never recorded is done.
    fn make(&mut self, size: Size, large: bool) -> Result<()> {
        let memory = allocate(size.bytes * size.at_once)?;
        for at in 0..size.at_once {
            let memory = Handle(memory.0.wrapping_add(at * size.bytes));
            self.slots.push_front(Slot { memory, event: event::create(false)?, large });
            self.made += 1;
        }
        Ok(())
    }

    /// A slot that nothing is copied from any more, among the `first` oldest.
    fn done(&mut self, first: usize) -> Result<Option<Slot>> {
        for at in 0..self.slots.len().min(first) {
            if event::is_done(self.slots[at].event)? {
                return Ok(self.slots.remove(at));
            }
        }
        Ok(None)
    }
}

impl Slot {
    pub(super) fn memory(&self) -> *mut u8 {
        self.memory.0
    }

    /// Remembers in its event what was asked of `stream` up to now.
    pub(super) fn used_on(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: both exist.
        unsafe { driver!(cuEventRecord(self.event.0, stream)) }
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: the event exists.
        unsafe { driver!(cuEventSynchronize(self.event.0)) }
    }
}

/// Pinned memory of its own, for a copy that a graph repeats.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Context,
    memory: Handle<u8>,
}

impl Pinned {
    /// The context is current.
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self> {
        let _apart = Apart::enter()?;
        Ok(Self { context: context.clone(), memory: allocate(bytes)? })
    }

    pub(super) fn memory(&self) -> *mut u8 {
        self.memory.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        free_pinned(&self.context, self.memory);
    }
}

fn allocate(bytes: usize) -> Result<Handle<u8>> {
    let mut memory = null_mut();
    // SAFETY: a context is current.
    unsafe { driver!(cuMemHostAlloc(&mut memory, bytes, 0)) }
        .map_err(|error| error.within(format!("staging: {bytes} bytes of pinned memory")))?;
    Ok(Handle(memory.cast()))
}
