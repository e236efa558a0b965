//! Mbarriers: pending arrivals and transaction bytes of a phase.

use super::{
    Agent, Clock, Cluster, Exec, FaultCause, FaultKind, Mark, MemoryLocation, MemoryRange, Next, Range, Wait,
};
use crate::isa::{Lanes, MbarrierOp as Op, Space};
use std::rc::Rc;

/// The absolute limit of a phase's transaction count.
const BYTES: i64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Mbarrier {
    /// Arrivals per phase, and pending arrivals of this phase.
    pub(super) expected: u32,
    pub(super) pending: u32,
    /// Expected bytes that have not arrived.
    pub(super) bytes: i64,
    /// Completed phases.
    pub(super) phase: u64,
    /// The initialization.
    pub(super) init: Mark,
    /// The agent of the copies that it counts.
    pub(super) agent: u32,
    /// The step that last expected bytes.
    pub(super) expecter: Option<u32>,
    clock: Clock,
    done: Rc<Clock>,
}

impl Mbarrier {
    fn arrive(&mut self, count: u32) -> Result<(), FaultCause> {
        let Some(pending) = self.pending.checked_sub(count) else {
            let message = format!(
                "an arrival more in phase {} than the {} that the mbarrier expects",
                self.phase, self.expected
            );
            return Err((FaultKind::WrongArrivalCount, message));
        };
        self.pending = pending;
        Ok(())
    }

    /// Counts expected bytes, or arrived bytes if negative.
    pub(super) fn expect(&mut self, bytes: i64) -> Result<(), FaultCause> {
        self.bytes += bytes;
        if self.bytes.abs() >= BYTES {
            let message =
                format!("phase {} waits for {} bytes: expected fewer than 2^20", self.phase, self.bytes);
            return Err((FaultKind::WrongTransactionCount, message));
        }
        Ok(())
    }

    /// Completes the phase if nothing is pending, and orders its copies before the waiters. Returns whether it completed.
    pub(super) fn settle(&mut self, cluster: u32) -> Result<bool, FaultCause> {
        if self.pending > 0 || self.bytes > 0 {
            return Ok(false);
        }
        if self.bytes < 0 {
            let message = format!(
                "in phase {} of the mbarrier {} bytes more arrived than were expected",
                self.phase, -self.bytes
            );
            return Err((FaultKind::WrongTransactionCount, message));
        }
        self.clock.raise(cluster, self.agent as usize, self.phase as u32 + 2);
        self.done = Rc::new(self.clock.clone());
        self.phase += 1;
        self.pending = self.expected;
        Ok(true)
    }

    /// Orders `cp.async` of a lane before the waiters.
    pub(super) fn order_agent(&mut self, cluster: u32, thread: usize, count: u32) {
        self.clock.raise(cluster, thread, count);
    }
}

impl Cluster {
    /// An arrival or bytes from an asynchronous operation. Returns whether the phase completed.
    pub(super) fn signal(
        &mut self,
        rank: usize,
        offset: u32,
        arrivals: u32,
        bytes: i64,
    ) -> Result<bool, FaultCause> {
        let id = self.id;
        let Some(barrier) = self.ctas[rank].mbarriers.get_mut(&offset) else { return Ok(false) };
        if arrivals > 0 {
            barrier.arrive(arrivals)?;
        }
        barrier.expect(-bytes)?;
        barrier.settle(id)
    }
}

impl Exec<'_, '_> {
    pub(super) fn mbarrier(&mut self, op: Op, results: Range, operands: Range) -> Result<Next, FaultCause> {
        let addresses = self.addresses(operands, 0, false);
        match op {
            Op::TryWait | Op::TryWaitInCluster => return self.wait_phase(&addresses, results, operands),
            Op::Init => self.init(&addresses, operands)?,
            Op::Arrive | Op::ArriveInCluster | Op::ReleaseInCluster | Op::ArriveExpect => {
                for lane in self.active() {
                    let bytes = match op {
                        Op::ArriveExpect => self.operand(operands, 2)[lane] as u32,
                        _ => 0,
                    };
                    self.arrive(op, addresses[lane], bytes, lane)?;
                }
            }
        }
        self.world.progress += 1;
        Ok(Next::Advance)
    }

    fn init(&mut self, addresses: &Lanes, operands: Range) -> Result<(), FaultCause> {
        for lane in self.active() {
            let count = self.operand(operands, 2)[lane] as u32;
            if count == 0 || count >= 1 << 20 {
                return Err((
                    FaultKind::BadArgument,
                    format!("an mbarrier for {count} arrivals: expected 1..2^20"),
                ));
            }
            let location = self.locate_aligned(Space::Shared, addresses[lane], 8, lane)?;
            let mark = self.mark(lane, 0);
            self.record_access(true, MemoryRange { location, bytes: 8 }, lane, mark)?;
            let MemoryLocation::Shared(rank, offset) = location else { continue };
            let agent = self.cluster.agent(Agent::Mbarrier(rank, offset as u32));
            let clock = Clock::new(u32::MAX);
            let barrier = Mbarrier {
                expected: count,
                pending: count,
                bytes: 0,
                phase: 0,
                init: mark,
                agent,
                expecter: None,
                done: Rc::new(clock.clone()),
                clock,
            };
            let cta = self.cta();
            cta.shared.mark_barrier(offset);
            cta.mbarriers.insert(offset as u32, barrier);
        }
        Ok(())
    }

    /// The rank and offset of a valid mbarrier. Its initialization must happen before the lane's access.
    pub(super) fn find_mbarrier(
        &mut self,
        address: u64,
        in_cluster: bool,
        lane: usize,
    ) -> Result<(usize, u32), FaultCause> {
        self.faulting_lanes = 1 << lane;
        if !address.is_multiple_of(8) {
            return Err((
                FaultKind::Misaligned,
                format!("an mbarrier at {address:#x}: expected a multiple of 8"),
            ));
        }
        let MemoryLocation::Shared(rank, offset) =
            self.cluster.locate_shared(self.rank, address as u32, 8, in_cluster)?
        else {
            return Err((FaultKind::NotAnMbarrier, "an mbarrier outside of shared memory".to_owned()));
        };
        let Some(barrier) = self.cluster.ctas[rank].mbarriers.get(&(offset as u32)) else {
            let message =
                format!("there is no mbarrier in {}", self.world.name(MemoryLocation::Shared(rank, offset)));
            return Err((FaultKind::NotAnMbarrier, message));
        };
        let init = barrier.init;
        if init.thread != self.first() + lane as u32
            && self.warp.clocks.of(lane).get(init.cluster, init.thread as usize) <= init.count
        {
            let message = format!(
                "the mbarrier in {} is used, and nothing orders that after its initialisation at {}",
                self.world.name(MemoryLocation::Shared(rank, offset)),
                self.world.line(init.pc)
            );
            return Err((FaultKind::Race, message));
        }
        self.faulting_lanes = self.mask;
        Ok((rank, offset as u32))
    }

    fn arrive(&mut self, op: Op, address: u64, bytes: u32, lane: usize) -> Result<(), FaultCause> {
        let (rank, offset) =
            self.find_mbarrier(address, matches!(op, Op::ArriveInCluster | Op::ReleaseInCluster), lane)?;
        let (cluster, first, pc) = (self.cluster.id, self.first() as usize, self.pc);
        let Some(barrier) = self.cluster.ctas[rank].mbarriers.get_mut(&offset) else { return Ok(()) };
        if op == Op::ArriveExpect {
            barrier.expecter = Some(pc);
        }
        let arrived = barrier.expect(i64::from(bytes)).and_then(|()| {
            self.warp.clocks.release(1 << lane, cluster, first, &mut barrier.clock);
            barrier.arrive(1)?;
            barrier.settle(cluster)
        });
        match arrived {
            Ok(true) => {
                self.cluster.wake();
                self.warp.wake();
                Ok(())
            }
            Ok(false) => Ok(()),
            Err((kind, message)) => {
                self.faulting_lanes = 1 << lane;
                Err((
                    kind,
                    format!("{message} (mbarrier at {})", self.world.program.arrays.name(offset as usize)),
                ))
            }
        }
    }

    /// `try_wait`, for lanes with possibly different mbarriers and parities.
    fn wait_phase(&mut self, addresses: &Lanes, results: Range, operands: Range) -> Result<Next, FaultCause> {
        let parities = *self.operand(operands, 2);
        if let Some(lane) = (0..32).find(|&lane| self.mask >> lane & 1 != 0 && parities[lane] > 1) {
            self.faulting_lanes = 1 << lane;
            let message = format!("parity {} of a wait for an mbarrier, expected 0 or 1", parities[lane]);
            return Err((FaultKind::BadArgument, message));
        }
        let (mut left, mut over, mut known) = (self.mask, 0, Vec::new());
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            let same = (0..32)
                .filter(|&other| addresses[other] == addresses[lane] && parities[other] == parities[lane])
                .fold(0, |same, other| same | 1 << other)
                & left;
            left &= !same;
            let (rank, offset) = self.find_mbarrier(addresses[lane], false, lane)?;
            let Some(barrier) = self.cluster.ctas[rank].mbarriers.get(&offset) else { continue };
            let (phase, done) = (barrier.phase, Rc::clone(&barrier.done));
            let is_over = phase & 1 != parities[lane];
            self.check_phase(same, offset, phase, is_over)?;
            if is_over {
                over |= same;
                known.push((same, done));
            }
        }
        let timed_out = self.warp.groups[self.group].timed_out;
        if over != self.mask && !timed_out && !self.world.rng.once_in(4) {
            return Ok(Next::WaitThenRetry(Wait::Phase));
        }
        for (lanes, done) in known {
            self.warp.clocks.acquire(lanes, &done);
        }
        let out: Lanes = std::array::from_fn(|lane| u64::from(over >> lane & 1));
        self.write(self.result(results), &out)?;
        Ok(Next::Advance)
    }

    /// Records the phase that lanes wait for. It is a fault if the next phase completed, too, before a lane's wait returned.
    fn check_phase(&mut self, lanes: u32, offset: u32, phase: u64, is_over: bool) -> Result<(), FaultCause> {
        for lane in (0..32).filter(|lane| lanes >> lane & 1 != 0) {
            let wait = &mut self.warp.waits[lane];
            match *wait {
                Some((at, since)) if at == offset && (since & 1 == phase & 1) != is_over => {
                    if phase >= since + 2 {
                        self.faulting_lanes = 1 << lane;
                        let message = format!(
                            "phase {since} of the mbarrier at {}, which this thread waits for, ended, and so did phase {}, before the thread saw the first: its parity now means another phase",
                            self.world.program.arrays.name(offset as usize),
                            since + 1
                        );
                        return Err((FaultKind::WrongPhase, message));
                    }
                    if is_over {
                        *wait = None;
                    }
                }
                _ => *wait = (!is_over).then_some((offset, phase)),
            }
        }
        Ok(())
    }
}
