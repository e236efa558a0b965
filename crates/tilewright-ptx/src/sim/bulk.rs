//! Bulk and tensor loads, which complete on an mbarrier.
//!
//! Loads may copy uninitialized global memory, such as rows after a tensor's last. Only a later read of these bytes is a fault.

use super::{
    CopyBatch, CopyChunk, CopyKind, Exec, FaultCause, FaultKind, Mark, MemoryLocation, MemoryRange, Range,
    TensorMap,
};
use crate::isa::memory::Space;

impl Exec<'_, '_> {
    pub(super) fn tensor_map(&self, address: u64) -> Result<TensorMap, FaultCause> {
        self.world.program.map(address).cloned().ok_or_else(|| {
            (
                FaultKind::BadArgument,
                format!("there is no tensor map at {address:#x}: expected a parameter's address"),
            )
        })
    }

    /// Checks a bulk copy's size and addresses and splits it into chunks.
    fn bulk_chunks(
        &mut self,
        shared: u64,
        global: u64,
        bytes: u64,
        lane: usize,
    ) -> Result<Vec<CopyChunk>, FaultCause> {
        self.faulting_lanes = 1 << lane;
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
        let to = self.locate(Space::Cluster, shared, bytes as usize)?;
        let from = self.locate(Space::Global, global, bytes as usize)?;
        self.faulting_lanes = self.mask;
        let chunk = |at| CopyChunk { from: Some(from.plus(at)), to: to.plus(at), bytes: 16, read: 16 };
        Ok((0..bytes as usize).step_by(16).map(chunk).collect())
    }

    pub(super) fn bulk_load(&mut self, operands: Range) -> Result<(), FaultCause> {
        let (shared, global) = (self.addresses(operands, 0, false), self.addresses(operands, 2, true));
        let barriers = self.addresses(operands, 5, false);
        for lane in self.active() {
            let bytes = self.operand(operands, 4)[lane];
            let chunks = self.bulk_chunks(shared[lane], global[lane], bytes, lane)?;
            let barrier = self.find_mbarrier(barriers[lane], false, lane)?;
            self.start_load(chunks, barrier, lane)?;
        }
        Ok(())
    }

    /// A load into this CTA, or into each of `ctas` CTAs of the cluster.
    pub(super) fn tensor_load(&mut self, operands: Range, dims: usize, ctas: u32) -> Result<(), FaultCause> {
        let (shared, maps) = (self.addresses(operands, 0, false), self.addresses(operands, 2, true));
        let barriers = self.addresses(operands, 4, false);
        for lane in self.active() {
            let map = self.tensor_map(maps[lane])?;
            let coordinate = |at| (self.operand(operands, 6 + at)[lane] as u32).cast_signed();
            let coordinates: Vec<i32> = (0..dims).map(coordinate).collect();
            let (size, is_multicast) = (self.cluster.ctas.len(), ctas > 1);
            if is_multicast && ctas as usize != size {
                let message = format!("a copy to {ctas} CTAs of a cluster of {size}");
                return Err((FaultKind::BadArgument, message));
            }
            for rank in 0..u64::from(ctas) {
                let of_rank = |address| if is_multicast { in_cta(address, rank) } else { address };
                let [to, barrier] = [shared[lane], barriers[lane]].map(of_rank);
                let barrier = self.find_mbarrier(barrier, is_multicast, lane)?;
                let chunks = self.box_chunks(&map, &coordinates, to, lane)?;
                self.start_load(chunks, barrier, lane)?;
            }
        }
        Ok(())
    }

    /// Splits the copy of a box into chunks.
    fn box_chunks(
        &mut self,
        map: &TensorMap,
        coordinates: &[i32],
        shared: u64,
        lane: usize,
    ) -> Result<Vec<CopyChunk>, FaultCause> {
        self.faulting_lanes = 1 << lane;
        if map.dims.len() != coordinates.len() {
            let (dims, tensor_dims) = (coordinates.len(), map.dims.len());
            let message = format!("a copy of {dims} dimensions of a tensor of {tensor_dims}");
            return Err((FaultKind::BadArgument, message));
        }
        if !(shared & 0xff_ffff).is_multiple_of(u64::from(TensorMap::SHARED_ALIGN)) {
            let message = format!("a box at {shared:#x}: expected a multiple of {}", TensorMap::SHARED_ALIGN);
            return Err((FaultKind::Misaligned, message));
        }
        let segments = map.segments(coordinates, shared as u32);
        let mut chunks = Vec::with_capacity(segments.len());
        for segment in segments {
            let bytes = segment.bytes as usize;
            let to = self.locate(Space::Cluster, u64::from(segment.shared), bytes)?;
            let from = match segment.global {
                Some(address) => Some(self.locate(Space::Global, address, bytes)?),
                None => None,
            };
            chunks.push(CopyChunk { from, to, bytes, read: bytes });
        }
        self.faulting_lanes = self.mask;
        Ok(chunks)
    }

    /// Starts a copy into shared memory that completes on an mbarrier.
    fn start_load(
        &mut self,
        chunks: Vec<CopyChunk>,
        barrier: (usize, u32),
        lane: usize,
    ) -> Result<(), FaultCause> {
        let Some(found) = self.cluster.ctas[barrier.0].mbarriers.get(&barrier.1) else { return Ok(()) };
        let (phase, agent, init) = (found.phase, found.agent, found.init);
        let mine = self.mark(lane, 0);
        if init.thread == mine.thread && init.count == mine.count {
            self.faulting_lanes = 1 << lane;
            let message = format!(
                "the mbarrier at {}, initialised at {}, counts a copy without a fence.mbarrier_init or a barrier between",
                self.world.program.arrays.name(barrier.1 as usize),
                self.world.line(init.pc)
            );
            return Err((FaultKind::MissingProxyFence, message));
        }
        let mark = Mark { thread: agent, count: phase as u32 + 1, ..mine };
        let mut rank = self.rank;
        for &CopyChunk { from, to, bytes, .. } in &chunks {
            if let Some(from) = from {
                self.check_proxy(from, bytes, lane)?;
                self.record_access(false, MemoryRange { location: from, bytes }, lane, mark)?;
            }
            self.check_proxy(to, bytes, lane)?;
            self.record_access(true, MemoryRange { location: to, bytes }, lane, mark)?;
            if let MemoryLocation::Shared(owner, _) = to {
                rank = owner;
            }
        }
        if rank != barrier.0 {
            self.faulting_lanes = 1 << lane;
            let message =
                format!("a copy into CTA {rank} of the cluster with an mbarrier of CTA {}", barrier.0);
            return Err((FaultKind::BadArgument, message));
        }
        self.issue_copy(
            CopyKind::Load { barrier, phase },
            rank,
            CopyBatch { lanes: 1 << lane, batch: 0, chunks },
        );
        Ok(())
    }

    /// Checks that every writer of the bytes executed a proxy fence after the write.
    fn check_proxy(&mut self, location: MemoryLocation, bytes: usize, lane: usize) -> Result<(), FaultCause> {
        let me = (self.cluster.id, self.first() + lane as u32);
        let (clock, mine) = (self.warp.clocks.of(lane), self.warp.clocks.counts[lane]);
        let (agent, batch) = self.warp.clocks.copies_of(lane);
        let mut missing = None;
        let world = &*self.world;
        let (shadow, offset, global) = match location {
            MemoryLocation::Global(location) => (&world.shadows[location.allocation], location.offset, true),
            MemoryLocation::Shared(rank, offset) => (&self.cluster.ctas[rank].shared.shadow, offset, false),
        };
        shadow.writes(offset..offset + bytes, |mark| {
            let known = match (mark.cluster, mark.thread) == me {
                true => mine,
                false if (mark.cluster, mark.thread) == (me.0, agent) && batch > 0 => batch,
                false => clock.get(mark.cluster, mark.thread as usize),
            };
            // an unordered write is a race and is reported as one
            if known > mark.count && !world.fenced(mark, known, global)
                || known == mark.count && (mark.cluster, mark.thread) == me
            {
                missing = Some(*mark);
            }
        });
        match missing {
            None => Ok(()),
            Some(mark) => {
                self.faulting_lanes = 1 << lane;
                Err(unfenced(&self.world.name(location), &self.world.line(mark.pc)))
            }
        }
    }
}

/// A shared address in the CTA of a rank.
pub(super) fn in_cta(address: u64, rank: u64) -> u64 {
    address & 0xff_ffff | (rank + 1) << 24
}

/// The fault of a missing proxy fence.
pub(super) fn unfenced(what: &str, line: &str) -> FaultCause {
    let message = format!(
        "an asynchronous operation meets what {line} wrote to {what}, without a fence.proxy.async by the writer after it"
    );
    (FaultKind::MissingProxyFence, message)
}
