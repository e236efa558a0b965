//! Issue of asynchronous copies: `cp.async` and its groups. Bulk and tensor copies are in `bulk`.
//!
//! A copy marks its source and destination at issue, as accesses of its mbarrier's phase or its lane's batch. No thread's clock
//! includes these before the wait. An access before the wait is therefore a fault, whether the bytes have arrived or not.

use super::{
    Agent, AsyncCopy, CopyBatch, CopyChunk, CopyKind, Exec, FaultCause, FaultKind, Mark, MemoryRange, Next,
    Range, flight::finish,
};
use crate::isa::{copies::CopyOp, memory::Space};

impl Exec<'_, '_> {
    pub(super) fn copy(&mut self, op: CopyOp, operands: Range) -> Result<Next, FaultCause> {
        match op {
            CopyOp::Async(bytes, _) => self.async_copy(bytes, operands, |read| read as usize)?,
            CopyOp::AsyncUnless(bytes) => {
                self.async_copy(bytes, operands, |absent| if absent == 0 { bytes } else { 0 })?;
            }
            CopyOp::AsyncCommit => self.active().for_each(|lane| self.warp.copies[lane].commit()),
            CopyOp::AsyncWait(left) => return self.async_wait(left),
            CopyOp::AsyncArrive => self.async_arrive(operands)?,
            CopyOp::BulkLoad => self.bulk_load(operands)?,
            CopyOp::TensorLoad { dims, ctas, .. } => self.tensor_load(operands, dims, ctas)?,
        }
        Ok(Next::Advance)
    }

    pub(super) fn issue_copy(&mut self, kind: CopyKind, rank: usize, copy: CopyBatch) {
        let CopyBatch { lanes, batch, chunks } = copy;
        let (cta, warp, pc) = (self.cluster.ctas[self.rank].id, self.warp.index, self.pc);
        let copy = AsyncCopy { kind, chunks, cta, warp, lanes, batch, pc };
        self.world.report.async_copies += 1;
        self.cluster.ctas[rank].in_flight.push(copy);
    }

    /// `cp.async`; `read` maps the last operand to the number of bytes read.
    fn async_copy(
        &mut self,
        bytes: usize,
        operands: Range,
        read: impl Fn(u64) -> usize,
    ) -> Result<(), FaultCause> {
        let (shared, global) = (self.addresses(operands, 0, false), self.addresses(operands, 2, true));
        let agent = self.cluster.agent(Agent::Copies(self.rank, self.warp.index));
        let mut copies: Vec<CopyBatch> = Vec::new();
        for lane in self.active() {
            let read = read(self.operand(operands, 4)[lane]);
            if read > bytes {
                self.faulting_lanes = 1 << lane;
                return Err((FaultKind::BadArgument, format!("{read} bytes to read of a copy of {bytes}")));
            }
            let batch = self.warp.copies[lane].open;
            let mark = Mark { thread: agent + lane as u32, count: batch, ..self.mark(lane, 0) };
            let to = self.locate_aligned(Space::Shared, shared[lane], bytes, lane)?;
            let from = if read == 0 {
                None
            } else {
                if !global[lane].is_multiple_of(bytes as u64) {
                    self.faulting_lanes = 1 << lane;
                    let message =
                        format!("{bytes} bytes from {:#x}: expected a multiple of {bytes}", global[lane]);
                    return Err((FaultKind::Misaligned, message));
                }
                let from = self.locate(Space::Global, global[lane], read)?;
                self.record_access(false, MemoryRange { location: from, bytes: read }, lane, mark)?;
                Some(from)
            };
            self.record_access(true, MemoryRange { location: to, bytes }, lane, mark)?;
            // the async proxy needs a fence before it reads these bytes
            self.world.fences.entry((mark.cluster, mark.thread)).or_default();
            let chunk = CopyChunk { from, to, bytes, read };
            match copies.iter_mut().find(|copy| copy.batch == batch) {
                Some(copy) => {
                    copy.lanes |= 1 << lane;
                    copy.chunks.push(chunk);
                }
                None => copies.push(CopyBatch { lanes: 1 << lane, batch, chunks: vec![chunk] }),
            }
        }
        copies.into_iter().for_each(|copy| self.issue_copy(CopyKind::Async, self.rank, copy));
        Ok(())
    }

    fn async_wait(&mut self, left: usize) -> Result<Next, FaultCause> {
        let bounds: Vec<(usize, Option<u32>)> =
            self.active().map(|lane| (lane, self.warp.copies[lane].bound(left))).collect();
        let warp = self.warp.index;
        let waited = |copy: &AsyncCopy| {
            copy.kind == CopyKind::Async
                && copy.warp == warp
                && bounds.iter().any(|&(lane, bound)| {
                    copy.lanes >> lane & 1 != 0 && bound.is_some_and(|bound| copy.batch <= bound)
                })
        };
        if self.cluster.ctas[self.rank].in_flight.iter().any(waited) {
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
            self.warp.clocks.wait_for_copies(lane, agent, bound);
        }
        Ok(Next::Advance)
    }

    fn async_arrive(&mut self, operands: Range) -> Result<(), FaultCause> {
        let addresses = self.addresses(operands, 0, false);
        let agent = self.cluster.agent(Agent::Copies(self.rank, self.warp.index));
        for lane in self.active() {
            let barrier = self.find_mbarrier(addresses[lane], false, lane)?;
            // later copies belong to another batch
            let batch = self.warp.copies[lane].open;
            self.warp.copies[lane].open += 1;
            let kind = CopyKind::Arrival { barrier, agent: agent + lane as u32 };
            self.issue_copy(kind, self.rank, CopyBatch { lanes: 1 << lane, batch, chunks: Vec::new() });
        }
        Ok(())
    }
}
