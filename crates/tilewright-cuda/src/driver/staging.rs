//! Staging memory: pinned slots for uploads, so that the caller's bytes may be reused at once and no call waits for the copy.
//!
//! Slots of two sizes are created on demand, up to a maximum of each. A slot is reused when the event after its copy is done. A
//! write waits, for the oldest slot, only if all slots are in flight.

use super::{
    Context, Handle, RelaxedCapture, Result, error::driver, event, handle::lock, retain::free_pinned,
};
use cudarc::driver::sys;
use std::{
    collections::VecDeque,
    ptr::null_mut,
    sync::{Condvar, Mutex, PoisonError},
};

#[derive(Debug, Clone, Copy)]
struct SlotClass {
    bytes: usize,
    /// Maximum number of slots.
    max: usize,
    /// Slots created together, because pinning memory may synchronize with the device.
    batch: usize,
}

const SMALL: SlotClass = SlotClass { bytes: 64 << 10, max: 64, batch: 16 };
/// Enough slots to write one while another is copied.
const LARGE: SlotClass = SlotClass { bytes: 4 << 20, max: 4, batch: 2 };

/// The slots of a context. They live until the process ends.
#[derive(Debug, Default)]
pub(super) struct Staging {
    small: SlotPool,
    large: SlotPool,
}

#[derive(Debug, Default)]
struct SlotPool {
    ring: Mutex<SlotRing>,
    returned: Condvar,
}

/// Free and in-flight slots of a class, the max recently used ones last.
#[derive(Debug, Default)]
struct SlotRing {
    slots: VecDeque<Slot>,
    created: usize,
    /// Threads that wait for a slot of another thread.
    waiting: usize,
}

/// Page-locked memory, and the event after its last copy.
#[derive(Debug)]
pub(super) struct Slot {
    memory: Handle<u8>,
    event: Handle<sys::CUevent_st>,
    large: bool,
}

impl Staging {
    /// Maximum bytes per slot.
    pub(super) const MAX_BYTES: usize = LARGE.bytes;
    /// Maximum bytes per small slot.
    pub(super) const SMALL_BYTES: usize = SMALL.bytes;

    /// Takes a slot of at least `bytes` bytes, at max [`MAX_BYTES`](Self::MAX_BYTES), with no copy in flight. The context is
    /// current.
    pub(super) fn take(&self, bytes: usize) -> Result<Slot> {
        let large = bytes > SMALL.bytes;
        let (pool, class) = if large { (&self.large, LARGE) } else { (&self.small, SMALL) };
        // the calls below must not be part of a capture
        let _relaxed = RelaxedCapture::enter()?;
        let mut ring = lock(&pool.ring);
        loop {
            if let Some(slot) = ring.take_free(1)? {
                return Ok(slot);
            }
            if ring.created < class.max {
                ring.grow(class, large)?;
                continue;
            }
            if let Some(slot) = ring.take_free(class.max)? {
                return Ok(slot);
            }
            if let Some(oldest) = ring.slots.front() {
                oldest.wait()?;
            } else {
                // other threads hold all slots
                ring.waiting += 1;
                ring = pool.returned.wait(ring).unwrap_or_else(PoisonError::into_inner);
                ring.waiting -= 1;
            }
        }
    }

    /// Returns a slot. Its event guards the copies in flight.
    pub(super) fn put_back(&self, slot: Slot) {
        let pool = if slot.large { &self.large } else { &self.small };
        let mut ring = lock(&pool.ring);
        ring.slots.push_back(slot);
        // a notification is a system call even if no thread waits
        if ring.waiting > 0 {
            pool.returned.notify_one();
        }
    }
}

impl SlotRing {
    /// Creates more slots. They are free, because an event that was never recorded is done.
    fn grow(&mut self, class: SlotClass, large: bool) -> Result<()> {
        let memory = allocate(class.bytes * class.batch)?;
        for at in 0..class.batch {
            let memory = Handle(memory.0.wrapping_add(at * class.bytes));
            self.slots.push_front(Slot { memory, event: event::create(false)?, large });
            self.created += 1;
        }
        Ok(())
    }

    /// Removes a slot with no copy in flight, among the `first` oldest.
    fn take_free(&mut self, first: usize) -> Result<Option<Slot>> {
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

    /// Records the slot's event after the work submitted to `stream`.
    pub(super) fn record_on(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: both exist.
        unsafe { driver!(cuEventRecord(self.event.0, stream)) }
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: the event exists.
        unsafe { driver!(cuEventSynchronize(self.event.0)) }
    }
}

/// Dedicated pinned memory of a captured copy.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    context: Context,
    memory: Handle<u8>,
}

impl PinnedMemory {
    /// Allocates the memory. The context is current.
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self> {
        let _relaxed = RelaxedCapture::enter()?;
        Ok(Self { context: context.clone(), memory: allocate(bytes)? })
    }

    pub(super) fn memory(&self) -> *mut u8 {
        self.memory.0
    }
}

impl Drop for PinnedMemory {
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
