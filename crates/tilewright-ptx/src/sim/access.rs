//! Loads, stores, atomics and prefetches of a warp's lanes.

use super::{Exec, FaultCause, FaultKind, MemoryLocation, MemoryRange, Next, Range, traffic};
use crate::isa::{Access, AtomicOp, Element, Lanes, MemoryOp, Order, PureOp, Scope, Space};

/// The level of a scope, as in [`Mark::strength`](super::shadow::Mark::strength).
pub(super) fn scope_level(scope: Scope) -> u8 {
    match scope {
        Scope::Cta => 1,
        Scope::Cluster => 2,
        Scope::Gpu | Scope::Sys => 3,
    }
}

/// The elements that each lane loads or stores.
#[derive(Clone, Copy)]
struct ElementVector {
    space: Space,
    element: Element,
    count: usize,
    access: Access,
}

/// The scope level of an access, 0 if it is weak, and whether it acquires and releases.
#[derive(Clone, Copy)]
pub(super) struct Ordering {
    pub(super) level: u8,
    pub(super) acquires: bool,
    pub(super) releases: bool,
}

impl Ordering {
    /// Of a load or a store.
    fn new(access: Access) -> Self {
        let (level, ordered) = match access {
            Access::Weak | Access::ReadOnly | Access::Streaming => (0, false),
            Access::Relaxed(scope) => (scope_level(scope), false),
            Access::Ordered(scope) => (scope_level(scope), true),
        };
        Self { level, acquires: ordered, releases: ordered }
    }

    fn of_atomic(order: Order, scope: Scope) -> Self {
        let acquires = matches!(order, Order::Acquire | Order::AcqRel);
        let releases = matches!(order, Order::Release | Order::AcqRel);
        Self { level: scope_level(scope), acquires, releases }
    }
}

impl Exec<'_, '_> {
    pub(super) fn memory(
        &mut self,
        op: MemoryOp,
        results: Range,
        operands: Range,
    ) -> Result<Next, FaultCause> {
        match op {
            MemoryOp::Load(space, element, count, access) => {
                self.load(ElementVector { space, element, count, access }, results, operands)?;
            }
            MemoryOp::Store(space, element, count, access) => {
                self.store(ElementVector { space, element, count, access }, operands)?;
            }
            MemoryOp::Atomic(space, op, order, scope) => {
                let old = self.atomic(space, op, Ordering::of_atomic(order, scope), operands)?;
                self.write(self.result(results), &old)?;
            }
            MemoryOp::Reduce(space, op, order, scope) => {
                self.atomic(space, op, Ordering::of_atomic(order, scope), operands)?;
            }
            // caches are not simulated
            MemoryOp::CachePolicy(_) => self.write(self.result(results), &[0; 32])?,
            // a hint: unmapped addresses are allowed
            MemoryOp::Prefetch => {}
            MemoryOp::PrefetchTensorMap => {
                let addresses = self.addresses(operands, 0, true);
                for lane in self.active() {
                    self.tensor_map(addresses[lane])?;
                }
            }
        }
        Ok(Next::Advance)
    }

    /// Resolves a lane's address and checks alignment, bounds, and that it is not an mbarrier.
    #[inline(always)] // one call per lane
    pub(super) fn locate_aligned(
        &mut self,
        space: Space,
        address: u64,
        bytes: usize,
        lane: usize,
    ) -> Result<MemoryLocation, FaultCause> {
        self.faulting_lanes = 1 << lane;
        // `bytes` is a power of two, and a division per lane is slow
        if address & (bytes as u64 - 1) != 0 {
            let message = format!("{bytes} bytes at {address:#x}: expected a multiple of {bytes}");
            return Err((FaultKind::Misaligned, message));
        }
        let location = self.locate(space, address, bytes)?;
        self.faulting_lanes = self.mask;
        Ok(location)
    }

    /// Resolves an address of any alignment.
    #[inline(always)]
    pub(super) fn locate(
        &self,
        space: Space,
        address: u64,
        bytes: usize,
    ) -> Result<MemoryLocation, FaultCause> {
        let location = match space {
            Space::Global => return Ok(MemoryLocation::Global(self.world.memory.locate(address, bytes)?)),
            Space::Shared => self.cluster.locate_shared(self.rank, address as u32, bytes, false)?,
            Space::Cluster => self.cluster.locate_shared(self.rank, address as u32, bytes, true)?,
        };
        if let MemoryLocation::Shared(rank, offset) = location
            && self.cluster.ctas[rank].shared.is_barrier(offset, bytes)
        {
            return Err(self.not_an_mbarrier(location));
        }
        Ok(location)
    }

    #[cold]
    fn not_an_mbarrier(&self, location: MemoryLocation) -> FaultCause {
        let message = format!("an ordinary access to the mbarrier in {}", self.world.name(location));
        (FaultKind::NotAnMbarrier, message)
    }

    pub(super) fn read_bytes(&self, location: MemoryLocation, bytes: usize) -> Result<&[u8], FaultCause> {
        match location {
            MemoryLocation::Global(location) => self.world.memory.read_bytes(location, bytes),
            MemoryLocation::Shared(rank, offset) => self.cluster.ctas[rank].shared.read(offset, bytes),
        }
    }

    /// Writes bytes. A changed value counts as progress, because another thread may poll it.
    pub(super) fn write_bytes(&mut self, location: MemoryLocation, bytes: &[u8]) {
        let changed = match location {
            MemoryLocation::Global(location) => self.world.memory.write_bytes(location, bytes),
            MemoryLocation::Shared(rank, offset) => self.cluster.ctas[rank].shared.write(offset, bytes),
        };
        self.world.progress += u64::from(changed);
    }

    /// Counts bank conflicts or global sectors.
    fn count_traffic(&mut self, space: Space, addresses: &Lanes, bytes: usize) {
        let report = &mut self.world.report;
        if space == Space::Global {
            let (sectors, ideal) = traffic::sectors(addresses, self.mask, bytes);
            report.global_sectors += sectors;
            report.global_sectors_ideal += ideal;
        } else {
            report.bank_conflicts += traffic::bank_conflicts(addresses, self.mask, bytes);
        }
    }

    fn load(&mut self, vector: ElementVector, results: Range, operands: Range) -> Result<(), FaultCause> {
        let ElementVector { space, element, count, access } = vector;
        let addresses = self.addresses(operands, 0, space == Space::Global);
        let (wide, bytes) = (element.bytes(), element.bytes() * count);
        let ordering = Ordering::new(access);
        self.count_traffic(space, &addresses, bytes);
        let mut out: [Lanes; 4] = [[0; 32]; 4];
        let shares = ordering.level == 0 && self.lanes_agree();
        let mut end = 0;
        for lane in self.active() {
            if lane < end {
                continue;
            }
            end = if shares { end_of_equal(&addresses, self.mask, lane) } else { lane + 1 };
            let location = self.locate_aligned(space, addresses[lane], bytes, lane)?;
            if end == lane + 1 || self.record_shared_read(location, bytes, lane..end).is_err() {
                for lane in lane..end {
                    let mark = self.mark(lane, ordering.level);
                    self.record_access(false, MemoryRange { location, bytes }, lane, mark)?;
                }
            }
            if ordering.level > 0 {
                self.acquire_word(location, lane, ordering);
            }
            if access == Access::ReadOnly {
                self.check_read_only(location, bytes, lane)?;
            }
            let found = match self.read_bytes(location, bytes) {
                Ok(found) => found,
                Err(cause) => {
                    self.faulting_lanes = 1 << lane;
                    return Err(cause);
                }
            };
            for (at, out) in out[..count].iter_mut().enumerate() {
                let word = word(&found[at * wide..(at + 1) * wide]);
                out[lane..end].fill(word);
            }
        }
        for (at, out) in out[..count].iter().enumerate() {
            self.write(self.world.program.regs(results)[at], out)?;
        }
        Ok(())
    }

    /// Checks that no thread of the launch wrote memory that is loaded as read-only.
    fn check_read_only(
        &mut self,
        location: MemoryLocation,
        bytes: usize,
        lane: usize,
    ) -> Result<(), FaultCause> {
        let MemoryLocation::Global(global) = location else { return Ok(()) };
        let mut writer = None;
        self.world.shadows[global.allocation].writes(global.offset..global.offset + bytes, |mark| {
            writer = (mark.count > 0).then_some(mark.pc).or(writer);
        });
        writer.map_or(Ok(()), |pc| {
            self.faulting_lanes = 1 << lane;
            let line = self.world.line(pc);
            let message = format!(
                "{} is loaded as read-only, but {line} wrote it in this launch",
                self.world.name(location)
            );
            Err((FaultKind::Race, message))
        })
    }

    fn store(&mut self, vector: ElementVector, operands: Range) -> Result<(), FaultCause> {
        let ElementVector { space, element, count, access } = vector;
        let addresses = self.addresses(operands, 0, space == Space::Global);
        let (wide, bytes) = (element.bytes(), element.bytes() * count);
        let ordering = Ordering::new(access);
        self.count_traffic(space, &addresses, bytes);
        for lane in self.active() {
            let location = self.locate_aligned(space, addresses[lane], bytes, lane)?;
            self.record_access(true, MemoryRange { location, bytes }, lane, self.mark(lane, ordering.level))?;
            if ordering.level > 0 {
                self.release_word(location, lane, ordering, false);
            }
            let mut found = [0; 32];
            for at in 0..count {
                put_word(&mut found[at * wide..(at + 1) * wide], self.operand(operands, 2 + at)[lane]);
            }
            self.write_bytes(location, &found[..bytes]);
        }
        Ok(())
    }

    /// Executes an atomic per lane, in an order that depends on the seed.
    fn atomic(
        &mut self,
        space: Space,
        op: AtomicOp,
        ordering: Ordering,
        operands: Range,
    ) -> Result<Lanes, FaultCause> {
        let addresses = self.addresses(operands, 0, space == Space::Global);
        let bytes = op.class().bytes();
        let (start, step) = (self.world.rng.below(32), 2 * self.world.rng.below(16) + 1);
        let mut out = [0; 32];
        for lane in (0..32).map(|at| (start + at * step) % 32) {
            if self.mask >> lane & 1 == 0 {
                continue;
            }
            let location = self.locate_aligned(space, addresses[lane], bytes, lane)?;
            self.record_access(true, MemoryRange { location, bytes }, lane, self.mark(lane, ordering.level))?;
            self.acquire_word(location, lane, ordering);
            self.release_word(location, lane, ordering, true);
            let mut word = [0; 8];
            word[..bytes].copy_from_slice(self.read_bytes(location, bytes)?);
            let old = u64::from_le_bytes(word);
            let b = self.operand(operands, 2)[lane];
            let new = apply_atomic(op, old, b);
            self.write_bytes(location, &new.to_le_bytes()[..bytes]);
            out[lane] = old;
        }
        Ok(out)
    }
}

/// The end of the adjacent lanes of `mask` with the address of lane `first`.
fn end_of_equal(addresses: &Lanes, mask: u32, first: usize) -> usize {
    let differs = |&lane: &usize| mask >> lane & 1 == 0 || addresses[lane] != addresses[first];
    (first + 1..32).find(differs).unwrap_or(32)
}

/// The integer of 1, 2, 4 or 8 bytes. Constant sizes avoid a call of `memcpy` per lane.
#[inline]
fn word(bytes: &[u8]) -> u64 {
    match *bytes {
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).into(),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    }
}

/// The inverse of [`word`].
#[inline]
fn put_word(into: &mut [u8], word: u64) {
    match into.len() {
        4 => into.copy_from_slice(&(word as u32).to_le_bytes()),
        8 => into.copy_from_slice(&word.to_le_bytes()),
        bytes => into.copy_from_slice(&word.to_le_bytes()[..bytes]),
    }
}

/// The new value of an atomic.
fn apply_atomic(op: AtomicOp, a: u64, b: u64) -> u64 {
    let pure = |op: PureOp| op.eval([&[a; 32], &[b; 32], &[0; 32], &[0; 32]])[0];
    match op {
        AtomicOp::AddU32 => pure(PureOp::AddU32),
        AtomicOp::AddU64 => pure(PureOp::AddU64),
        AtomicOp::MinU32 => pure(PureOp::MinU32),
        AtomicOp::MaxU32 => pure(PureOp::MaxU32),
        AtomicOp::MinS32 => pure(PureOp::MinI32),
        AtomicOp::MaxS32 => pure(PureOp::MaxI32),
        AtomicOp::And => a & b,
        AtomicOp::Or => a | b,
        AtomicOp::Xor => a ^ b,
        AtomicOp::Inc => {
            if a >= b {
                0
            } else {
                a + 1
            }
        }
        AtomicOp::Exch => b,
    }
}
