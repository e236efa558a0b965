//! What a launch consists of: memory, clusters, CTAs; and what all parts of the simulator need of it.

use super::{
    Report,
    barrier::{ClusterBarrier, Named},
    clock::Clock,
    fault::{FaultKind, Trouble, line},
    flight::Flight,
    lower::{Arrays, Program, SHARED_BASE},
    mbarrier::Mbarrier,
    memory::{self, GARBAGE, Memory, Place},
    rng::Rng,
    shadow::{Conflict, Mark, Shadow},
    warp::Warp,
    wgmma::Warpgroup,
};
use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

/// What is shared by the whole grid.
#[derive(Debug)]
pub(super) struct World<'m> {
    pub(super) program: Program,
    pub(super) memory: &'m mut Memory,
    /// One for each allocation.
    pub(super) shadows: Vec<Shadow>,
    pub(super) flags: HashMap<u64, Flag>,
    /// For each thread the counts at which it fenced the asynchronous proxy, and whether for all memory; the same for the
    /// batches of its `cp.async`, if it has any.
    pub(super) fences: HashMap<(u32, u32), Vec<(u32, bool)>>,
    pub(super) rng: Rng,
    pub(super) report: Report,
    /// Counts whatever changes something that another thread may wait for.
    pub(super) progress: u64,
    pub(super) grid: [u32; 3],
}

/// What releases at a word made known.
#[derive(Debug)]
pub(super) struct Flag {
    pub(super) clock: Clock,
    pub(super) level: u8,
    /// The CTA that released: cluster and rank.
    pub(super) cta: (u32, usize),
}

/// What works asynchronously. Each has a number, or 32, behind those of its cluster's threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Agent {
    /// Copies that an mbarrier counts, by rank and offset.
    Mbarrier(usize, u32),
    /// `cp.async` of a warp's lanes, by rank and warp.
    Copies(usize, u32),
    /// Writes of bulk stores of a warp's lanes.
    Bulks(usize, u32),
    /// What these read.
    Reads(usize, u32),
    /// What `wgmma` reads, by rank and warpgroup.
    Warpgroup(usize, u32),
}

/// The CTAs of a cluster, which run together.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) id: u32,
    pub(super) ctas: Vec<Cta>,
    agents: HashMap<Agent, u32>,
    next_agent: u32,
    pub(super) barrier: ClusterBarrier,
}

/// A CTA.
#[derive(Debug)]
pub(super) struct Cta {
    pub(super) id: [u32; 3],
    pub(super) shared: Shared,
    pub(super) flags: HashMap<u64, Flag>,
    pub(super) barriers: Vec<Named>,
    /// By offset.
    pub(super) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(super) warps: Vec<Warp>,
    pub(super) flights: Vec<Flight>,
    pub(super) warpgroups: Vec<Warpgroup>,
}

/// Shared memory of a CTA.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) bytes: Vec<u8>,
    written: Vec<u64>,
    /// One bit for each 8 bytes that are an mbarrier.
    barriers: Vec<u64>,
    pub(super) arrays: Rc<Arrays>,
    pub(super) shadow: Shadow,
}

/// Bytes somewhere.
#[derive(Debug, Clone, Copy)]
pub(super) enum Spot {
    Global(Place),
    /// Rank and offset.
    Shared(usize, usize),
}

impl Spot {
    /// As messages name it.
    fn name(self, arrays: &Arrays) -> String {
        match self {
            Self::Global(place) => {
                format!("global memory at {:#x}", ((place.allocation as u64 + 1) << 32) + place.offset as u64)
            }
            Self::Shared(_, offset) => format!("shared memory at {}", arrays.name(offset)),
        }
    }

    /// The key of its word among the flags of its memory.
    pub(super) fn word(self) -> u64 {
        match self {
            Self::Global(place) => ((place.allocation as u64) << 32) + (place.offset as u64 & !3),
            Self::Shared(_, offset) => offset as u64 & !3,
        }
    }

    pub(super) fn plus(self, bytes: usize) -> Self {
        match self {
            Self::Global(place) => Self::Global(Place { offset: place.offset + bytes, ..place }),
            Self::Shared(rank, offset) => Self::Shared(rank, offset + bytes),
        }
    }
}

impl Shared {
    fn new(program: &Program) -> Self {
        let (bytes, shape) = (program.shared_bytes, (program.threads, program.cluster));
        let written = vec![0; bytes.div_ceil(64)];
        let barriers = vec![0; bytes.div_ceil(512)];
        let (bytes, shadow) = (vec![GARBAGE; bytes], Shadow::new(bytes, shape));
        Self { bytes, written, barriers, arrays: Rc::clone(&program.arrays), shadow }
    }

    pub(super) fn read(&self, offset: usize, bytes: usize) -> Result<&[u8], Trouble> {
        if let Some(at) = memory::first_unwritten(&self.written, offset, bytes) {
            let message = format!("shared memory at {} was never written", self.arrays.name(at));
            return Err((FaultKind::Uninitialized, message));
        }
        Ok(&self.bytes[offset..offset + bytes])
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        memory::set_written(&mut self.written, offset, bytes.len());
    }

    /// Up to 16 bytes, and which of them were written.
    pub(super) fn peek(&self, offset: usize, bytes: usize) -> ([u8; 16], u16) {
        memory::peek(&self.bytes, &self.written, offset, bytes)
    }

    /// Puts back what [`Shared::peek`] gave.
    pub(super) fn poke(&mut self, offset: usize, bytes: usize, from: &([u8; 16], u16)) {
        memory::poke(&mut self.bytes, &mut self.written, (offset, bytes), from);
    }

    /// Says that 8 bytes are an mbarrier, or that they no longer are.
    pub(super) fn set_barrier(&mut self, offset: usize, is: bool) {
        let bit = 1 << (offset / 8 % 64);
        let word = &mut self.barriers[offset / 512];
        *word = if is { *word | bit } else { *word & !bit };
    }

    /// Whether bytes are part of an mbarrier.
    pub(super) fn is_barrier(&self, offset: usize, bytes: usize) -> bool {
        (offset / 8..=(offset + bytes - 1) / 8).any(|at| self.barriers[at / 64] >> (at % 64) & 1 != 0)
    }
}

impl Cluster {
    pub(super) fn new(number: u32, ctas: Vec<[u32; 3]>, program: &Program) -> Self {
        let cta = |id| Cta {
            id,
            shared: Shared::new(program),
            flags: HashMap::new(),
            barriers: (0..16).map(|_| Named::new()).collect(),
            mbarriers: BTreeMap::new(),
            warps: (0..program.threads / 32).map(|index| Warp::new(index, program, number)).collect(),
            flights: Vec::new(),
            warpgroups: (0..program.threads.div_ceil(128)).map(|_| Warpgroup::default()).collect(),
        };
        let ctas: Vec<Cta> = ctas.into_iter().map(cta).collect();
        let next_agent = program.threads * program.cluster;
        Self { id: number, ctas, agents: HashMap::new(), next_agent, barrier: ClusterBarrier::new() }
    }

    /// The number of what works asynchronously; lanes follow each other.
    pub(super) fn agent(&mut self, agent: Agent) -> u32 {
        let wide = if matches!(agent, Agent::Mbarrier(..) | Agent::Warpgroup(..)) { 1 } else { 32 };
        let next = self.next_agent;
        let number = *self.agents.entry(agent).or_insert(next);
        if number == next {
            self.next_agent += wide;
        }
        number
    }

    /// Whether any warp of it has not ended.
    pub(super) fn live(&self) -> bool {
        self.ctas.iter().any(|cta| cta.warps.iter().any(Warp::live))
    }

    /// Something happened that its warps may wait for.
    pub(super) fn wake(&mut self) {
        for warp in self.ctas.iter_mut().flat_map(|cta| &mut cta.warps) {
            warp.wake();
        }
    }

    /// Where bytes of shared memory are: those of the CTA of that rank, or with `remote` of any CTA of the cluster.
    pub(super) fn shared_spot(
        &self,
        rank: usize,
        address: u32,
        bytes: usize,
        remote: bool,
    ) -> Result<Spot, Trouble> {
        let (window, low) = ((address >> 24) as usize, address & 0xff_ffff);
        let owner = if window == 0 { rank } else { window - 1 };
        let offset = low.wrapping_sub(SHARED_BASE) as usize;
        let size = self.ctas[rank].shared.bytes.len();
        let fits = low >= SHARED_BASE && offset + bytes <= size;
        if owner >= self.ctas.len() || !fits || (window != 0 && !remote) {
            let offset = i64::from(low) - i64::from(SHARED_BASE);
            let what = if window != 0 && !remote { ", an address of another CTA" } else { "" };
            let message = format!(
                "{bytes} bytes at {address:#x}{what}: byte {offset} of {size} bytes of shared memory"
            );
            return Err((FaultKind::OutOfBounds, message));
        }
        if owner != rank && !self.ctas[owner].warps.iter().any(Warp::live) && window != 0 {
            return Err((
                FaultKind::OutOfBounds,
                format!("shared memory of CTA {owner} of the cluster, which has ended"),
            ));
        }
        Ok(Spot::Shared(owner, offset))
    }
}

impl World<'_> {
    /// The line of a step.
    pub(super) fn line(&self, pc: u32) -> String {
        self.program.at.get(pc as usize).map_or_else(String::new, |at| line(at))
    }

    /// What bytes are called.
    pub(super) fn name(&self, spot: Spot) -> String {
        spot.name(&self.program.arrays)
    }

    /// What a conflict is called.
    pub(super) fn conflict(&self, conflict: Conflict, write: bool, spot: Spot) -> Trouble {
        let Conflict { other, wrote } = conflict;
        let line = self.line(other.pc);
        let (mine, spot) = (if write { "written" } else { "read" }, self.name(spot));
        let threads = self.program.threads * self.program.cluster;
        if other.who >= threads {
            let what = if wrote { "writes" } else { "reads" };
            let message = format!(
                "{spot} is {mine} while nobody waited for the asynchronous operation of {line} that {what} it"
            );
            return (FaultKind::InFlight, message);
        }
        let (thread, rank) = (other.who % self.program.threads, other.who / self.program.threads);
        let what = if wrote { "write" } else { "read" };
        let cta = match self.program.cluster {
            1 => format!("CTA number {}", other.cluster),
            _ => format!("CTA {rank} of cluster {}", other.cluster),
        };
        let message = format!(
            "{spot} is {mine}, and nothing orders that after the {what} of {line} by thread {thread} of {cta}"
        );
        (FaultKind::Race, message)
    }

    /// Whether the writer of a mark fenced it from the asynchronous proxy, as far as is known up to `known`.
    pub(super) fn fenced(&self, mark: &Mark, known: u32, global: bool) -> bool {
        let agents = self.program.threads * self.program.cluster;
        let reaches = |fence: &(u32, bool)| fence.1 || !global;
        if mark.count == 0 {
            return true;
        }
        if mark.who >= agents {
            // of these only `cp.async` is not of the asynchronous proxy itself
            let fences = self.fences.get(&(mark.cluster, mark.who));
            return fences.is_none_or(|fences| {
                fences.iter().rev().any(|fence| fence.0 >= mark.count && reaches(fence))
            });
        }
        self.fences.get(&(mark.cluster, mark.who)).is_some_and(|fences| {
            let first = fences.partition_point(|(count, _)| *count < mark.count);
            fences[first..].iter().take_while(|(count, _)| *count < known).any(reaches)
        })
    }
}
