//! Executes the steps of one warp, a slice at a time.

use super::{
    Actor, Clock, Cluster, Code, Conflict, Cta, FULL, Fault, FaultCause, FaultKind, Group, Mark,
    MemoryLocation, MemoryRange, Range, Wait, Warp, WarpClocks, World,
};
use crate::isa::{Op, matrix::MatrixOp, pure::Lanes};
use std::rc::Rc;

/// The execution context of a warp. The warp is moved out of its CTA so that the rest can be borrowed.
pub(super) struct Exec<'a, 'm> {
    pub(super) world: &'a mut World<'m>,
    pub(super) cluster: &'a mut Cluster,
    /// The rank of its CTA.
    pub(super) rank: usize,
    pub(super) warp: &'a mut Warp,
    /// The executing group of lanes.
    pub(super) group: usize,
    pub(super) pc: u32,
    pub(super) mask: u32,
    /// The lanes reported by a fault.
    pub(super) faulting_lanes: u32,
}

/// The control transfer after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Continue with the next step.
    Advance,
    /// Block, then continue with the next step.
    WaitThenAdvance(Wait),
    /// Block, then retry this step.
    WaitThenRetry(Wait),
    /// Retry this step in a later slice.
    Yield,
}

impl Exec<'_, '_> {
    /// Executes up to `budget` steps.
    pub(super) fn slice(&mut self, mut budget: u32) -> Result<(), Fault> {
        while budget > 0 {
            let Some(group) = self.warp.choose(&mut self.world.rng) else {
                self.warp.awake = false;
                return self.check_lanes();
            };
            self.group = group;
            // a converged warp runs until it blocks or exits; diverged groups interleave step by step
            let steps = if self.warp.groups.len() == 1 { budget } else { 1 };
            let (done, yielded) = self.steps(steps)?;
            budget -= done.min(budget);
            if yielded {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Executes up to `steps` steps of one group. Returns their number and whether the group yielded.
    fn steps(&mut self, steps: u32) -> Result<(u32, bool), Fault> {
        for done in 1..=steps {
            let group = self.warp.groups[self.group];
            (self.pc, self.mask, self.faulting_lanes) = (group.pc, group.mask, group.mask);
            if group.mask != FULL && self.world.program.aligned[group.pc as usize] {
                self.warp.groups[self.group].wait = Wait::Lanes;
                self.warp.merge();
                return Ok((done, false));
            }
            self.world.report.warp_instructions += 1;
            self.world.report.thread_instructions += u64::from(group.mask.count_ones());
            match self.step(group) {
                Err(cause) => return Err(self.fault(cause)),
                Ok(false) => {}
                Ok(true) => return Ok((done, !self.moved(group))),
            }
        }
        Ok((steps, false))
    }

    /// Returns whether the group differs from its state `before`.
    fn moved(&self, before: Group) -> bool {
        self.warp.groups.get(self.group).is_none_or(|now| *now != before)
    }

    /// Executes one step. Returns whether a group must be chosen again.
    fn step(&mut self, group: Group) -> Result<bool, FaultCause> {
        let next = match self.world.program.code[group.pc as usize] {
            Code::Pure(op, d, args, count) => {
                self.check_read(&args[..usize::from(count)])?;
                let regs = &self.warp.regs;
                let [a, b, c, e] = args.map(|at| &regs[at as usize]);
                let mut out = [0; 32];
                op.eval_into([a, b, c, e], &mut out);
                self.write(d, &out)?;
                Next::Advance
            }
            Code::Move(d, a) => {
                self.check_read(&[a])?;
                let out = self.warp.regs[a as usize];
                self.write(d, &out)?;
                Next::Advance
            }
            Code::Jump(to) => {
                self.warp.groups[self.group].pc = to;
                return Ok(self.merge_groups());
            }
            Code::Branch(p, when, to) => {
                self.check_read(&[p])?;
                return Ok(self.branch(p, when, to));
            }
            Code::Op(op, results, operands) => self.op(op, results, operands)?,
            Code::End => {
                self.warp.groups.swap_remove(self.group);
                self.world.progress += 1;
                if !self.warp.live() {
                    self.end_of_warp()?;
                }
                return Ok(true);
            }
        };
        if matches!(next, Next::WaitThenRetry(_) | Next::Yield) {
            // an instruction counts once, when it completes
            self.world.report.warp_instructions -= 1;
            self.world.report.thread_instructions -= u64::from(group.mask.count_ones());
        }
        let group = &mut self.warp.groups[self.group];
        match next {
            Next::Advance => {
                group.pc += 1;
                group.timed_out = false;
                Ok(self.merge_groups())
            }
            Next::WaitThenAdvance(wait) => {
                group.pc += 1;
                group.wait = wait;
                Ok(true)
            }
            Next::WaitThenRetry(wait) => {
                group.wait = wait;
                Ok(true)
            }
            Next::Yield => Ok(true),
        }
    }

    /// Merges groups at the same step. Returns whether groups may have changed.
    fn merge_groups(&mut self) -> bool {
        if self.warp.groups.len() == 1 {
            return false;
        }
        self.warp.merge();
        true
    }

    fn branch(&mut self, p: u32, when: bool, to: u32) -> bool {
        let lanes = &self.warp.regs[p as usize];
        let taken = (0..32).fold(0, |taken, lane| taken | u32::from((lanes[lane] & 1 != 0) == when) << lane)
            & self.mask;
        let group = &mut self.warp.groups[self.group];
        if taken == self.mask {
            group.pc = to;
            return self.merge_groups();
        }
        group.pc += 1;
        if taken == 0 {
            return self.merge_groups();
        }
        group.mask &= !taken;
        self.warp.groups.push(Group { pc: to, mask: taken, wait: Wait::None, timed_out: false });
        self.warp.merge();
        true
    }

    fn op(&mut self, op: Op, results: Range, operands: Range) -> Result<Next, FaultCause> {
        let wgmma = matches!(op, Op::Matrix(MatrixOp::Wgmma { .. }));
        if !wgmma {
            self.check_read(self.world.program.regs(operands))?;
        }
        match op {
            Op::Memory(op) => self.memory(op, results, operands),
            Op::Warp(op) => self.lanes(op, results, operands),
            Op::Sync(op) => self.sync(op, results, operands),
            Op::Copy(op) => self.copy(op, operands),
            Op::Matrix(op) => self.matrix(op, results, operands),
            Op::Pure(_) | Op::Move(_) | Op::Param(_) | Op::ParamAddress(_) | Op::SharedAddress(_) => {
                Err((FaultKind::BadArgument, format!("{op:?} is no step of its own")))
            }
        }
    }

    /// Checks that registers are initialized and not owned by a `wgmma` in flight.
    #[inline]
    pub(super) fn check_read(&self, regs: &[u32]) -> Result<(), FaultCause> {
        for &reg in regs {
            if self.warp.ready[reg as usize] & self.mask != self.mask {
                return Err((
                    FaultKind::Uninitialized,
                    format!("register {} was never written", self.name(reg)),
                ));
            }
            if self.warp.wgmma.issued != self.warp.wgmma.waited {
                self.check_in_flight(reg, "read")?;
            }
        }
        Ok(())
    }

    /// The register's name.
    pub(super) fn name(&self, reg: u32) -> &str {
        self.world.program.names.get(reg as usize).copied().unwrap_or("of a constant")
    }

    /// Writes a register in the active lanes.
    #[inline]
    pub(super) fn write(&mut self, reg: u32, value: &Lanes) -> Result<(), FaultCause> {
        let at = reg as usize;
        if self.world.program.wgmma {
            self.check_write(reg)?;
        }
        self.warp.ready[at] |= self.mask;
        let into = &mut self.warp.regs[at];
        if self.mask == FULL {
            *into = *value;
        } else {
            for lane in 0..32 {
                if self.mask >> lane & 1 != 0 {
                    into[lane] = value[lane];
                }
            }
        }
        Ok(())
    }

    /// The values of an operand.
    pub(super) fn operand(&self, operands: Range, at: usize) -> &Lanes {
        &self.warp.regs[self.world.program.regs(operands)[at] as usize]
    }

    /// The result register.
    pub(super) fn result(&self, results: Range) -> u32 {
        self.world.program.regs(results)[0]
    }

    /// The active lanes.
    pub(super) fn active(&self) -> impl Iterator<Item = usize> + use<> {
        let mask = self.mask;
        (0..32).filter(move |lane| mask >> lane & 1 != 0)
    }

    /// The addresses in operands `at` and `at + 1` (base and offset), of 32 or 64 bits.
    pub(super) fn addresses(&self, operands: Range, at: usize, wide: bool) -> Lanes {
        let (base, offset) = (self.operand(operands, at), self.operand(operands, at + 1));
        let low = if wide { !0 } else { 0xffff_ffff };
        std::array::from_fn(|lane| base[lane].wrapping_add(offset[lane]) & low)
    }

    /// An operand that must be uniform over the active lanes.
    pub(super) fn uniform(&mut self, operands: Range, at: usize, what: &str) -> Result<u64, FaultCause> {
        let lanes = *self.operand(operands, at);
        let first = lanes[self.mask.trailing_zeros() as usize];
        match self.active().find(|&lane| lanes[lane] != first) {
            Some(lane) => Err((
                FaultKind::Divergence,
                format!("lanes disagree about {what}: {first:#x} and {:#x} of lane {lane}", lanes[lane]),
            )),
            None => Ok(first),
        }
    }

    pub(super) fn cta(&mut self) -> &mut Cta {
        &mut self.cluster.ctas[self.rank]
    }

    /// The index of lane 0 among the threads of the cluster.
    pub(super) fn first(&self) -> u32 {
        self.rank as u32 * self.world.program.threads + 32 * self.warp.index
    }

    /// The mark of a lane's access.
    #[inline]
    pub(super) fn mark(&self, lane: usize, strength: u8) -> Mark {
        let thread = self.first() + lane as u32;
        Mark { cluster: self.cluster.id, thread, count: self.warp.clocks.counts[lane], pc: self.pc, strength }
    }

    /// Records a lane's access in the shadow memory as `mark` and checks it for races.
    #[inline(always)] // otherwise marks are copied through memory
    pub(super) fn record_access(
        &mut self,
        write: bool,
        MemoryRange { location, bytes }: MemoryRange,
        lane: usize,
        mark: Mark,
    ) -> Result<(), FaultCause> {
        let id = (self.cluster.id, self.first() + lane as u32);
        let (clock, lanes) = (self.warp.clocks.of(lane), 1 << (mark.thread & 31));
        let (copies, shape) = (self.warp.clocks.copies_of(lane), self.world.program.shape());
        let actor = Actor { clock, id, copies, lanes, mark, writes: write, shape };
        if let MemoryLocation::Global(location) = location
            && self.world.program.waits
            && self.warp.waited >> lane & 1 == 0
        {
            self.faulting_lanes = 1 << lane;
            self.world.check_in_flight(write, mark.strength, location, bytes)?;
            self.faulting_lanes = self.mask;
        }
        record(self.world, self.cluster, location, bytes, &actor).map_err(|conflict| {
            self.faulting_lanes = 1 << lane;
            self.world.conflict(conflict, write, location)
        })
    }

    /// Whether all lanes have equal clocks and counts, and no access of one must be checked against earlier launches.
    pub(super) fn lanes_agree(&self) -> bool {
        let WarpClocks { parts, counts, .. } = &self.warp.clocks;
        let waited = !self.world.program.waits || self.warp.waited == FULL;
        waited && parts.len() == 1 && counts.iter().all(|count| *count == counts[0])
    }

    /// Records weak reads of the same bytes by lanes that agree. After an error, [`Exec::record_access`] finds its lane.
    pub(super) fn record_shared_read(
        &mut self,
        location: MemoryLocation,
        bytes: usize,
        lanes: std::ops::Range<usize>,
    ) -> Result<(), Conflict> {
        let mark = self.mark(lanes.start, 0);
        let lanes = FULL << lanes.start & FULL >> (32 - lanes.end);
        let (clock, id) = (&self.warp.clocks.parts[0].1, (mark.cluster, u32::MAX));
        let shape = self.world.program.shape();
        let actor = Actor { clock, id, copies: (0, 0), lanes, mark, writes: false, shape };
        record(self.world, self.cluster, location, bytes, &actor)
    }

    /// Releases the accesses of lanes into a clock.
    pub(super) fn release(&mut self, mask: u32, into: &mut Clock) {
        self.warp.clocks.release(mask, self.cluster.id, self.first() as usize, into);
    }

    /// Orders prior accesses of all lanes before later accesses of all lanes.
    pub(super) fn sync_lanes(&mut self) {
        let mut all = Clock::new(self.cluster.id);
        self.release(FULL, &mut all);
        self.warp.clocks.replace(&Rc::new(all));
    }

    /// The fault for a cause at the current step.
    pub(super) fn fault(&self, (kind, message): FaultCause) -> Fault {
        Fault {
            kind,
            message,
            at: self.world.program.at.get(self.pc as usize).copied(),
            cta: self.cluster.ctas[self.rank].id,
            warp: self.warp.index,
            lanes: self.faulting_lanes,
        }
    }

    /// Reports divergence if all groups of the warp wait for other lanes.
    fn check_lanes(&mut self) -> Result<(), Fault> {
        let groups = &self.warp.groups;
        if groups.is_empty() || groups.iter().any(|group| group.wait != Wait::Lanes) {
            return Ok(());
        }
        let (pc, mask) = (groups[0].pc, groups[0].mask);
        let others: Vec<String> = groups[1..]
            .iter()
            .map(|group| format!("lanes {:#x} wait at {}", group.mask, self.world.line(group.pc)))
            .collect();
        let live = groups.iter().fold(0, |live, group| live | group.mask);
        let ended = (live != FULL).then(|| format!("lanes {:#x} have ended", !live));
        let why: Vec<String> = others.into_iter().chain(ended).collect();
        (self.pc, self.faulting_lanes) = (pc, mask);
        let message = format!(
            "an instruction for the whole warp is executed by lanes {mask:#x} only: {}",
            why.join(", ")
        );
        Err(self.fault((FaultKind::Divergence, message)))
    }
}

#[inline(always)] // otherwise locations are copied through memory
fn record(
    world: &mut World<'_>,
    cluster: &mut Cluster,
    location: MemoryLocation,
    bytes: usize,
    actor: &Actor<'_>,
) -> Result<(), Conflict> {
    let (shadow, offset) = match location {
        MemoryLocation::Global(location) => (&mut world.shadows[location.allocation], location.offset),
        MemoryLocation::Shared(rank, offset) => (&mut cluster.ctas[rank].shared.shadow, offset),
    };
    shadow.record(offset..offset + bytes, actor)
}
