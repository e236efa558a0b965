//! Loads, stores, atomics and prefetches of a warp's lanes.

use super::{
    exec::{Exec, Next},
    fault::{FaultKind, Trouble},
    lower::Range,
    traffic,
    world::Spot,
};
use crate::isa::{
    memory::{Access, AtomicOp, Element, Memory, Order, Scope, Space},
    pure::{Lanes, Pure},
};

/// How far a scope reaches, as [`Mark::strength`](super::shadow::Mark::strength).
pub(super) fn level(scope: Scope) -> u8 {
    match scope {
        Scope::Cta => 1,
        Scope::Cluster => 2,
        Scope::Gpu | Scope::Sys => 3,
    }
}

/// How an access is ordered: how far, and whether it acquires or releases.
fn order(access: Access) -> (u8, bool) {
    match access {
        Access::Weak | Access::ReadOnly | Access::Streaming => (0, false),
        Access::Relaxed(scope) => (level(scope), false),
        Access::Ordered(scope) => (level(scope), true),
        Access::Volatile => (3, false),
    }
}

impl Exec<'_, '_> {
    pub(super) fn memory(&mut self, op: Memory, results: Range, operands: Range) -> Result<Next, Trouble> {
        match op {
            Memory::Load(space, element, count, access) => {
                self.load(space, (element, count), access, (results, operands))?;
            }
            Memory::Store(space, element, count, access) => {
                self.store(space, (element, count), access, operands)?;
            }
            Memory::Atomic(space, op, order, scope) => {
                let old = self.atomic(space, op, (order, scope), operands)?;
                self.write(self.result(results), &old)?;
            }
            Memory::Reduce(space, op, order, scope) => {
                self.atomic(space, op, (order, scope), operands)?;
            }
            // a hint: an address where nothing is does no harm
            Memory::Prefetch => {}
            Memory::PrefetchTensorMap => {
                let addresses = self.addresses(operands, 0, true);
                for lane in self.active() {
                    self.tensor_map(addresses[lane])?;
                }
            }
        }
        Ok(Next::Advance)
    }

    /// Where a lane's access is: aligned, inside, and no mbarrier.
    pub(super) fn spot(
        &mut self,
        space: Space,
        address: u64,
        bytes: usize,
        lane: usize,
    ) -> Result<Spot, Trouble> {
        self.culprit = 1 << lane;
        if !address.is_multiple_of(bytes as u64) {
            let message = format!("{bytes} bytes at {address:#x}: expected a multiple of {bytes}");
            return Err((FaultKind::Misaligned, message));
        }
        let spot = self.place(space, address, bytes)?;
        self.culprit = self.mask;
        Ok(spot)
    }

    /// Where bytes are, whatever their alignment.
    pub(super) fn place(&self, space: Space, address: u64, bytes: usize) -> Result<Spot, Trouble> {
        let spot = match space {
            Space::Global => return Ok(Spot::Global(self.world.memory.place(address, bytes)?)),
            Space::Shared => self.cluster.shared_spot(self.rank, address as u32, bytes, false)?,
            Space::Cluster => self.cluster.shared_spot(self.rank, address as u32, bytes, true)?,
        };
        if let Spot::Shared(rank, offset) = spot
            && self.cluster.ctas[rank].shared.is_barrier(offset, bytes)
        {
            let message = format!("an ordinary access to the mbarrier in {}", self.world.name(spot));
            return Err((FaultKind::NotAnMbarrier, message));
        }
        Ok(spot)
    }

    pub(super) fn bytes(&self, spot: Spot, bytes: usize) -> Result<&[u8], Trouble> {
        match spot {
            Spot::Global(place) => self.world.memory.read_bytes(place, bytes),
            Spot::Shared(rank, offset) => self.cluster.ctas[rank].shared.read(offset, bytes),
        }
    }

    /// Writes bytes; what changes may be what another thread waits for.
    pub(super) fn put(&mut self, spot: Spot, bytes: &[u8]) {
        let same = match spot {
            Spot::Global(place) => self.world.memory.read_bytes(place, bytes.len()),
            Spot::Shared(rank, offset) => self.cluster.ctas[rank].shared.read(offset, bytes.len()),
        };
        self.world.progress += u64::from(same != Ok(bytes));
        match spot {
            Spot::Global(place) => self.world.memory.write_bytes(place, bytes),
            Spot::Shared(rank, offset) => self.cluster.ctas[rank].shared.write(offset, bytes),
        }
    }

    /// Counts conflicts of banks, or sectors.
    fn count(&mut self, space: Space, addresses: &Lanes, bytes: usize) {
        let report = &mut self.world.report;
        if space == Space::Global {
            let (sectors, ideal) = traffic::sectors(addresses, self.mask, bytes);
            report.global_sectors += sectors;
            report.global_sectors_ideal += ideal;
        } else {
            report.bank_conflicts += traffic::conflicts(addresses, self.mask, bytes);
        }
    }

    fn load(
        &mut self,
        space: Space,
        (element, count): (Element, usize),
        access: Access,
        (results, operands): (Range, Range),
    ) -> Result<(), Trouble> {
        let addresses = self.addresses(operands, 0, space == Space::Global);
        let (wide, bytes) = (element.bytes(), element.bytes() * count);
        let (strength, ordered) = order(access);
        self.count(space, &addresses, bytes);
        let mut out: [Lanes; 4] = [[0; 32]; 4];
        for lane in self.active() {
            let spot = self.spot(space, addresses[lane], bytes, lane)?;
            self.note(false, (spot, bytes), lane, self.mark(lane, strength))?;
            if strength > 0 {
                self.observe(spot, lane, strength, ordered);
            }
            if access == Access::ReadOnly {
                self.check_untouched(spot, bytes, lane)?;
            }
            let found = match self.bytes(spot, bytes) {
                Ok(found) => found,
                Err(trouble) => {
                    self.culprit = 1 << lane;
                    return Err(trouble);
                }
            };
            for (at, out) in out[..count].iter_mut().enumerate() {
                let mut word = [0; 8];
                word[..wide].copy_from_slice(&found[at * wide..(at + 1) * wide]);
                let bits = u64::from_le_bytes(word);
                let signed = || u64::from(i32::from(bits as u8 as i8).cast_unsigned());
                out[lane] = if element == Element::S8 { signed() } else { bits };
            }
        }
        for (at, out) in out[..count].iter().enumerate() {
            self.write(self.world.program.regs(results)[at], out)?;
        }
        Ok(())
    }

    /// What is loaded as read-only must not be written by the same launch, in whatever order.
    fn check_untouched(&mut self, spot: Spot, bytes: usize, lane: usize) -> Result<(), Trouble> {
        let Spot::Global(place) = spot else { return Ok(()) };
        let mut writer = None;
        self.world.shadows[place.allocation].writes((place.offset, bytes), |mark| {
            writer = (mark.count > 0).then_some(mark.pc).or(writer);
        });
        writer.map_or(Ok(()), |pc| {
            self.culprit = 1 << lane;
            let line = self.world.line(pc);
            let message = format!(
                "{} is loaded as read-only, but {line} wrote it in this launch",
                self.world.name(spot)
            );
            Err((FaultKind::Race, message))
        })
    }

    fn store(
        &mut self,
        space: Space,
        (element, count): (Element, usize),
        access: Access,
        operands: Range,
    ) -> Result<(), Trouble> {
        let addresses = self.addresses(operands, 0, space == Space::Global);
        let (wide, bytes) = (element.bytes(), element.bytes() * count);
        let (strength, ordered) = order(access);
        self.count(space, &addresses, bytes);
        for lane in self.active() {
            let spot = self.spot(space, addresses[lane], bytes, lane)?;
            self.note(true, (spot, bytes), lane, self.mark(lane, strength))?;
            if strength > 0 {
                self.announce(spot, lane, (strength, ordered), false);
            }
            let mut found = [0; 32];
            for at in 0..count {
                let word = self.operand(operands, 2 + at)[lane].to_le_bytes();
                found[at * wide..(at + 1) * wide].copy_from_slice(&word[..wide]);
            }
            self.put(spot, &found[..bytes]);
        }
        Ok(())
    }

    /// Lanes go one after the other, in an order of the seed's.
    fn atomic(
        &mut self,
        space: Space,
        op: AtomicOp,
        (order, scope): (Order, Scope),
        operands: Range,
    ) -> Result<Lanes, Trouble> {
        let addresses = self.addresses(operands, 0, space == Space::Global);
        let bytes = op.class().bytes();
        let strength = level(scope);
        let (acquires, releases) = (
            matches!(order, Order::Acquire | Order::AcqRel),
            matches!(order, Order::Release | Order::AcqRel),
        );
        let (start, step) = (self.world.rng.below(32), 2 * self.world.rng.below(16) + 1);
        let mut out = [0; 32];
        for lane in (0..32).map(|at| (start + at * step) % 32) {
            if self.mask >> lane & 1 == 0 {
                continue;
            }
            let spot = self.spot(space, addresses[lane], bytes, lane)?;
            self.note(true, (spot, bytes), lane, self.mark(lane, strength))?;
            self.observe(spot, lane, strength, acquires);
            self.announce(spot, lane, (strength, releases), true);
            let mut word = [0; 8];
            word[..bytes].copy_from_slice(self.bytes(spot, bytes)?);
            let old = u64::from_le_bytes(word);
            let b = self.operand(operands, 2)[lane];
            let c = match op {
                AtomicOp::Cas | AtomicOp::CasU64 => self.operand(operands, 3)[lane],
                _ => 0,
            };
            let new = changed(op, old, b, c);
            self.put(spot, &new.to_le_bytes()[..bytes]);
            out[lane] = old;
        }
        Ok(out)
    }
}

/// What an atomic leaves in memory.
pub(super) fn changed(op: AtomicOp, a: u64, b: u64, c: u64) -> u64 {
    let pure = |op: Pure| op.eval([&[a; 32], &[b; 32], &[0; 32], &[0; 32]])[0];
    match op {
        AtomicOp::AddU32 => pure(Pure::AddU32),
        AtomicOp::AddU64 => pure(Pure::AddU64),
        AtomicOp::AddF32 => pure(Pure::AddF32),
        AtomicOp::AddF16x2 => pure(Pure::AddF16x2),
        AtomicOp::AddBf16x2 => pure(Pure::AddBf16x2),
        AtomicOp::MinU32 => pure(Pure::MinU32),
        AtomicOp::MaxU32 => pure(Pure::MaxU32),
        AtomicOp::MinS32 => pure(Pure::MinI32),
        AtomicOp::MaxS32 => pure(Pure::MaxI32),
        AtomicOp::MaxU64 => pure(Pure::MaxU64),
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
        AtomicOp::Cas | AtomicOp::CasU64 => {
            if a == b {
                c
            } else {
                a
            }
        }
    }
}
