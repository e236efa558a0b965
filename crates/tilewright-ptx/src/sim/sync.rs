//! Synchronization instructions and special registers.

use super::{
    exec::{Exec, Next},
    fault::{FaultCause, FaultKind},
    lower::Range,
};
use crate::isa::{
    pure::Lanes,
    sync::{Special, SyncOp},
};

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
            out[lane] = addresses[lane] & 0xff_ffff | (ranks[lane] + 1) << 24;
        }
        Ok(out)
    }
}
