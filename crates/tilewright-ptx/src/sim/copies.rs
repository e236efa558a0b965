//! Starting asynchronous copies: `cp.async` and its groups; bulk and tensor copies are in `bulk`.
//!
//! A copy marks what it touches when it starts: what it writes as written by its mbarrier's phase or its lane's batch, which
//! nobody knows before the wait. So an access in between is found whether the bytes have arrived by then or not.

use super::{
    exec::{Exec, Next},
    fault::{FaultKind, Trouble},
    flight::{Flight, Kind, Piece, finish},
    lower::Range,
    shadow::Mark,
    world::{Agent, Spot},
};
use crate::isa::{copies::Copy, memory::Space};

/// Bytes between two spots, of which the second number is read.
pub(super) type Part = (Option<Spot>, Spot, (usize, usize));

impl Exec<'_, '_> {
    pub(super) fn copy(&mut self, op: Copy, operands: Range) -> Result<Next, Trouble> {
        match op {
            Copy::Async(bytes) => self.async_copy(bytes, operands, |read| read as usize)?,
            Copy::AsyncUnless(bytes) => {
                self.async_copy(bytes, operands, |absent| if absent == 0 { bytes } else { 0 })?;
            }
            Copy::AsyncCommit => self.active().for_each(|lane| self.warp.copies[lane].commit()),
            Copy::AsyncWait(left) => return self.async_wait(left),
            Copy::AsyncArrive => self.async_arrive(operands)?,
            Copy::BulkLoad => self.bulk_load(operands)?,
            Copy::BulkStore => self.bulk_store(operands, false)?,
            Copy::BulkReduceAddF32 => self.bulk_store(operands, true)?,
            Copy::TensorLoad(dims) => self.tensor_load(operands, dims, false)?,
            Copy::TensorLoadMulticast(dims) => self.tensor_load(operands, dims, true)?,
            Copy::TensorStore(dims) => self.tensor_store(operands, dims)?,
            Copy::TensorPrefetch(_) => {
                let maps = self.addresses(operands, 0, true);
                for lane in self.active() {
                    self.tensor_map(maps[lane])?;
                }
            }
            Copy::BulkCommit => self.active().for_each(|lane| {
                self.warp.bulks[lane].commit();
                self.warp.reads[lane].commit();
            }),
            Copy::BulkWait(left) => return self.bulk_wait(left, false),
            Copy::BulkWaitRead(left) => return self.bulk_wait(left, true),
        }
        Ok(Next::Advance)
    }

    pub(super) fn take_off(&mut self, kind: Kind, rank: usize, parts: &[Part], (lanes, batch): (u32, u32)) {
        let piece = |&(from, to, (bytes, read)): &Part| Piece { from, to, bytes, read, held: None };
        let flight = Flight {
            kind,
            pieces: parts.iter().map(piece).collect(),
            cta: self.cluster.ctas[self.rank].id,
            warp: self.warp.index,
            lanes,
            batch,
            pc: self.pc,
        };
        self.world.report.async_copies += 1;
        self.cluster.ctas[rank].flights.push(flight);
    }

    /// `read` tells from the last operand how many bytes are read.
    fn async_copy(
        &mut self,
        bytes: usize,
        operands: Range,
        read: impl Fn(u64) -> usize,
    ) -> Result<(), Trouble> {
        let (shared, global) = (self.addresses(operands, 0, false), self.addresses(operands, 2, true));
        let agent = self.cluster.agent(Agent::Copies(self.rank, self.warp.index));
        let mut parts: Vec<(u32, u32, Vec<Part>)> = Vec::new();
        for lane in self.active() {
            let read = read(self.operand(operands, 4)[lane]);
            if read > bytes {
                self.culprit = 1 << lane;
                return Err((FaultKind::BadArgument, format!("{read} bytes to read of a copy of {bytes}")));
            }
            let batch = self.warp.copies[lane].open;
            let mark = Mark { who: agent + lane as u32, count: batch, ..self.mark(lane, 0) };
            let to = self.spot(Space::Shared, shared[lane], bytes, lane)?;
            let from = if read == 0 {
                None
            } else {
                if !global[lane].is_multiple_of(bytes as u64) {
                    self.culprit = 1 << lane;
                    let message =
                        format!("{bytes} bytes from {:#x}: expected a multiple of {bytes}", global[lane]);
                    return Err((FaultKind::Misaligned, message));
                }
                let from = self.place(Space::Global, global[lane], read)?;
                self.note(false, (from, read), lane, mark)?;
                Some(from)
            };
            self.note(true, (to, bytes), lane, mark)?;
            // the asynchronous proxy does not see these without a fence
            self.world.fences.entry((mark.cluster, mark.who)).or_default();
            let part = (from, to, (bytes, read));
            match parts.iter_mut().find(|(_, other, _)| *other == batch) {
                Some((lanes, _, parts)) => {
                    *lanes |= 1 << lane;
                    parts.push(part);
                }
                None => parts.push((1 << lane, batch, vec![part])),
            }
        }
        for (lanes, batch, parts) in parts {
            self.take_off(Kind::Async, self.rank, &parts, (lanes, batch));
        }
        Ok(())
    }

    fn async_wait(&mut self, left: usize) -> Result<Next, Trouble> {
        let bounds: Vec<(usize, Option<u32>)> =
            self.active().map(|lane| (lane, self.warp.copies[lane].bound(left))).collect();
        let warp = self.warp.index;
        let waited = |flight: &Flight| {
            flight.kind == Kind::Async
                && flight.warp == warp
                && bounds.iter().any(|&(lane, bound)| {
                    flight.lanes >> lane & 1 != 0 && bound.is_some_and(|bound| flight.batch <= bound)
                })
        };
        if self.cluster.ctas[self.rank].flights.iter().any(waited) {
            if self.world.rng.once_in(2) {
                return Ok(Next::Yield);
            }
            finish(self.world, self.cluster, self.rank, waited)
                .map_err(|fault| (fault.kind, fault.message))?;
            self.warp.wake();
        }
        let agent = self.cluster.agent(Agent::Copies(self.rank, warp));
        for (lane, bound) in bounds {
            let Some(bound) = bound else { continue };
            self.warp.copies[lane].forget(bound);
            self.know(lane, agent + lane as u32, bound);
        }
        Ok(Next::Advance)
    }

    /// A lane has waited for a batch.
    pub(super) fn know(&mut self, lane: usize, who: u32, batch: u32) {
        let id = self.cluster.id;
        self.warp.known.change(1 << lane, |clock| clock.raise(id, who as usize, batch + 1));
    }

    fn async_arrive(&mut self, operands: Range) -> Result<(), Trouble> {
        let addresses = self.addresses(operands, 0, false);
        let agent = self.cluster.agent(Agent::Copies(self.rank, self.warp.index));
        for lane in self.active() {
            let barrier = self.find_mbarrier(addresses[lane], false, lane)?;
            // later copies are another batch
            let batch = self.warp.copies[lane].open;
            self.warp.copies[lane].open += 1;
            let kind = Kind::Arrival { barrier, agent: agent + lane as u32 };
            self.take_off(kind, self.rank, &[], (1 << lane, batch));
        }
        Ok(())
    }
}
