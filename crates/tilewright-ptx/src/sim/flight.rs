//! Asynchronous copies on their way: pieces that arrive one by one, at times and in an order that the seed chooses.

use super::{
    access::changed,
    fault::{Fault, Trouble},
    world::{Cluster, Spot, World},
};
use crate::isa::memory::AtomicOp;

/// Bytes on their way, 16 at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// Nowhere: zeros.
    pub(super) from: Option<Spot>,
    pub(super) to: Spot,
    pub(super) bytes: usize,
    /// Bytes that are read; the rest is 0.
    pub(super) read: usize,
    /// What was read, and which of it anybody had written.
    pub(super) held: Option<([u8; 16], u16)>,
}

/// What becomes of a copy when it arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The mbarrier counts its bytes, in this phase.
    Load { barrier: (usize, u32), phase: u64 },
    /// Its lanes wait for the batch.
    Async,
    /// An mbarrier gets an arrival when all `cp.async` of the lane up to the batch arrived.
    Arrival { barrier: (usize, u32), agent: u32 },
    /// Its lane waits for the batch, or for the batch to be read.
    Store { add: bool },
}

/// A copy.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    pub(super) kind: Kind,
    pub(super) pieces: Vec<Piece>,
    /// Who started it.
    pub(super) cta: [u32; 3],
    pub(super) warp: u32,
    pub(super) lanes: u32,
    pub(super) batch: u32,
    pub(super) pc: u32,
}

impl Flight {
    /// Whether it brings bytes that an mbarrier counts.
    pub(super) fn is_load(&self) -> bool {
        matches!(self.kind, Kind::Load { .. })
    }
}

fn read(world: &World<'_>, cluster: &Cluster, piece: &Piece) -> ([u8; 16], u16) {
    if let Some(held) = piece.held {
        return held;
    }
    let zeros = ([0; 16], !0);
    match piece.from {
        _ if piece.read == 0 => zeros,
        None => zeros,
        Some(from) => {
            let (bytes, known) = match from {
                Spot::Global(place) => world.memory.peek(place, piece.read),
                Spot::Shared(rank, offset) => cluster.ctas[rank].shared.peek(offset, piece.read),
            };
            (bytes, known | (u32::MAX << piece.read) as u16)
        }
    }
}

/// Moves one piece to where it goes.
fn land(world: &mut World<'_>, cluster: &mut Cluster, piece: &Piece, add: bool) {
    let mut found = read(world, cluster, piece);
    match piece.to {
        Spot::Global(place) => {
            if add {
                let (old, known) = world.memory.peek(place, piece.bytes);
                for at in (0..piece.bytes).step_by(4) {
                    let word = |bytes: &[u8; 16]| {
                        u64::from(u32::from_le_bytes([
                            bytes[at],
                            bytes[at + 1],
                            bytes[at + 2],
                            bytes[at + 3],
                        ]))
                    };
                    let sum = changed(AtomicOp::AddF32, word(&old), word(&found.0), 0) as u32;
                    found.0[at..at + 4].copy_from_slice(&sum.to_le_bytes());
                }
                found.1 &= known;
            }
            world.memory.poke(place, piece.bytes, &found);
        }
        Spot::Shared(rank, offset) => cluster.ctas[rank].shared.poke(offset, piece.bytes, &found),
    }
}

/// Lets up to `count` pieces of a copy arrive, and the copy complete when none is left. `true` when it did.
pub(super) fn fly(
    world: &mut World<'_>,
    cluster: &mut Cluster,
    (rank, at): (usize, usize),
    count: usize,
) -> Result<bool, Fault> {
    let mut flight = cluster.ctas[rank].flights.swap_remove(at);
    if let Kind::Arrival { .. } = flight.kind
        && cluster.ctas[rank].flights.iter().any(|other| {
            other.kind == Kind::Async
                && other.warp == flight.warp
                && other.lanes & flight.lanes != 0
                && other.batch <= flight.batch
        })
    {
        cluster.ctas[rank].flights.push(flight);
        return Ok(false);
    }
    world.progress += 1;
    let add = flight.kind == Kind::Store { add: true };
    let mut arrived = 0;
    for _ in 0..count.min(flight.pieces.len()) {
        let next = world.rng.below(flight.pieces.len());
        let piece = flight.pieces.swap_remove(next);
        land(world, cluster, &piece, add);
        arrived += piece.bytes;
    }
    let over = flight.pieces.is_empty();
    let signalled = signal(world, cluster, &flight, arrived);
    let fault = |(kind, message): Trouble| Fault {
        kind,
        message,
        at: world.program.at.get(flight.pc as usize).copied(),
        cta: flight.cta,
        warp: flight.warp,
        lanes: flight.lanes,
    };
    if signalled.map_err(fault)? {
        cluster.wake();
    }
    if !over {
        cluster.ctas[rank].flights.push(flight);
    }
    Ok(over)
}

/// Tells the mbarrier, if the copy has one: `true` when a phase ended.
fn signal(
    world: &World<'_>,
    cluster: &mut Cluster,
    flight: &Flight,
    arrived: usize,
) -> Result<bool, Trouble> {
    match flight.kind {
        Kind::Load { barrier, phase } => {
            let now = cluster.ctas[barrier.0].mbarriers.get(&barrier.1);
            if let Some(now) = now.filter(|now| now.phase != phase) {
                let expecter = now.expecter.map_or_else(String::new, |pc| format!(" by {}", world.line(pc)));
                let message = format!(
                    "{arrived} bytes arrive for phase {phase} of the mbarrier at {}, which ended before: fewer bytes were expected{expecter} than are copied",
                    world.program.arrays.name(barrier.1 as usize)
                );
                return Err((super::FaultKind::WrongTransactionCount, message));
            }
            cluster.signal(barrier, 0, arrived as i64)
        }
        Kind::Arrival { barrier, agent } => {
            let id = cluster.id;
            if let Some(found) = cluster.ctas[barrier.0].mbarriers.get_mut(&barrier.1) {
                found.learn(id, agent as usize, flight.batch + 1);
            }
            cluster.signal(barrier, 1, 0)
        }
        Kind::Async | Kind::Store { .. } => Ok(false),
    }
}

/// Completes all copies of a CTA that `which` chooses, in an order of the seed's.
pub(super) fn finish(
    world: &mut World<'_>,
    cluster: &mut Cluster,
    rank: usize,
    which: impl Fn(&Flight) -> bool,
) -> Result<(), Fault> {
    loop {
        let flights = &cluster.ctas[rank].flights;
        let chosen: Vec<usize> = (0..flights.len()).filter(|&at| which(&flights[at])).collect();
        if chosen.is_empty() {
            return Ok(());
        }
        let at = chosen[world.rng.below(chosen.len())];
        fly(world, cluster, (rank, at), usize::MAX)?;
    }
}

/// Reads all that stores of a CTA which `which` chooses have still to read.
pub(super) fn finish_reads(
    world: &World<'_>,
    cluster: &mut Cluster,
    rank: usize,
    which: impl Fn(&Flight) -> bool,
) {
    let mut flights = std::mem::take(&mut cluster.ctas[rank].flights);
    for flight in flights.iter_mut().filter(|flight| which(flight)) {
        for piece in &mut flight.pieces {
            piece.held = Some(read(world, cluster, piece));
        }
    }
    cluster.ctas[rank].flights = flights;
}
