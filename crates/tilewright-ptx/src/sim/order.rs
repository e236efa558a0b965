//! Fences and release/acquire synchronization through memory words.

use super::{
    Agent, Clock, Exec, FenceRelease, Flag, MemoryLocation,
    access::{Ordering, scope_level},
};
use crate::isa::sync::Fence;
use std::rc::Rc;

/// The maximum number of recorded fences per thread.
const FENCES: usize = 256;

/// Records a fence.
fn push(fences: &mut Vec<(u32, bool)>, fence: (u32, bool)) {
    if fences.len() == FENCES {
        fences.drain(..FENCES / 2);
    }
    fences.push(fence);
}

impl Exec<'_, '_> {
    pub(super) fn fence(&mut self, fence: Fence) {
        match fence {
            Fence::AcqRel(scope) | Fence::SeqCst(scope) => {
                self.fence_memory(scope_level(scope));
            }
            Fence::ProxyAsyncShared => self.fence_proxy(false),
            Fence::ProxyAsync => self.fence_proxy(true),
            // later steps are ordered after the initialization
            Fence::MbarrierInit => self.warp.clocks.advance(self.mask),
        }
    }

    /// Acquires the clocks of prior relaxed loads, and releases prior accesses to later relaxed stores.
    fn fence_memory(&mut self, level: u8) {
        let mask = self.mask;
        let mut pending = std::mem::take(&mut self.warp.pending_acquires);
        pending.retain(|(lane, clock)| {
            let active = mask >> lane & 1 != 0;
            if active {
                self.warp.clocks.acquire(1 << lane, clock);
            }
            !active
        });
        self.warp.pending_acquires = pending;
        for lane in self.active() {
            let mut clock = Clock::new(u32::MAX);
            self.release(1 << lane, &mut clock);
            self.warp.fence_releases[lane] = Some(Rc::new(FenceRelease { clock, level }));
        }
    }

    fn fence_proxy(&mut self, all: bool) {
        let copies = self.cluster.agent(Agent::Copies(self.rank, self.warp.index));
        for lane in self.active() {
            let (cluster, first) = (self.cluster.id, self.first());
            let count = self.warp.clocks.counts[lane];
            push(self.world.fences.entry((cluster, first + lane as u32)).or_default(), (count, all));
            // also covers the cp.async batches that the lane waited for
            if let Some(fences) = self.world.fences.get_mut(&(cluster, copies + lane as u32)) {
                push(fences, (self.warp.copies[lane].waited, all));
            }
        }
        self.warp.clocks.advance(self.mask);
    }

    /// An ordered load of a word, or the load of an atomic: acquires the clock of its last release.
    pub(super) fn acquire_word(&mut self, location: MemoryLocation, lane: usize, ordering: Ordering) {
        let me = (self.cluster.id, self.rank);
        let flag = match location {
            MemoryLocation::Global(_) => self.world.flags.get(&location.word()),
            MemoryLocation::Shared(rank, _) => self.cluster.ctas[rank].flags.get(&location.word()),
        };
        let Some(flag) = flag else { return };
        let apart = match flag.cta {
            cta if cta == me => 1,
            (cluster, _) if cluster == me.0 => 2,
            _ => 3,
        };
        if flag.level.min(ordering.level) < apart {
            return;
        }
        if ordering.acquires {
            self.warp.clocks.acquire(1 << lane, &flag.clock);
        } else {
            // one clock per lane, for any number of polls
            match self.warp.pending_acquires.iter_mut().find(|(other, _)| *other == lane) {
                Some((_, clock)) => clock.join(&flag.clock),
                None => self.warp.pending_acquires.push((lane, flag.clock.clone())),
            }
        }
    }

    /// An ordered store to a word, or the store of an atomic: publishes the clock that its thread released.
    pub(super) fn release_word(
        &mut self,
        location: MemoryLocation,
        lane: usize,
        Ordering { level, releases, .. }: Ordering,
        atomic: bool,
    ) {
        let released = if releases {
            let mut clock = Clock::new(u32::MAX);
            self.release(1 << lane, &mut clock);
            Some((clock, level))
        } else {
            self.warp.fence_releases[lane].as_ref().map(|fence| (fence.clock.clone(), fence.level.min(level)))
        };
        let cta = (self.cluster.id, self.rank);
        let flags = match location {
            MemoryLocation::Global(_) => &mut self.world.flags,
            MemoryLocation::Shared(rank, _) => &mut self.cluster.ctas[rank].flags,
        };
        let before = if atomic { flags.remove(&location.word()) } else { None };
        let flag = match (released, before) {
            (Some((mut clock, level)), Some(before)) => {
                clock.join(&before.clock);
                Flag { clock, level: level.min(before.level), cta }
            }
            (Some((clock, level)), None) => Flag { clock, level, cta },
            (None, Some(before)) => before,
            (None, None) => {
                flags.remove(&location.word());
                return;
            }
        };
        flags.insert(location.word(), flag);
    }
}
