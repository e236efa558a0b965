//! The state of a launch: memory, clusters and CTAs.

use super::{
    Actor, Arrays, AsyncCopy, Clock, ClusterBarrier, Conflict, FaultCause, FaultKind, GARBAGE,
    GlobalLocation, Mark, Mbarrier, Memory, NamedBarrier, Program, Report, Rng, SHARED_BASE, Shadow, Warp,
    Warpgroup, fault::line, memory,
};
use rustc_hash::FxHashMap;
use std::{collections::BTreeMap, rc::Rc};

/// The state shared by the grid.
#[derive(Debug)]
pub(super) struct World<'m> {
    pub(super) program: Program<'m>,
    pub(super) memory: &'m mut Memory,
    /// One shadow per allocation.
    pub(super) shadows: Vec<Shadow>,
    /// The shadows of earlier launches, which may still run until a thread waits for the last of them.
    pub(super) in_flight: Vec<Vec<Shadow>>,
    pub(super) flags: FxHashMap<u64, Flag>,
    /// Per thread, the counts of its proxy fences, and whether they cover all memory. Per `cp.async` agent, the batches that
    /// these fences cover.
    pub(super) fences: FxHashMap<(u32, u32), Vec<(u32, bool)>>,
    pub(super) rng: Rng,
    pub(super) report: Report,
    /// Counts state changes that another thread may wait for.
    pub(super) progress: u64,
    pub(super) grid: [u32; 3],
}

/// The release state of a memory word.
#[derive(Debug)]
pub(super) struct Flag {
    pub(super) clock: Clock,
    pub(super) level: u8,
    /// The releasing CTA: cluster and rank.
    pub(super) cta: (u32, usize),
}

/// An asynchronous agent: a source of accesses with its own vector clock entries, one or 32, after the cluster's threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Agent {
    /// Copies that an mbarrier counts, by rank and offset.
    Mbarrier(usize, u32),
    /// `cp.async` of a warp's lanes, by rank and warp.
    Copies(usize, u32),
    /// Reads of `wgmma`, by rank and warpgroup.
    Warpgroup(usize, u32),
}

/// A cluster of CTAs.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) id: u32,
    pub(super) ctas: Vec<Cta>,
    agents: FxHashMap<Agent, u32>,
    next_agent: u32,
    pub(super) barrier: ClusterBarrier,
}

#[derive(Debug)]
pub(super) struct Cta {
    pub(super) id: [u32; 3],
    pub(super) shared: SharedMemory,
    pub(super) flags: FxHashMap<u64, Flag>,
    pub(super) barriers: Vec<NamedBarrier>,
    /// Valid mbarriers by offset.
    pub(super) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(super) warps: Vec<Warp>,
    pub(super) in_flight: Vec<AsyncCopy>,
    pub(super) warpgroups: Vec<Warpgroup>,
}

/// Bytes from a location on.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryRange {
    pub(super) location: MemoryLocation,
    pub(super) bytes: usize,
}

/// Shared memory of a CTA.
#[derive(Debug)]
pub(super) struct SharedMemory {
    pub(super) bytes: Vec<u8>,
    written: Vec<u64>,
    /// One bit per 8 bytes: whether they are an mbarrier.
    barriers: Vec<u64>,
    pub(super) arrays: Rc<Arrays>,
    pub(super) shadow: Shadow,
}

/// A resolved memory location. Its tag has no padding, which would be copied in two overlapping parts per access.
#[derive(Debug, Clone, Copy)]
#[repr(usize)]
pub(super) enum MemoryLocation {
    Global(GlobalLocation),
    /// Rank and offset.
    Shared(usize, usize),
}

impl MemoryLocation {
    /// The name in messages.
    fn name(self, arrays: &Arrays) -> String {
        match self {
            Self::Global(location) => {
                format!(
                    "global memory at {:#x}",
                    ((location.allocation as u64 + 1) << 32) + location.offset as u64
                )
            }
            Self::Shared(_, offset) => format!("shared memory at {}", arrays.name(offset)),
        }
    }

    /// The key of its word in the flags of its memory.
    pub(super) fn word(self) -> u64 {
        match self {
            Self::Global(location) => ((location.allocation as u64) << 32) + (location.offset as u64 & !3),
            Self::Shared(_, offset) => offset as u64 & !3,
        }
    }

    pub(super) fn plus(self, bytes: usize) -> Self {
        match self {
            Self::Global(location) => {
                Self::Global(GlobalLocation { offset: location.offset + bytes, ..location })
            }
            Self::Shared(rank, offset) => Self::Shared(rank, offset + bytes),
        }
    }
}

impl SharedMemory {
    fn new(program: &Program<'_>) -> Self {
        let bytes = program.shared_bytes;
        let written = vec![0; bytes.div_ceil(64)];
        let barriers = vec![0; bytes.div_ceil(512)];
        let (bytes, shadow) = (vec![GARBAGE; bytes], Shadow::new(bytes));
        Self { bytes, written, barriers, arrays: Rc::clone(&program.arrays), shadow }
    }

    pub(super) fn read(&self, offset: usize, bytes: usize) -> Result<&[u8], FaultCause> {
        if let Some(at) = memory::first_unwritten(&self.written, offset, bytes) {
            let message = format!("shared memory at {} was never written", self.arrays.name(at));
            return Err((FaultKind::Uninitialized, message));
        }
        Ok(&self.bytes[offset..offset + bytes])
    }

    /// Writes bytes. Returns whether that changed them.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) -> bool {
        memory::write(&mut self.bytes, &mut self.written, offset, bytes)
    }

    /// Up to 16 bytes, and a mask of the initialized ones.
    pub(super) fn peek(&self, offset: usize, bytes: usize) -> ([u8; 16], u16) {
        memory::peek(&self.bytes, &self.written, offset, bytes)
    }

    /// Writes a result of [`SharedMemory::peek`].
    pub(super) fn poke(&mut self, offset: usize, bytes: usize, from: &([u8; 16], u16)) {
        memory::poke(&mut self.bytes, &mut self.written, offset, bytes, from);
    }

    /// Marks 8 bytes as an mbarrier.
    pub(super) fn mark_barrier(&mut self, offset: usize) {
        self.barriers[offset / 512] |= 1 << (offset / 8 % 64);
    }

    /// Whether bytes overlap an mbarrier.
    pub(super) fn is_barrier(&self, offset: usize, bytes: usize) -> bool {
        (offset / 8..(offset + bytes).div_ceil(8)).any(|at| self.barriers[at / 64] >> (at % 64) & 1 != 0)
    }
}

impl Cluster {
    pub(super) fn new(number: u32, ctas: Vec<[u32; 3]>, program: &Program<'_>) -> Self {
        let cta = |id| Cta {
            id,
            shared: SharedMemory::new(program),
            flags: FxHashMap::default(),
            barriers: (0..16).map(|_| NamedBarrier::new()).collect(),
            mbarriers: BTreeMap::new(),
            warps: (0..program.threads / 32).map(|index| Warp::new(index, program, number)).collect(),
            in_flight: Vec::new(),
            warpgroups: (0..program.threads.div_ceil(128)).map(|_| Warpgroup::default()).collect(),
        };
        let ctas: Vec<Cta> = ctas.into_iter().map(cta).collect();
        let next_agent = program.threads * program.cluster;
        Self { id: number, ctas, agents: FxHashMap::default(), next_agent, barrier: ClusterBarrier::new() }
    }

    /// The index of an agent; agents of 32 lanes have consecutive indices.
    pub(super) fn agent(&mut self, agent: Agent) -> u32 {
        let wide = if matches!(agent, Agent::Mbarrier(..) | Agent::Warpgroup(..)) { 1 } else { 32 };
        let next = self.next_agent;
        let number = *self.agents.entry(agent).or_insert(next);
        if number == next {
            self.next_agent += wide;
        }
        number
    }

    /// Whether any warp has not exited.
    pub(super) fn live(&self) -> bool {
        self.ctas.iter().any(|cta| cta.warps.iter().any(Warp::live))
    }

    /// Wakes all warps after an event that they may wait for.
    pub(super) fn wake(&mut self) {
        for warp in self.ctas.iter_mut().flat_map(|cta| &mut cta.warps) {
            warp.wake();
        }
    }

    /// Resolves a shared address of the CTA with this rank, or with `remote` of any CTA of the cluster.
    #[inline(always)]
    pub(super) fn locate_shared(
        &self,
        rank: usize,
        address: u32,
        bytes: usize,
        remote: bool,
    ) -> Result<MemoryLocation, FaultCause> {
        let (window, low) = ((address >> 24) as usize, address & 0xff_ffff);
        let owner = if window == 0 { rank } else { window - 1 };
        let offset = low.wrapping_sub(SHARED_BASE) as usize;
        let size = self.ctas[rank].shared.bytes.len();
        let fits = low >= SHARED_BASE && offset + bytes <= size;
        if owner >= self.ctas.len() || !fits || (window != 0 && !remote) {
            return Err(out_of_bounds(address, bytes, size, window != 0 && !remote));
        }
        if owner != rank && !self.ctas[owner].warps.iter().any(Warp::live) && window != 0 {
            let message = format!("shared memory of CTA {owner} of the cluster, which has ended");
            return Err((FaultKind::OutOfBounds, message));
        }
        Ok(MemoryLocation::Shared(owner, offset))
    }
}

#[cold]
fn out_of_bounds(address: u32, bytes: usize, size: usize, is_of_another: bool) -> FaultCause {
    let offset = i64::from(address & 0xff_ffff) - i64::from(SHARED_BASE);
    let what = if is_of_another { ", an address of another CTA" } else { "" };
    let message =
        format!("{bytes} bytes at {address:#x}{what}: byte {offset} of {size} bytes of shared memory");
    (FaultKind::OutOfBounds, message)
}

impl World<'_> {
    /// The source line of a step.
    pub(super) fn line(&self, pc: u32) -> String {
        self.program.at.get(pc as usize).map_or_else(String::new, |at| line(at))
    }

    /// The name of a location in messages.
    pub(super) fn name(&self, location: MemoryLocation) -> String {
        location.name(&self.program.arrays)
    }

    /// Checks an access of this strength by a thread that has not waited for earlier launches.
    pub(super) fn check_in_flight(
        &mut self,
        write: bool,
        strength: u8,
        location: GlobalLocation,
        bytes: usize,
    ) -> Result<(), FaultCause> {
        // one actor, which no access of these launches happens before
        let mark = Mark { cluster: u32::MAX, count: 1, strength, ..Mark::default() };
        let id = (mark.cluster, mark.thread);
        let (clock, shape) = (&Clock::new(u32::MAX), self.program.shape());
        let actor = Actor { clock, id, copies: (0, 0), lanes: 1, mark, writes: write, shape };
        let range = location.offset..location.offset + bytes;
        let shadows = self.in_flight.iter_mut().filter_map(|launch| launch.get_mut(location.allocation));
        let mut outcomes = shadows.map(|shadow| shadow.record(range.clone(), &actor));
        outcomes.find_map(Result::err).map_or(Ok(()), |conflict| {
            let mine = if write { "written" } else { "read" };
            let other = if conflict.wrote { "wrote" } else { "read" };
            let location = self.name(MemoryLocation::Global(location));
            let message =
                format!("{location} is {mine} before the wait for earlier launches, one of which {other} it");
            Err((FaultKind::Race, message))
        })
    }

    pub(super) fn conflict(&self, conflict: Conflict, write: bool, location: MemoryLocation) -> FaultCause {
        let Conflict { other, wrote } = conflict;
        let line = self.line(other.pc);
        let (mine, location) = (if write { "written" } else { "read" }, self.name(location));
        let threads = self.program.threads * self.program.cluster;
        if other.thread >= threads {
            let what = if wrote { "writes" } else { "reads" };
            let message = format!(
                "{location} is {mine} while nobody waited for the asynchronous operation of {line} that {what} it"
            );
            return (FaultKind::InFlight, message);
        }
        let (thread, rank) = (other.thread % self.program.threads, other.thread / self.program.threads);
        let what = if wrote { "write" } else { "read" };
        let cta = match self.program.cluster {
            1 => format!("CTA number {}", other.cluster),
            _ => format!("CTA {rank} of cluster {}", other.cluster),
        };
        let message = format!(
            "{location} is {mine}, and nothing orders that after the {what} of {line} by thread {thread} of {cta}"
        );
        (FaultKind::Race, message)
    }

    /// Whether the writer of a mark executed a proxy fence after it and before count `known`.
    pub(super) fn fenced(&self, mark: &Mark, known: u32, global: bool) -> bool {
        let agents = self.program.threads * self.program.cluster;
        let reaches = |fence: &(u32, bool)| fence.1 || !global;
        if mark.count == 0 {
            return true;
        }
        if mark.thread >= agents {
            // among agents, only `cp.async` does not use the async proxy
            let fences = self.fences.get(&(mark.cluster, mark.thread));
            return fences.is_none_or(|fences| {
                fences.iter().rev().any(|fence| fence.0 >= mark.count && reaches(fence))
            });
        }
        self.fences.get(&(mark.cluster, mark.thread)).is_some_and(|fences| {
            let first = fences.partition_point(|(count, _)| *count < mark.count);
            fences[first..].iter().take_while(|(count, _)| *count < known).any(reaches)
        })
    }
}
