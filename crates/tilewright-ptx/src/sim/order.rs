//! Fences, and words through which threads signal each other: release on one side, acquire on the other.

use super::{
    clock::Clock,
    exec::Exec,
    warp::Released,
    world::{Agent, Flag, Spot},
};
use crate::isa::sync::Fence;
use std::rc::Rc;

/// How many fences of a thread are remembered.
const FENCES: usize = 256;

/// Remembers a fence.
fn push(fences: &mut Vec<(u32, bool)>, fence: (u32, bool)) {
    if fences.len() == FENCES {
        fences.drain(..FENCES / 2);
    }
    fences.push(fence);
}

impl Exec<'_, '_> {
    pub(super) fn fence(&mut self, fence: Fence) {
        match fence {
            Fence::AcqRel(scope) | Fence::SeqCst(scope) => self.fence_memory(super::access::level(scope)),
            Fence::ProxyAsyncShared => self.fence_proxy(false),
            Fence::ProxyAsync => self.fence_proxy(true),
            // a later step counts as one that sees what was initialised
            Fence::MbarrierInit => self.warp.known.advance(self.mask),
        }
    }

    /// What relaxed loads saw becomes known, and what was done may be told by relaxed stores.
    fn fence_memory(&mut self, level: u8) {
        let mask = self.mask;
        let mut seen = std::mem::take(&mut self.warp.acquired);
        seen.retain(|(lane, clock)| {
            let here = mask >> lane & 1 != 0;
            if here {
                self.warp.known.acquire(1 << lane, clock);
            }
            !here
        });
        self.warp.acquired = seen;
        for lane in self.active() {
            let mut clock = Clock::new(u32::MAX);
            self.release(1 << lane, &mut clock);
            self.warp.released[lane] = Some(Rc::new(Released { clock, level }));
        }
    }

    fn fence_proxy(&mut self, all: bool) {
        let copies = self.cluster.agent(Agent::Copies(self.rank, self.warp.index));
        for lane in self.active() {
            let (cluster, first) = (self.cluster.id, self.first());
            let count = self.warp.known.counts[lane];
            push(self.world.fences.entry((cluster, first + lane as u32)).or_default(), (count, all));
            // and of its cp.async all that it waited for
            if let Some(fences) = self.world.fences.get_mut(&(cluster, copies + lane as u32)) {
                push(fences, (self.warp.copies[lane].waited, all));
            }
        }
        self.warp.known.advance(self.mask);
    }

    /// An ordered load of a word, or the load of an atomic: takes what its last release made known.
    pub(super) fn observe(&mut self, spot: Spot, lane: usize, level: u8, acquires: bool) {
        let me = (self.cluster.id, self.rank);
        let flag = match spot {
            Spot::Global(_) => self.world.flags.get(&spot.word()),
            Spot::Shared(rank, _) => self.cluster.ctas[rank].flags.get(&spot.word()),
        };
        let Some(flag) = flag else { return };
        let apart = match flag.cta {
            cta if cta == me => 1,
            (cluster, _) if cluster == me.0 => 2,
            _ => 3,
        };
        if flag.level.min(level) < apart {
            return;
        }
        if acquires {
            self.warp.known.acquire(1 << lane, &flag.clock);
        } else {
            // one clock a lane, however often it looks
            match self.warp.acquired.iter_mut().find(|(other, _)| *other == lane) {
                Some((_, clock)) => clock.join(&flag.clock),
                None => self.warp.acquired.push((lane, flag.clock.clone())),
            }
        }
    }

    /// An ordered store to a word, or the store of an atomic: tells what its thread released.
    pub(super) fn announce(&mut self, spot: Spot, lane: usize, (level, releases): (u8, bool), atomic: bool) {
        let told = if releases {
            let mut clock = Clock::new(u32::MAX);
            self.release(1 << lane, &mut clock);
            Some((clock, level))
        } else {
            self.warp.released[lane].as_ref().map(|fence| (fence.clock.clone(), fence.level.min(level)))
        };
        let cta = (self.cluster.id, self.rank);
        let flags = match spot {
            Spot::Global(_) => &mut self.world.flags,
            Spot::Shared(rank, _) => &mut self.cluster.ctas[rank].flags,
        };
        let before = if atomic { flags.remove(&spot.word()) } else { None };
        let flag = match (told, before) {
            (Some((mut clock, level)), Some(before)) => {
                clock.join(&before.clock);
                Flag { clock, level: level.min(before.level), cta }
            }
            (Some((clock, level)), None) => Flag { clock, level, cta },
            (None, Some(before)) => before,
            (None, None) => {
                flags.remove(&spot.word());
                return;
            }
        };
        flags.insert(spot.word(), flag);
    }
}
