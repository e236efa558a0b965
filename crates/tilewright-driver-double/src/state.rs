//! The state of the stand-in: its log, allocations, streams and captures.

use crate::{INVALID_HANDLE, SUCCESS};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A range of memory that the driver reports.
#[derive(Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) bytes: usize,
    /// Whether it is pinned memory of the host.
    pub(crate) is_pinned: bool,
}

pub(crate) struct State {
    log: String,
    handles: u64,
    allocations: BTreeMap<u64, Allocation>,
    pub(crate) streams: BTreeSet<u64>,
    pub(crate) captured: BTreeSet<u64>,
}

/// Locks the state.
pub(crate) fn state() -> MutexGuard<'static, State> {
    static STATE: Mutex<State> = Mutex::new(State {
        log: String::new(),
        handles: 0x10_000,
        allocations: BTreeMap::new(),
        streams: BTreeSet::new(),
        captured: BTreeSet::new(),
    });
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Appends a call.
    pub(crate) fn log(&mut self, name: &str, args: &[u64]) {
        self.log.push_str(name);
        for arg in args {
            let _ = write!(self.log, " {arg}"); // a string accepts all text
        }
        self.log.push('\n');
    }

    pub(crate) fn text(&self) -> &str {
        &self.log
    }

    pub(crate) fn clear_log(&mut self) {
        self.log.clear();
    }

    /// A new handle.
    pub(crate) fn handle(&mut self) -> u64 {
        self.handles += 0x100;
        self.handles
    }

    /// An error for a stream that does not exist; 0 is the default stream.
    pub(crate) fn check_stream(&self, stream: u64) -> i32 {
        if stream == 0 || self.streams.contains(&stream) { SUCCESS } else { INVALID_HANDLE }
    }

    pub(crate) fn insert(&mut self, allocation: Allocation) {
        self.allocations.insert(allocation.start, allocation);
    }

    pub(crate) fn remove(&mut self, start: u64) -> Option<Allocation> {
        self.allocations.remove(&start)
    }

    /// The allocation that has the byte at `address`.
    pub(crate) fn find(&self, address: u64) -> Option<Allocation> {
        let (_, found) = self.allocations.range(..=address).next_back()?;
        (address < found.start + found.bytes as u64).then_some(*found)
    }

    /// Whether `bytes` bytes at `address` are allocated. Ranges that a split has separated are adjacent.
    pub(crate) fn contains(&self, address: u64, bytes: usize) -> bool {
        let (mut at, end) = (address, address.saturating_add(bytes as u64));
        while at < end {
            let Some(found) = self.find(at) else { return false };
            at = found.start + found.bytes as u64;
        }
        true
    }

    /// Splits the allocation around `address`.
    pub(crate) fn split(&mut self, address: u64) {
        if let Some(found) = self.find(address).filter(|found| found.start < address) {
            let bytes = (address - found.start) as usize;
            self.insert(Allocation { bytes, ..found });
            self.insert(Allocation { start: address, bytes: found.bytes - bytes, ..found });
        }
    }
}
