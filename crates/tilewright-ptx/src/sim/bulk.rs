//! Bulk and tensor copies: loads that an mbarrier counts, stores in groups of their thread.
//!
//! Global memory that nobody wrote may be loaded, as rows beyond a tensor's last are; whoever reads it then has to answer for it.

use super::{
    copies::Part,
    exec::{Exec, Next},
    fault::{FaultKind, Trouble},
    flight::{Flight, Kind, finish, finish_reads},
    lower::{Range, SHARED_BASE},
    shadow::Mark,
    tensor::TensorMap,
    world::{Agent, Spot},
};
use crate::isa::memory::Space;

impl Exec<'_, '_> {
    /// The tensor map at an address.
    pub(super) fn tensor_map(&self, address: u64) -> Result<TensorMap, Trouble> {
        self.world.program.map(address).cloned().ok_or_else(|| {
            (
                FaultKind::BadArgument,
                format!("there is no tensor map at {address:#x}: expected a parameter's address"),
            )
        })
    }

    /// The parts of a bulk copy, after its sizes and addresses were checked.
    fn bulk_parts(
        &mut self,
        (shared, global): (u64, u64),
        bytes: u64,
        load: bool,
        lane: usize,
    ) -> Result<Vec<Part>, Trouble> {
        self.culprit = 1 << lane;
        if bytes == 0 || !bytes.is_multiple_of(16) || bytes >= 1 << 20 {
            return Err((
                FaultKind::BadArgument,
                format!("a bulk copy of {bytes} bytes: expected a multiple of 16"),
            ));
        }
        for address in [shared, global] {
            if !address.is_multiple_of(16) {
                let message = format!("a bulk copy at {address:#x}: expected a multiple of 16");
                return Err((FaultKind::Misaligned, message));
            }
        }
        let here = self.place(if load { Space::Cluster } else { Space::Shared }, shared, bytes as usize)?;
        let there = self.place(Space::Global, global, bytes as usize)?;
        self.culprit = self.mask;
        let (from, to) = if load { (there, here) } else { (here, there) };
        Ok((0..bytes as usize).step_by(16).map(|at| (Some(from.plus(at)), to.plus(at), (16, 16))).collect())
    }

    pub(super) fn bulk_load(&mut self, operands: Range) -> Result<(), Trouble> {
        let (shared, global) = (self.addresses(operands, 0, false), self.addresses(operands, 2, true));
        let barriers = self.addresses(operands, 5, false);
        for lane in self.active() {
            let bytes = self.operand(operands, 4)[lane];
            let parts = self.bulk_parts((shared[lane], global[lane]), bytes, true, lane)?;
            let barrier = self.find_mbarrier(barriers[lane], true, lane)?;
            self.start_load(&parts, barrier, lane)?;
        }
        Ok(())
    }

    pub(super) fn tensor_load(
        &mut self,
        operands: Range,
        dims: usize,
        multicast: bool,
    ) -> Result<(), Trouble> {
        let (shared, maps) = (self.addresses(operands, 0, false), self.addresses(operands, 2, true));
        let barriers = self.addresses(operands, 4, false);
        for lane in self.active() {
            let map = self.tensor_map(maps[lane])?;
            let ctas = match multicast {
                true => self.operand(operands, 6 + dims)[lane] as u32,
                false => 0,
            };
            let barrier = self.find_mbarrier(barriers[lane], true, lane)?;
            let parts = self.box_parts(&map, (operands, 6, dims), shared[lane], lane)?;
            if !multicast {
                self.start_load(&parts, barrier, lane)?;
                continue;
            }
            if ctas == 0 || ctas >> self.cluster.ctas.len() != 0 {
                let message =
                    format!("a multicast to CTAs {ctas:#b} of a cluster of {}", self.cluster.ctas.len());
                return Err((FaultKind::BadArgument, message));
            }
            for rank in (0..16).filter(|rank| ctas >> rank & 1 != 0) {
                let there =
                    |spot| if let Spot::Shared(_, offset) = spot { Spot::Shared(rank, offset) } else { spot };
                let parts: Vec<Part> =
                    parts.iter().map(|&(from, to, bytes)| (from, there(to), bytes)).collect();
                let address = ((rank as u64 + 1) << 24) + u64::from(SHARED_BASE + barrier.1);
                let barrier = self.find_mbarrier(address, true, lane)?;
                self.start_load(&parts, barrier, lane)?;
            }
        }
        Ok(())
    }

    /// The parts of a box into shared memory.
    fn box_parts(
        &mut self,
        map: &TensorMap,
        (operands, first, dims): (Range, usize, usize),
        shared: u64,
        lane: usize,
    ) -> Result<Vec<Part>, Trouble> {
        self.culprit = 1 << lane;
        if map.dims.len() != dims {
            let message = format!("a copy of {dims} dimensions of a tensor of {}", map.dims.len());
            return Err((FaultKind::BadArgument, message));
        }
        if !shared.is_multiple_of(u64::from(TensorMap::SHARED_ALIGN)) {
            let message = format!("a box at {shared:#x}: expected a multiple of {}", TensorMap::SHARED_ALIGN);
            return Err((FaultKind::Misaligned, message));
        }
        let coordinates: Vec<i32> =
            (0..dims).map(|at| (self.operand(operands, first + at)[lane] as u32).cast_signed()).collect();
        let moves = map.moves(&coordinates, shared as u32);
        let mut parts = Vec::with_capacity(moves.len());
        for piece in moves {
            let bytes = piece.bytes as usize;
            let to = self.place(Space::Cluster, u64::from(piece.shared), bytes)?;
            let from = match piece.global {
                Some(address) => Some(self.place(Space::Global, address, bytes)?),
                None => None,
            };
            parts.push((from, to, (bytes, bytes)));
        }
        self.culprit = self.mask;
        Ok(parts)
    }

    /// Starts a copy into shared memory that an mbarrier counts.
    fn start_load(&mut self, parts: &[Part], barrier: (usize, u32), lane: usize) -> Result<(), Trouble> {
        let Some(found) = self.cluster.ctas[barrier.0].mbarriers.get(&barrier.1) else { return Ok(()) };
        let (phase, agent, init) = (found.phase, found.agent, found.init);
        let mine = self.mark(lane, 0);
        if init.who == mine.who && init.count == mine.count {
            self.culprit = 1 << lane;
            let message = format!(
                "the mbarrier at {}, initialised at {}, counts a copy without a fence.mbarrier_init or a barrier between",
                self.world.program.arrays.name(barrier.1 as usize),
                self.world.line(init.pc)
            );
            return Err((FaultKind::MissingProxyFence, message));
        }
        let mark = Mark { who: agent, count: phase as u32 + 1, ..mine };
        let mut rank = self.rank;
        for &(from, to, (bytes, _)) in parts {
            if let Some(from) = from {
                self.check_proxy((from, bytes), lane)?;
                self.note(false, (from, bytes), lane, mark)?;
            }
            self.check_proxy((to, bytes), lane)?;
            self.note(true, (to, bytes), lane, mark)?;
            if let Spot::Shared(owner, _) = to {
                rank = owner;
            }
        }
        if rank != barrier.0 {
            self.culprit = 1 << lane;
            let message =
                format!("a copy into CTA {rank} of the cluster with an mbarrier of CTA {}", barrier.0);
            return Err((FaultKind::BadArgument, message));
        }
        self.take_off(Kind::Load { barrier, phase }, rank, parts, (1 << lane, 0));
        Ok(())
    }

    /// Whether those who wrote bytes fenced them from the asynchronous proxy.
    fn check_proxy(&mut self, (spot, bytes): (Spot, usize), lane: usize) -> Result<(), Trouble> {
        let me = (self.cluster.id, self.first() + lane as u32);
        let (clock, mine) = (self.warp.known.of(lane), self.warp.known.counts[lane]);
        let mut missing = None;
        let world = &*self.world;
        let (shadow, offset, global) = match spot {
            Spot::Global(place) => (&world.shadows[place.allocation], place.offset, true),
            Spot::Shared(rank, offset) => (&self.cluster.ctas[rank].shared.shadow, offset, false),
        };
        shadow.writes((offset, bytes), |mark| {
            let known = match (mark.cluster, mark.who) == me {
                true => mine,
                false => clock.get(mark.cluster, mark.who as usize),
            };
            // what is not even known is a race, and reported as one
            if known > mark.count && !world.fenced(mark, known, global)
                || known == mark.count && (mark.cluster, mark.who) == me
            {
                missing = Some(*mark);
            }
        });
        match missing {
            None => Ok(()),
            Some(mark) => {
                self.culprit = 1 << lane;
                Err(unfenced(&self.world.name(spot), &self.world.line(mark.pc)))
            }
        }
    }

    pub(super) fn bulk_store(&mut self, operands: Range, add: bool) -> Result<(), Trouble> {
        let (global, shared) = (self.addresses(operands, 0, true), self.addresses(operands, 2, false));
        for lane in self.active() {
            let bytes = self.operand(operands, 4)[lane];
            let parts = self.bulk_parts((shared[lane], global[lane]), bytes, false, lane)?;
            self.start_store(&parts, add, lane)?;
        }
        Ok(())
    }

    pub(super) fn tensor_store(&mut self, operands: Range, dims: usize) -> Result<(), Trouble> {
        let (maps, shared) = (self.addresses(operands, 0, true), self.addresses(operands, 2, false));
        for lane in self.active() {
            let map = self.tensor_map(maps[lane])?;
            let parts = self.box_parts(&map, (operands, 4, dims), shared[lane], lane)?;
            let inside =
                parts.into_iter().filter_map(|(global, shared, bytes)| Some((Some(shared), global?, bytes)));
            let parts: Vec<Part> = inside.collect();
            self.start_store(&parts, false, lane)?;
        }
        Ok(())
    }

    fn start_store(&mut self, parts: &[Part], add: bool, lane: usize) -> Result<(), Trouble> {
        let bulks = self.cluster.agent(Agent::Bulks(self.rank, self.warp.index)) + lane as u32;
        let reads = self.cluster.agent(Agent::Reads(self.rank, self.warp.index)) + lane as u32;
        let batch = self.warp.bulks[lane].open;
        let mine = self.mark(lane, 0);
        let write = Mark { who: bulks, count: batch, strength: if add { 3 } else { 0 }, ..mine };
        let read = Mark { who: reads, count: batch, ..mine };
        for &(from, to, (bytes, _)) in parts {
            if let Some(from) = from {
                self.check_proxy((from, bytes), lane)?;
                self.note(false, (from, bytes), lane, read)?;
                self.bytes(from, bytes)?;
            }
            self.note(true, (to, bytes), lane, write)?;
        }
        self.warp.unread[lane] = Some((batch, self.pc));
        self.take_off(Kind::Store { add }, self.rank, parts, (1 << lane, batch));
        Ok(())
    }

    pub(super) fn bulk_wait(&mut self, left: usize, only_read: bool) -> Result<Next, Trouble> {
        let (rank, warp) = (self.rank, self.warp.index);
        let bulks = self.cluster.agent(Agent::Bulks(rank, warp));
        let reads = self.cluster.agent(Agent::Reads(rank, warp));
        for lane in self.active() {
            let bound =
                if only_read { self.warp.reads[lane].bound(left) } else { self.warp.bulks[lane].bound(left) };
            let Some(bound) = bound else { continue };
            let waited = |flight: &Flight| {
                matches!(flight.kind, Kind::Store { .. })
                    && (flight.warp, flight.lanes) == (warp, 1 << lane)
                    && flight.batch <= bound
            };
            if self.cluster.ctas[rank].flights.iter().any(waited) && self.world.rng.once_in(2) {
                return Ok(Next::Yield);
            }
            if only_read {
                finish_reads(self.world, self.cluster, rank, waited);
            } else {
                finish(self.world, self.cluster, rank, waited)
                    .map_err(|fault| (fault.kind, fault.message))?;
                self.warp.bulks[lane].forget(bound);
                self.know(lane, bulks + lane as u32, bound);
            }
            self.warp.reads[lane].forget(bound);
            self.know(lane, reads + lane as u32, bound);
            if self.warp.unread[lane].is_some_and(|(batch, _)| batch <= bound) {
                self.warp.unread[lane] = None;
            }
        }
        Ok(Next::Advance)
    }

    /// Lanes end: what they stored from shared memory must have been read.
    pub(super) fn check_unread(&mut self) -> Result<(), Trouble> {
        for lane in self.active() {
            if let Some((_, pc)) = self.warp.unread[lane] {
                self.culprit = 1 << lane;
                let message = format!(
                    "the thread ends before it waited for the bulk store of {} to have read its shared memory",
                    self.world.line(pc)
                );
                return Err((FaultKind::InFlight, message));
            }
        }
        Ok(())
    }
}

/// What it is to forget a fence.
pub(super) fn unfenced(what: &str, line: &str) -> Trouble {
    let message = format!(
        "an asynchronous operation meets what {line} wrote to {what}, without a fence.proxy.async by the writer after it"
    );
    (FaultKind::MissingProxyFence, message)
}
