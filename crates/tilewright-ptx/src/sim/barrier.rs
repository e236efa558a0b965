//! Synchronization instructions and special registers: named barriers of a CTA, and the cluster barrier.

use super::{Clock, Exec, FULL, FaultCause, FaultKind, Next, Range, Wait};
use crate::isa::{Lanes, Special, SyncOp};
use std::rc::Rc;

/// One of the 16 barriers of a CTA.
#[derive(Debug)]
pub(super) struct NamedBarrier {
    /// Arrived and expected threads.
    pub(super) arrived: u32,
    pub(super) expected: u32,
    /// The instruction of the first arrival.
    first: u32,
    clock: Option<Clock>,
}

#[derive(Debug)]
pub(super) struct ClusterBarrier {
    /// Completed phases.
    pub(super) phase: u64,
    /// Warps that arrived in this phase.
    pub(super) arrived: u32,
    clock: Clock,
    done: Rc<Clock>,
}

impl NamedBarrier {
    pub(super) fn new() -> Self {
        Self { arrived: 0, expected: 0, first: 0, clock: None }
    }
}

impl ClusterBarrier {
    pub(super) fn new() -> Self {
        let empty = Clock::new(u32::MAX);
        Self { phase: 0, arrived: 0, done: Rc::new(empty.clone()), clock: empty }
    }

    /// Completes the phase if all live warps have arrived.
    fn settle(&mut self, live: u32) -> bool {
        let over = self.arrived > 0 && self.arrived >= live;
        if over {
            self.phase += 1;
            self.arrived = 0;
            self.done = Rc::new(self.clock.clone());
        }
        over
    }
}

impl Exec<'_, '_> {
    /// `barrier.sync` and `barrier.arrive` by a full warp.
    pub(super) fn named_barrier(&mut self, operands: Range, waits: bool) -> Result<Next, FaultCause> {
        let id = self.uniform(operands, 0, "the barrier")? as usize;
        let expected = self.uniform(operands, 1, "the threads of the barrier")? as u32;
        let threads = self.world.program.threads;
        if id >= 16 {
            return Err((FaultKind::BadArgument, format!("barrier {id}: a CTA has 16")));
        }
        if expected == 0 || !expected.is_multiple_of(32) || expected > threads {
            let message =
                format!("barrier {id} for {expected} threads: expected a multiple of 32 up to {threads}");
            return Err((FaultKind::BadArgument, message));
        }
        let (cluster, first, pc) = (self.cluster.id, self.first() as usize, self.pc);
        let barrier = &mut self.cluster.ctas[self.rank].barriers[id];
        if barrier.arrived == 0 {
            (barrier.expected, barrier.first) = (expected, pc);
        }
        if barrier.expected != expected {
            let other = (barrier.expected, self.world.line(barrier.first));
            let message = format!("barrier {id} for {expected} threads, but for {} at {}", other.0, other.1);
            return Err((FaultKind::WrongArrivalCount, message));
        }
        barrier.arrived += 32;
        let clock = barrier.clock.get_or_insert_with(|| Clock::new(cluster));
        self.warp.clocks.release(FULL, cluster, first, clock);
        self.world.progress += 1;
        if barrier.arrived < expected {
            return Ok(if waits { Next::WaitThenAdvance(Wait::Barrier(id)) } else { Next::Advance });
        }
        barrier.arrived = 0;
        let done = Rc::new(barrier.clock.take().unwrap_or_default());
        for warp in &mut self.cluster.ctas[self.rank].warps {
            for group in &mut warp.groups {
                if group.wait == Wait::Barrier(id) {
                    group.wait = Wait::None;
                    warp.clocks.replace(&done);
                    warp.awake = true;
                }
            }
        }
        if waits {
            self.warp.clocks.replace(&done);
        }
        Ok(Next::Advance)
    }

    pub(super) fn cluster_arrive(&mut self, releases: bool) -> Result<(), FaultCause> {
        if self.warp.cluster_arrivals > self.warp.cluster_waits {
            let message = "a second arrival at the cluster's barrier without a wait between".to_owned();
            return Err((FaultKind::WrongArrivalCount, message));
        }
        self.warp.cluster_arrivals = self.cluster.barrier.phase + 1;
        self.warp.cluster_waits = self.cluster.barrier.phase;
        self.cluster.barrier.arrived += 1;
        if releases {
            let (cluster, first) = (self.cluster.id, self.first() as usize);
            self.warp.clocks.release(FULL, cluster, first, &mut self.cluster.barrier.clock);
        }
        self.settle_cluster();
        Ok(())
    }

    pub(super) fn cluster_wait(&mut self) -> Result<Next, FaultCause> {
        if self.warp.cluster_arrivals == self.warp.cluster_waits {
            let message = "a wait for the cluster's barrier without an arrival before".to_owned();
            return Err((FaultKind::WrongArrivalCount, message));
        }
        if self.cluster.barrier.phase < self.warp.cluster_arrivals {
            return Ok(Next::WaitThenRetry(Wait::Cluster));
        }
        self.warp.cluster_waits = self.warp.cluster_arrivals;
        self.warp.clocks.acquire(FULL, &self.cluster.barrier.done);
        Ok(Next::Advance)
    }

    /// Completes the cluster barrier if possible, after an arrival or the exit of a warp.
    fn settle_cluster(&mut self) {
        self.world.progress += 1;
        let others = self.cluster.ctas.iter().flat_map(|cta| &cta.warps).filter(|warp| warp.live()).count();
        let live = others as u32 + u32::from(self.warp.live());
        if self.cluster.barrier.settle(live) {
            self.cluster.wake();
            self.warp.wake();
        }
    }

    /// Handles the exit of a warp.
    pub(super) fn end_of_warp(&mut self) -> Result<(), FaultCause> {
        self.settle_cluster();
        let last = !self.cluster.ctas[self.rank].warps.iter().any(super::warp::Warp::live);
        if last && let Some(copy) = self.cluster.ctas[self.rank].in_flight.iter().find(|copy| copy.is_load())
        {
            let line = self.world.line(copy.pc);
            let message =
                format!("the CTA ends before the copy of {line} into its shared memory is complete");
            return Err((FaultKind::InFlight, message));
        }
        Ok(())
    }
}

impl Exec<'_, '_> {
    pub(super) fn sync(&mut self, op: SyncOp, results: Range, operands: Range) -> Result<Next, FaultCause> {
        match op {
            SyncOp::Special(special) => {
                let out = self.special(special);
                self.write(self.result(results), &out)?;
            }
            SyncOp::Barrier => return self.named_barrier(operands, true),
            SyncOp::BarrierArrive => return self.named_barrier(operands, false),
            SyncOp::Mbarrier(op) => return self.mbarrier(op, results, operands),
            SyncOp::Fence(fence) => self.fence(fence),
            SyncOp::ClusterArrive => self.cluster_arrive(true)?,
            SyncOp::ClusterArriveRelaxed => self.cluster_arrive(false)?,
            SyncOp::ClusterWait => return self.cluster_wait(),
            SyncOp::MapToCta => {
                let out = self.map_to_cta(operands)?;
                self.write(self.result(results), &out)?;
            }
            // the simulator has no register limit and runs one kernel at a time
            SyncOp::SetmaxnregInc(_) | SyncOp::SetmaxnregDec(_) => {}
            SyncOp::LaunchDependents => {}
            SyncOp::WaitForPrerequisites => self.warp.waited |= self.mask,
            SyncOp::Sleep => {
                let group = &mut self.warp.groups[self.group];
                group.timed_out = !group.timed_out;
                return Ok(if group.timed_out { Next::Yield } else { Next::Advance });
            }
            SyncOp::Trap => return Err((FaultKind::Trap, "the kernel gave up".to_owned())),
        }
        Ok(Next::Advance)
    }

    fn special(&mut self, special: Special) -> Lanes {
        let cta = self.cluster.ctas[self.rank].id;
        let word = match special {
            Special::Thread(0) => {
                return std::array::from_fn(|lane| u64::from(self.warp.index) * 32 + lane as u64);
            }
            Special::Lane => return std::array::from_fn(|lane| lane as u64),
            Special::Thread(_) => 0,
            Special::Cta(axis) => cta.get(axis).copied().unwrap_or(0),
            Special::Grid(axis) => self.world.grid.get(axis).copied().unwrap_or(1),
            Special::ClusterRank => self.rank as u32,
            Special::GlobalTimer => return [self.world.report.warp_instructions; 32],
        };
        [u64::from(word); 32]
    }

    /// `mapa`: the same offset in the shared memory of a CTA of the cluster.
    fn map_to_cta(&mut self, operands: Range) -> Result<Lanes, FaultCause> {
        let (addresses, ranks) = (*self.operand(operands, 0), *self.operand(operands, 1));
        let size = self.cluster.ctas.len() as u64;
        let mut out = [0; 32];
        for lane in self.active() {
            if ranks[lane] >= size {
                self.faulting_lanes = 1 << lane;
                let message = format!("CTA {} of a cluster of {size}", ranks[lane]);
                return Err((FaultKind::BadArgument, message));
            }
            out[lane] = super::bulk::in_cta(addresses[lane], ranks[lane]);
        }
        Ok(out)
    }
}
