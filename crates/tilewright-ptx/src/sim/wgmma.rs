//! `wgmma`: asynchronous MMA of a warpgroup.
//!
//! 1. A `wgmma` is issued when all four warps have arrived at it.
//! 2. Until a `wgmma.wait_group` covers it, accumulators may not be read or written. Its A registers and its shared memory may
//!    not be written.
//! 3. One warp's wait covers the shared memory, because all four warps share the operation.
//! 4. All four warps execute the same `wgmma.wait_group`.

use super::{
    Actor, Agent, Clock, Cluster, Cta, Descriptor, Exec, FULL, Fault, FaultCause, FaultKind, Mark,
    MemoryLocation, Next, Range, Row, SHARED_BASE, Wait, Warp, World, bulk::unfenced, matrix,
};
use crate::isa::{Elements, Lanes, Left, Major, MatrixOp};
use std::collections::VecDeque;

/// The state of a warpgroup (four warps).
#[derive(Debug, Default)]
pub(super) struct Warpgroup {
    /// The arrivals of warps at the next `wgmma`.
    arrived: [Option<Arrival>; 4],
    /// The number of issued `wgmma`.
    issued: u32,
    pub(super) pending: VecDeque<PendingWgmma>,
    /// The last `wgmma` that a warp waits for.
    pub(super) drain_until: u32,
    /// The instruction of each wait, in order, as the first warp at it had it.
    waits: Vec<u32>,
}

/// The operands of a warp at a `wgmma`; all four warps must agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Arrival {
    pc: u32,
    a: Option<u64>,
    b: u64,
    accumulate: bool,
}

#[derive(Debug, Clone)]
enum Source {
    Shared(Descriptor, Major),
    Registers([u32; 4]),
}

/// An issued `wgmma` that is not computed yet.
#[derive(Debug, Clone)]
pub(super) struct PendingWgmma {
    number: u32,
    elements: Elements,
    n: usize,
    a: Source,
    b: (Descriptor, Major),
    accumulate: bool,
    sums: Vec<u32>,
    pc: u32,
}

impl Exec<'_, '_> {
    /// Checks that no `wgmma` in flight uses a register.
    pub(super) fn check_in_flight(&self, reg: u32, what: &str) -> Result<(), FaultCause> {
        self.check_sums(reg, what)?;
        let wgmma = &self.warp.wgmma;
        if wgmma.inputs.get(reg as usize).is_none_or(|&input| input <= wgmma.waited) {
            return Ok(());
        }
        Err(self.in_flight(reg, what, "reads"))
    }

    /// Checks that a register is not an accumulator of a `wgmma` in flight.
    fn check_sums(&self, reg: u32, what: &str) -> Result<(), FaultCause> {
        let wgmma = &self.warp.wgmma;
        if wgmma.sums.get(reg as usize).is_none_or(|&sum| sum <= wgmma.waited) {
            return Ok(());
        }
        Err(self.in_flight(reg, what, "adds to"))
    }

    fn in_flight(&self, reg: u32, what: &str, does: &str) -> FaultCause {
        let message = format!(
            "register {} is {what} while a wgmma {does} it: expected a wgmma.wait_group that covers it",
            self.name(reg)
        );
        (FaultKind::InFlight, message)
    }

    /// Checks that a register may be written, and records the write.
    pub(super) fn check_write(&mut self, reg: u32) -> Result<(), FaultCause> {
        self.check_in_flight(reg, "written")?;
        self.warp.wgmma.written[reg as usize] = self.warp.wgmma.fences + 1;
        Ok(())
    }

    /// Arrives at a `wgmma`; the last of the four warps issues it.
    pub(super) fn wgmma(
        &mut self,
        op: MatrixOp,
        results: Range,
        operands: Range,
    ) -> Result<Next, FaultCause> {
        let MatrixOp::Wgmma { n, elements, left, right } = op else {
            return Ok(Next::Advance);
        };
        let arrival = self.arrival(left, results, operands)?;
        let (group, position) = (self.warp.index as usize / 4, self.warp.index as usize % 4);
        let warpgroup = &mut self.cluster.ctas[self.rank].warpgroups[group];
        warpgroup.arrived[position] = Some(arrival);
        if let Some(other) = warpgroup.arrived.iter().flatten().find(|other| **other != arrival) {
            let line = self.world.line(other.pc);
            let message = format!(
                "the warps of a warpgroup are at different wgmma, or bring other operands: {arrival:x?}, but {other:x?} at {line}"
            );
            return Err((FaultKind::Divergence, message));
        }
        if warpgroup.arrived.iter().any(Option::is_none) {
            return Ok(Next::WaitThenRetry(Wait::Warpgroup));
        }
        warpgroup.arrived = [None; 4];
        warpgroup.issued += 1;
        let number = warpgroup.issued;
        let decode = |bits| Descriptor::decode(bits).map_err(|why| (FaultKind::BadArgument, why));
        let inputs = self.world.program.regs(operands);
        let a = match (left, arrival.a) {
            (Left::Shared(major), Some(bits)) => Source::Shared(decode(bits)?, major),
            _ => Source::Registers([inputs[0], inputs[1], inputs[2], inputs[3]]),
        };
        let wgmma = PendingWgmma {
            number,
            elements,
            n,
            a,
            b: (decode(arrival.b)?, right),
            accumulate: arrival.accumulate,
            sums: self.world.program.regs(results).to_vec(),
            pc: self.pc,
        };
        self.mark_reads(&wgmma, group)?;
        self.world.report.matrix_instructions += 4;
        self.world.progress += 1;
        wgmma.issue(self.warp);
        for at in (0..4).filter(|&at| at != position) {
            let warp = &mut self.cluster.ctas[self.rank].warps[4 * group + at];
            wgmma.issue(warp);
            for waiting in &mut warp.groups {
                (waiting.pc, waiting.wait) = (waiting.pc + 1, Wait::None);
            }
            warp.awake = true;
        }
        self.cluster.ctas[self.rank].warpgroups[group].pending.push_back(wgmma);
        Ok(Next::Advance)
    }

    /// Checks this warp's registers and returns its operands.
    fn arrival(&mut self, left: Left, results: Range, operands: Range) -> Result<Arrival, FaultCause> {
        let (threads, group) = (self.world.program.threads, self.warp.index / 4);
        if 128 * (group + 1) > threads {
            let message = format!("wgmma by warpgroup {group} of {threads} threads: expected 128 threads");
            return Err((FaultKind::BadArgument, message));
        }
        let inputs = if left == Left::Registers { 4 } else { 0 };
        let b_at = inputs.max(1);
        for &reg in self.world.program.regs(operands) {
            if self.warp.ready[reg as usize] != FULL {
                let message = format!("register {} was never written", self.name(reg));
                return Err((FaultKind::Uninitialized, message));
            }
            self.check_sums(reg, "read")?;
        }
        let a = if inputs == 0 { Some(self.uniform(operands, 0, "the descriptor of A")?) } else { None };
        let b = self.uniform(operands, b_at, "the descriptor of B")?;
        let accumulate = self.uniform(operands, b_at + 1, "whether to add")? & 1 != 0;
        let sums = self.world.program.regs(results);
        let registers = sums.iter().chain(&self.world.program.regs(operands)[..inputs]);
        let wgmma = &self.warp.wgmma;
        if wgmma.fences == 0 {
            return Err((
                FaultKind::MissingWgmmaFence,
                "the first wgmma of a warp comes before any wgmma.fence".to_owned(),
            ));
        }
        for &reg in registers {
            if wgmma.written.get(reg as usize).is_some_and(|&written| written > wgmma.fences) {
                let message = format!("register {} was written after the last wgmma.fence", self.name(reg));
                return Err((FaultKind::MissingWgmmaFence, message));
            }
        }
        if let Some(&reg) = sums.iter().find(|&&reg| accumulate && self.warp.ready[reg as usize] != FULL) {
            return Err((
                FaultKind::Uninitialized,
                format!("wgmma adds to {}, which was never written", self.name(reg)),
            ));
        }
        Ok(Arrival { pc: self.pc, a, b, accumulate })
    }

    /// Marks the shared memory that a `wgmma` reads. Its writes must happen before all threads of the warpgroup.
    fn mark_reads(&mut self, wgmma: &PendingWgmma, group: usize) -> Result<(), FaultCause> {
        let thread = self.cluster.agent(Agent::Warpgroup(self.rank, group as u32));
        let mut clock = Clock::clone(&self.warp.clocks.parts[0].1);
        let others = (0..4).map(|at| 4 * group + at).filter(|&at| at != self.warp.index as usize);
        let warps = others.map(|at| &self.cluster.ctas[self.rank].warps[at]).chain([&*self.warp]);
        for (_, part) in warps.flat_map(|warp| &warp.clocks.parts) {
            clock.meet(part);
        }
        let (cluster, rank, pc) = (self.cluster.id, self.rank, self.pc);
        let mark = Mark { cluster, thread, count: wgmma.number, pc, strength: 0 };
        let lanes = 1 << (thread & 31);
        let (clock, id, shape) = (&clock, (cluster, thread), self.world.program.shape());
        let actor = Actor { clock, id, copies: (0, 0), lanes, mark, writes: false, shape };
        let (world, cta) = (&*self.world, &mut self.cluster.ctas[rank]);
        let size = cta.shared.bytes.len();
        wgmma.each_address(|address| {
            let offset = address.wrapping_sub(SHARED_BASE) as usize;
            if address < SHARED_BASE || offset + 16 > size {
                let message = format!(
                    "a matrix descriptor leads to {address:#x}: byte {offset} of {size} of shared memory"
                );
                return Err((FaultKind::OutOfBounds, message));
            }
            let shadow = &mut cta.shared.shadow;
            let location = MemoryLocation::Shared(rank, offset);
            shadow
                .record(offset..offset + 16, &actor)
                .map_err(|conflict| world.conflict(conflict, false, location))?;
            let mut missing = None;
            shadow.writes(offset..offset + 16, |mark| {
                let known = actor.clock.get(mark.cluster, mark.thread as usize);
                if known > mark.count && !world.fenced(mark, known, false) {
                    missing = Some(*mark);
                }
            });
            missing.map_or(Ok(()), |mark| Err(unfenced(&world.name(location), &world.line(mark.pc))))
        })
    }

    /// Checks that the other warps of the warpgroup wait at the same instruction.
    fn check_wait_place(&mut self) -> Result<(), FaultCause> {
        let (group, number) = (self.warp.index as usize / 4, self.warp.wgmma.waits);
        let Some(warpgroup) = self.cluster.ctas[self.rank].warpgroups.get_mut(group) else { return Ok(()) };
        match warpgroup.waits.get(number) {
            None => warpgroup.waits.push(self.pc),
            Some(&pc) if pc != self.pc => {
                let line = self.world.line(pc);
                let message = format!(
                    "wait {number} of this warp, but another warp of the warpgroup waits at {line}: expected one place"
                );
                return Err((FaultKind::Divergence, message));
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// `wgmma.wait_group`
    pub(super) fn wait_wgmma(&mut self, left: usize) -> Result<Next, FaultCause> {
        self.check_wait_place()?;
        let commits = &self.warp.wgmma.commits;
        let Some(last) = commits.len().checked_sub(left + 1) else {
            self.warp.wgmma.waits += 1;
            return Ok(Next::Advance);
        };
        let bound = commits[last];
        let group = self.warp.index / 4;
        if let Some(warpgroup) = self.cluster.ctas[self.rank].warpgroups.get_mut(group as usize)
            && warpgroup.pending.iter().any(|wgmma| wgmma.number <= bound)
        {
            warpgroup.drain_until = warpgroup.drain_until.max(bound);
            return Ok(Next::Yield);
        }
        self.warp.wgmma.waits += 1;
        self.warp.wgmma.commits.drain(..=last);
        self.warp.wgmma.waited = self.warp.wgmma.waited.max(bound);
        let thread = self.cluster.agent(Agent::Warpgroup(self.rank, group)) as usize;
        let cluster = self.cluster.id;
        self.warp.clocks.change(FULL, |clock| clock.raise(cluster, thread, bound + 1));
        Ok(Next::Advance)
    }
}

impl PendingWgmma {
    /// Updates the register state of a warp.
    fn issue(&self, warp: &mut Warp) {
        warp.wgmma.issued = self.number;
        for &reg in &self.sums {
            warp.wgmma.sums[reg as usize] = self.number;
            warp.ready[reg as usize] = FULL;
        }
        if let Source::Registers(inputs) = &self.a {
            for &reg in inputs {
                if let Some(input) = warp.wgmma.inputs.get_mut(reg as usize) {
                    *input = self.number;
                }
            }
        }
    }

    /// Calls `each` with all shared addresses that it reads, 16 bytes each.
    fn each_address(&self, mut each: impl FnMut(u32) -> Result<(), FaultCause>) -> Result<(), FaultCause> {
        let mut gather = |descriptor: &Descriptor, major, rows| {
            descriptor.gather(major, rows, |address| each(address).map(|()| [0; 16])).map(|_| ())
        };
        if let Source::Shared(descriptor, major) = &self.a {
            gather(descriptor, *major, 64)?;
        }
        gather(&self.b.0, self.b.1, self.n)
    }

    fn compute(&self, cta: &mut Cta, group: usize) -> Result<(), FaultCause> {
        let shared = &cta.shared;
        let read = |address: u32| {
            let mut bytes = [0; 16];
            bytes.copy_from_slice(shared.read((address - SHARED_BASE) as usize, 16)?);
            Ok(bytes)
        };
        let b = self.b.0.gather(self.b.1, self.n, read)?;
        let a: Vec<Row> = match &self.a {
            Source::Shared(descriptor, major) => descriptor.gather(*major, 64, read)?,
            Source::Registers(inputs) => cta.warps[4 * group..4 * group + 4]
                .iter()
                .flat_map(|warp| matrix::rows_of(&inputs.map(|reg| warp.regs[reg as usize])))
                .collect(),
        };
        let take =
            |warp: &Warp| -> Vec<Lanes> { self.sums.iter().map(|&reg| warp.regs[reg as usize]).collect() };
        let mut sums: Vec<Vec<Lanes>> = cta.warps[4 * group..4 * group + 4].iter().map(take).collect();
        let [s0, s1, s2, s3] = &mut sums[..] else { return Ok(()) };
        matrix::wgmma(self.elements, &a, &b, [s0, s1, s2, s3], self.accumulate);
        for (warp, sums) in cta.warps[4 * group..].iter_mut().zip(&sums) {
            for (&reg, sum) in self.sums.iter().zip(sums) {
                warp.regs[reg as usize] = *sum;
            }
        }
        Ok(())
    }
}

/// Computes a pending `wgmma` up to number `bound`, chosen by the seed among those without earlier ones on the same
/// accumulators.
pub(super) fn compute(
    world: &mut World<'_>,
    cluster: &mut Cluster,
    rank: usize,
    group: usize,
    bound: u32,
) -> Result<(), Fault> {
    let cta = &mut cluster.ctas[rank];
    let pending = &cta.warpgroups[group].pending;
    let count = pending.iter().filter(|wgmma| wgmma.number <= bound).count();
    if count == 0 {
        return Ok(());
    }
    let chosen = world.rng.below(count);
    // accumulation into the same registers is in order
    let shares = |at: &usize| pending[*at].sums.iter().any(|reg| pending[chosen].sums.contains(reg));
    let first = (0..chosen).find(shares).unwrap_or(chosen);
    let Some(wgmma) = cta.warpgroups[group].pending.remove(first) else { return Ok(()) };
    world.progress += 1;
    wgmma.compute(cta, group).map_err(|(kind, message)| Fault {
        kind,
        message,
        at: world.program.at.get(wgmma.pc as usize).copied(),
        cta: cta.id,
        warp: 4 * group as u32,
        lanes: FULL,
    })
}
