//! Where a thread is, and what makes it wait or sets others free: special registers, barriers, fences, clusters.

use super::{
    exec::{Exec, Next},
    fault::{FaultKind, Trouble},
    lower::Range,
};
use crate::isa::{
    pure::Lanes,
    sync::{Special, Sync},
};

impl Exec<'_, '_> {
    pub(super) fn sync(&mut self, op: Sync, results: Range, operands: Range) -> Result<Next, Trouble> {
        match op {
            Sync::Special(special) => {
                let out = self.special(special);
                self.write(self.result(results), &out)?;
            }
            Sync::Barrier => return self.named(operands, true),
            Sync::BarrierArrive => return self.named(operands, false),
            Sync::Mbarrier(op) => return self.mbarrier(op, results, operands),
            Sync::Fence(fence) => self.fence(fence),
            Sync::ClusterArrive => self.cluster_arrive()?,
            Sync::ClusterWait => return self.cluster_wait(),
            Sync::MapToCta => {
                let out = self.mapped(operands)?;
                self.write(self.result(results), &out)?;
            }
            // how many registers a thread has is the assembler's business, and other kernels are not here
            Sync::TakeRegisters(_) | Sync::GiveRegisters(_) => {}
            Sync::LaunchDependents | Sync::WaitForPrerequisites => {}
            Sync::Sleep => {
                let group = &mut self.warp.groups[self.group];
                group.give_up = !group.give_up;
                return Ok(if group.give_up { Next::Yield } else { Next::Advance });
            }
            Sync::Trap => return Err((FaultKind::Trap, "the kernel gave up".to_owned())),
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
            Special::Block(0) => self.world.program.threads,
            Special::Block(_) => 1,
            Special::Cta(axis) => cta.get(axis).copied().unwrap_or(0),
            Special::Grid(axis) => self.world.grid.get(axis).copied().unwrap_or(1),
            Special::ClusterRank => self.rank as u32,
            Special::ClusterSize => self.world.program.cluster,
            Special::Cluster => cta[0] / self.world.program.cluster,
            Special::Sm => self.cluster.id % 132,
            Special::GlobalTimer | Special::Clock => return [self.world.report.warp_instructions; 32],
        };
        [u64::from(word); 32]
    }

    /// `mapa`: the same place in the shared memory of a CTA of the cluster.
    fn mapped(&mut self, operands: Range) -> Result<Lanes, Trouble> {
        let (addresses, ranks) = (*self.operand(operands, 0), *self.operand(operands, 1));
        let size = self.cluster.ctas.len() as u64;
        let mut out = [0; 32];
        for lane in self.active() {
            if ranks[lane] >= size {
                self.culprit = 1 << lane;
                let message = format!("CTA {} of a cluster of {size}", ranks[lane]);
                return Err((FaultKind::BadArgument, message));
            }
            out[lane] = addresses[lane] & 0xff_ffff | (ranks[lane] + 1) << 24;
        }
        Ok(out)
    }
}
