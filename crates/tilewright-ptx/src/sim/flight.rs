//! Asynchronous copies in flight. Their chunks arrive one by one, at times and in an order that depend on the seed.

use super::{Cluster, Fault, FaultCause, MemoryLocation, World};

/// A chunk of a copy, at most 16 bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct CopyChunk {
    /// The source; none for zero fill.
    pub(super) from: Option<MemoryLocation>,
    pub(super) to: MemoryLocation,
    pub(super) bytes: usize,
    /// Bytes that are read; the rest is 0.
    pub(super) read: usize,
}

/// The completion mechanism of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyKind {
    /// An mbarrier counts its bytes in this phase.
    Load { barrier: (usize, u32), phase: u64 },
    /// Its lanes wait for the batch.
    Async,
    /// An mbarrier receives an arrival after all `cp.async` of the lane up to the batch.
    Arrival { barrier: (usize, u32), agent: u32 },
}

/// An asynchronous copy in flight.
#[derive(Debug, Clone)]
pub(super) struct AsyncCopy {
    pub(super) kind: CopyKind,
    pub(super) chunks: Vec<CopyChunk>,
    /// The issuing CTA, warp and lanes.
    pub(super) cta: [u32; 3],
    pub(super) warp: u32,
    pub(super) lanes: u32,
    pub(super) batch: u32,
    pub(super) pc: u32,
}

/// The chunks that some lanes copy in a batch.
pub(super) struct CopyBatch {
    pub(super) lanes: u32,
    pub(super) batch: u32,
    pub(super) chunks: Vec<CopyChunk>,
}

impl AsyncCopy {
    /// Whether an mbarrier counts its bytes.
    pub(super) fn is_load(&self) -> bool {
        matches!(self.kind, CopyKind::Load { .. })
    }
}

fn read(world: &World<'_>, cluster: &Cluster, chunk: &CopyChunk) -> ([u8; 16], u16) {
    let zeros = ([0; 16], !0);
    match chunk.from {
        _ if chunk.read == 0 => zeros,
        None => zeros,
        Some(from) => {
            let (bytes, known) = match from {
                MemoryLocation::Global(location) => world.memory.peek(location, chunk.read),
                MemoryLocation::Shared(rank, offset) => cluster.ctas[rank].shared.peek(offset, chunk.read),
            };
            (bytes, known | (u32::MAX << chunk.read) as u16)
        }
    }
}

/// Writes one chunk to its destination.
fn write_chunk(world: &mut World<'_>, cluster: &mut Cluster, chunk: &CopyChunk) {
    let found = read(world, cluster, chunk);
    match chunk.to {
        MemoryLocation::Global(location) => {
            world.memory.poke(location, chunk.bytes, &found);
        }
        MemoryLocation::Shared(rank, offset) => cluster.ctas[rank].shared.poke(offset, chunk.bytes, &found),
    }
}

/// Writes up to `count` chunks of a copy. Returns whether the copy completed.
pub(super) fn advance(
    world: &mut World<'_>,
    cluster: &mut Cluster,
    rank: usize,
    at: usize,
    count: usize,
) -> Result<bool, Fault> {
    let mut copy = cluster.ctas[rank].in_flight.swap_remove(at);
    if let CopyKind::Arrival { .. } = copy.kind
        && cluster.ctas[rank].in_flight.iter().any(|other| {
            other.kind == CopyKind::Async
                && other.warp == copy.warp
                && other.lanes & copy.lanes != 0
                && other.batch <= copy.batch
        })
    {
        cluster.ctas[rank].in_flight.push(copy);
        return Ok(false);
    }
    world.progress += 1;
    let mut arrived = 0;
    for _ in 0..count.min(copy.chunks.len()) {
        let next = world.rng.below(copy.chunks.len());
        let chunk = copy.chunks.swap_remove(next);
        write_chunk(world, cluster, &chunk);
        arrived += chunk.bytes;
    }
    let over = copy.chunks.is_empty();
    let signalled = signal(world, cluster, &copy, arrived);
    let fault = |(kind, message): FaultCause| Fault {
        kind,
        message,
        at: world.program.at.get(copy.pc as usize).copied(),
        cta: copy.cta,
        warp: copy.warp,
        lanes: copy.lanes,
    };
    if signalled.map_err(fault)? {
        cluster.wake();
    }
    if !over {
        cluster.ctas[rank].in_flight.push(copy);
    }
    Ok(over)
}

/// Signals the copy's mbarrier, if any. Returns whether a phase completed.
fn signal(
    world: &World<'_>,
    cluster: &mut Cluster,
    copy: &AsyncCopy,
    arrived: usize,
) -> Result<bool, FaultCause> {
    match copy.kind {
        CopyKind::Load { barrier, phase } => {
            let now = cluster.ctas[barrier.0].mbarriers.get(&barrier.1);
            if let Some(now) = now.filter(|now| now.phase != phase) {
                let expecter = now.expecter.map_or_else(String::new, |pc| format!(" by {}", world.line(pc)));
                let message = format!(
                    "{arrived} bytes arrive for phase {phase} of the mbarrier at {}, which ended before: fewer bytes were expected{expecter} than are copied",
                    world.program.arrays.name(barrier.1 as usize)
                );
                return Err((super::FaultKind::WrongTransactionCount, message));
            }
            cluster.signal(barrier.0, barrier.1, 0, arrived as i64)
        }
        CopyKind::Arrival { barrier, agent } => {
            let id = cluster.id;
            if let Some(found) = cluster.ctas[barrier.0].mbarriers.get_mut(&barrier.1) {
                found.order_agent(id, agent as usize, copy.batch + 1);
            }
            cluster.signal(barrier.0, barrier.1, 1, 0)
        }
        CopyKind::Async => Ok(false),
    }
}

/// Completes all copies of a CTA selected by `which`, in an order that depends on the seed.
pub(super) fn finish(
    world: &mut World<'_>,
    cluster: &mut Cluster,
    rank: usize,
    which: impl Fn(&AsyncCopy) -> bool,
) -> Result<(), Fault> {
    loop {
        let in_flight = &cluster.ctas[rank].in_flight;
        let chosen: Vec<usize> = (0..in_flight.len()).filter(|&at| which(&in_flight[at])).collect();
        if chosen.is_empty() {
            return Ok(());
        }
        let at = chosen[world.rng.below(chosen.len())];
        advance(world, cluster, rank, at, usize::MAX)?;
    }
}
