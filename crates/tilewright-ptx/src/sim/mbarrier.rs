//! Mbarriers: arrivals and bytes that a phase waits for.

use super::{
    clock::Clock,
    exec::{Exec, Next},
    fault::{FaultKind, Trouble},
    lower::Range,
    shadow::Mark,
    warp::Wait,
    world::{Agent, Cluster, Spot},
};
use crate::isa::{memory::Space, pure::Lanes, sync::Mbarrier as Op};
use std::rc::Rc;

/// Bytes that a phase may wait for are below this, either way.
const BYTES: i64 = 1 << 20;

/// An mbarrier.
#[derive(Debug)]
pub(super) struct Mbarrier {
    /// Arrivals of each phase, and those that this one waits for.
    pub(super) expected: u32,
    pub(super) pending: u32,
    /// Bytes that were expected and did not arrive.
    pub(super) bytes: i64,
    /// Phases that are over.
    pub(super) phase: u64,
    /// Who initialised it.
    pub(super) init: Mark,
    /// The number of the copies that it counts.
    pub(super) agent: u32,
    /// The step that last expected bytes.
    pub(super) expecter: Option<u32>,
    clock: Clock,
    done: Rc<Clock>,
}

impl Mbarrier {
    /// Takes arrivals.
    fn arrive(&mut self, count: u32) -> Result<(), Trouble> {
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

    /// Counts bytes that are expected, or with a minus that arrived.
    pub(super) fn expect(&mut self, bytes: i64) -> Result<(), Trouble> {
        self.bytes += bytes;
        if self.bytes.abs() >= BYTES {
            let message =
                format!("phase {} waits for {} bytes: expected fewer than 2^20", self.phase, self.bytes);
            return Err((FaultKind::WrongTransactionCount, message));
        }
        Ok(())
    }

    /// Ends the phase if all arrived. Copies of the phase are known from then on to who waits.
    pub(super) fn settle(&mut self, cluster: u32) -> Result<bool, Trouble> {
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

    /// `cp.async` of a lane are known to who waits.
    pub(super) fn learn(&mut self, cluster: u32, who: usize, count: u32) {
        self.clock.raise(cluster, who, count);
    }
}

impl Cluster {
    /// One arrival from what works asynchronously, or bytes: `true` when that ended the phase.
    pub(super) fn signal(
        &mut self,
        (rank, offset): (usize, u32),
        arrivals: u32,
        bytes: i64,
    ) -> Result<bool, Trouble> {
        let id = self.id;
        let Some(barrier) = self.ctas[rank].mbarriers.get_mut(&offset) else {
            let message = format!(
                "a copy signals the mbarrier at {}, which is no longer one",
                self.ctas[rank].shared.arrays.name(offset as usize)
            );
            return Err((FaultKind::NotAnMbarrier, message));
        };
        if arrivals > 0 {
            barrier.arrive(arrivals)?;
        }
        barrier.expect(-bytes)?;
        barrier.settle(id)
    }
}

impl Exec<'_, '_> {
    pub(super) fn mbarrier(&mut self, op: Op, results: Range, operands: Range) -> Result<Next, Trouble> {
        let addresses = self.addresses(operands, 0, false);
        match op {
            Op::TryWait | Op::TestWait => {
                return self.wait_phase(&addresses, op == Op::TryWait, (results, operands));
            }
            Op::Init => self.init(&addresses, operands)?,
            Op::Invalidate => self.invalidate(&addresses)?,
            Op::Arrive | Op::ArriveRemote | Op::ArriveExpect | Op::Expect => {
                for lane in self.active() {
                    let bytes = match op {
                        Op::ArriveExpect | Op::Expect => self.operand(operands, 2)[lane] as u32,
                        _ => 0,
                    };
                    self.arrive(op, addresses[lane], bytes, lane)?;
                }
            }
        }
        self.world.progress += 1;
        Ok(Next::Advance)
    }

    fn init(&mut self, addresses: &Lanes, operands: Range) -> Result<(), Trouble> {
        for lane in self.active() {
            let count = self.operand(operands, 2)[lane] as u32;
            if count == 0 || count >= 1 << 20 {
                return Err((
                    FaultKind::BadArgument,
                    format!("an mbarrier for {count} arrivals: expected 1..2^20"),
                ));
            }
            let spot = self.spot(Space::Shared, addresses[lane], 8, lane)?;
            let mark = self.mark(lane, 0);
            self.note(true, (spot, 8), lane, mark)?;
            let Spot::Shared(rank, offset) = spot else { continue };
            let agent = self.cluster.agent(Agent::Mbarrier(rank, offset as u32));
            let clock = Clock::new(u32::MAX);
            let barrier = Mbarrier {
                expected: count,
                pending: count,
                bytes: 0,
                // phases of another life at the same place must not be mistaken for those of this one
                phase: 0,
                init: mark,
                agent,
                expecter: None,
                done: Rc::new(clock.clone()),
                clock,
            };
            let cta = self.cta();
            cta.shared.set_barrier(offset, true);
            cta.mbarriers.insert(offset as u32, barrier);
        }
        Ok(())
    }

    fn invalidate(&mut self, addresses: &Lanes) -> Result<(), Trouble> {
        for lane in self.active() {
            let (rank, offset) = self.find_mbarrier(addresses[lane], false, lane)?;
            let cta = &mut self.cluster.ctas[rank];
            cta.mbarriers.remove(&offset);
            cta.shared.set_barrier(offset as usize, false);
            let mark = self.mark(lane, 0);
            self.note(true, (Spot::Shared(rank, offset as usize), 8), lane, mark)?;
        }
        Ok(())
    }

    /// The rank and offset of a live mbarrier that a lane knows to be initialised.
    pub(super) fn find_mbarrier(
        &mut self,
        address: u64,
        remote: bool,
        lane: usize,
    ) -> Result<(usize, u32), Trouble> {
        self.culprit = 1 << lane;
        if !address.is_multiple_of(8) {
            return Err((
                FaultKind::Misaligned,
                format!("an mbarrier at {address:#x}: expected a multiple of 8"),
            ));
        }
        let Spot::Shared(rank, offset) = self.cluster.shared_spot(self.rank, address as u32, 8, remote)?
        else {
            return Err((FaultKind::NotAnMbarrier, "an mbarrier outside of shared memory".to_owned()));
        };
        let Some(barrier) = self.cluster.ctas[rank].mbarriers.get(&(offset as u32)) else {
            let message = format!("there is no mbarrier in {}", self.world.name(Spot::Shared(rank, offset)));
            return Err((FaultKind::NotAnMbarrier, message));
        };
        let init = barrier.init;
        if init.who != self.first() + lane as u32
            && self.warp.known.of(lane).get(init.cluster, init.who as usize) <= init.count
        {
            let message = format!(
                "the mbarrier in {} is used, and nothing orders that after its initialisation at {}",
                self.world.name(Spot::Shared(rank, offset)),
                self.world.line(init.pc)
            );
            return Err((FaultKind::Race, message));
        }
        self.culprit = self.mask;
        Ok((rank, offset as u32))
    }

    fn arrive(&mut self, op: Op, address: u64, bytes: u32, lane: usize) -> Result<(), Trouble> {
        let (rank, offset) = self.find_mbarrier(address, op == Op::ArriveRemote, lane)?;
        let (cluster, first, pc) = (self.cluster.id, self.first() as usize, self.pc);
        let Some(barrier) = self.cluster.ctas[rank].mbarriers.get_mut(&offset) else { return Ok(()) };
        if matches!(op, Op::ArriveExpect | Op::Expect) {
            barrier.expecter = Some(pc);
        }
        let arrived = barrier.expect(i64::from(bytes)).and_then(|()| {
            if op != Op::Expect {
                self.warp.known.release(1 << lane, (cluster, first), &mut barrier.clock);
                barrier.arrive(1)?;
            }
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
                self.culprit = 1 << lane;
                Err((
                    kind,
                    format!("{message} (mbarrier at {})", self.world.program.arrays.name(offset as usize)),
                ))
            }
        }
    }

    /// Whether the phase of a parity is over, for lanes that may disagree about barrier and parity.
    fn wait_phase(
        &mut self,
        addresses: &Lanes,
        may_wait: bool,
        (results, operands): (Range, Range),
    ) -> Result<Next, Trouble> {
        let parities = self.operand(operands, 2).map(|parity| parity & 1);
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
            self.check_phase(same, (offset, phase), is_over)?;
            if is_over {
                over |= same;
                known.push((same, done));
            }
        }
        let give_up = self.warp.groups[self.group].give_up;
        if over != self.mask && may_wait && !give_up && !self.world.rng.once_in(4) {
            return Ok(Next::Again(Wait::Phase));
        }
        for (lanes, done) in known {
            self.warp.known.acquire(lanes, &done);
        }
        let out: Lanes = std::array::from_fn(|lane| u64::from(over >> lane & 1));
        self.write(self.result(results), &out)?;
        Ok(Next::Advance)
    }

    /// Remembers what lanes wait for; a phase that ended twice since then was missed.
    fn check_phase(&mut self, lanes: u32, (offset, phase): (u32, u64), is_over: bool) -> Result<(), Trouble> {
        for lane in (0..32).filter(|lane| lanes >> lane & 1 != 0) {
            let wait = &mut self.warp.waits[lane];
            match *wait {
                Some((at, since)) if at == offset && (since & 1 == phase & 1) != is_over => {
                    if phase >= since + 2 {
                        self.culprit = 1 << lane;
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
