//! Special registers, barriers, fences and mbarriers.

use super::{Builder, IntoOperand, Shared, Value};
use crate::{
    ir::Operand,
    isa::{Fence, MbarrierOp, Op, Scalar, Special, SyncOp},
};
use std::panic::Location;

impl Builder {
    #[track_caller]
    fn special<T: Scalar>(&self, special: Special, name: &str) -> Value<'_, T> {
        let before = self.0.borrow().kernel.registers.len();
        let value = self.pure::<T>(Op::Sync(SyncOp::Special(special)), &[]);
        let new = self.0.borrow().kernel.registers.len() > before;
        if new { value.named(name) } else { value }
    }

    /// The warp index in the CTA, broadcast from lane 0 so that the assembler treats branches on it as uniform.
    #[track_caller]
    pub fn warp_index(&self) -> Value<'_, u32> {
        (self.thread() >> 5).of_lane(0).named("warp")
    }

    /// The device clock in nanoseconds; each call reads it again.
    #[track_caller]
    pub fn global_timer(&self) -> Value<'_, u64> {
        let [time] = self.effect(Op::Sync(SyncOp::Special(Special::GlobalTimer)), &[]);
        time
    }

    #[track_caller]
    fn sync(&self, op: SyncOp, operands: &[Operand]) {
        self.emit(Op::Sync(op), operands);
    }

    /// Barrier of all threads of the CTA.
    #[track_caller]
    pub fn sync_threads(&self) {
        self.sync_named(0, self.threads_per_cta());
    }

    /// Waits until `threads` threads arrived at named barrier `id` (0 to 15; [`Builder::sync_threads`] uses 0).
    #[track_caller]
    pub fn sync_named(&self, id: impl IntoOperand<u32>, threads: u32) {
        self.sync(SyncOp::Barrier, &[id.into_operand(), Operand::Const(threads.into())]);
    }

    /// Arrives at named barrier `id` without waiting.
    #[track_caller]
    pub fn arrive_named(&self, id: impl IntoOperand<u32>, threads: u32) {
        self.sync(SyncOp::BarrierArrive, &[id.into_operand(), Operand::Const(threads.into())]);
    }

    /// A memory fence.
    #[track_caller]
    pub fn fence(&self, fence: Fence) {
        self.sync(SyncOp::Fence(fence), &[]);
    }

    /// Barrier of all threads of the cluster.
    #[track_caller]
    pub fn sync_cluster(&self) {
        self.arrive_cluster();
        self.wait_cluster();
    }

    /// The same shared address in another CTA of the cluster.
    #[track_caller]
    pub fn map_to_cta<'k>(&'k self, address: Value<'k, u32>, rank: impl IntoOperand<u32>) -> Value<'k, u32> {
        self.pure(Op::Sync(SyncOp::MapToCta), &[address.operand, rank.into_operand()])
    }

    /// Raises the warpgroup's register limit to `count` per thread (`setmaxnreg.inc`).
    #[track_caller]
    pub fn setmaxnreg_inc(&self, count: u32) {
        self.sync(SyncOp::SetmaxnregInc(count), &[]);
    }

    /// Lowers the warpgroup's register limit to `count` per thread (`setmaxnreg.dec`).
    #[track_caller]
    pub fn setmaxnreg_dec(&self, count: u32) {
        self.sync(SyncOp::SetmaxnregDec(count), &[]);
    }

    /// Sleeps for approximately `nanoseconds`.
    #[track_caller]
    pub fn sleep(&self, nanoseconds: impl IntoOperand<u32>) {
        self.sync(SyncOp::Sleep, &[nanoseconds.into_operand()]);
    }

    /// `count` uninitialized mbarriers in shared memory.
    #[track_caller]
    pub fn barriers(&self, name: &str, count: usize) -> Barrier<'_> {
        Barrier(self.shared(name, count, 8))
    }
}

macro_rules! without_operands {
    (
        registers { $($(#[$doc:meta])* $register:ident: $name:literal $special:expr;)* }
        instructions { $($(#[$text:meta])* $instruction:ident: $op:ident;)* }
    ) => {
        impl Builder {
            $($(#[$doc])*
            #[track_caller]
            pub fn $register(&self) -> Value<'_, u32> {
                self.special($special, $name)
            })*

            $($(#[$text])*
            #[track_caller]
            pub fn $instruction(&self) {
                self.sync(SyncOp::$op, &[]);
            })*
        }
    };
}

without_operands! {
    registers {
        /// The thread index in the CTA.
        thread: "thread" Special::Thread(0);
        /// The lane index in the warp.
        lane: "lane" Special::Lane;
        /// The CTA index in the grid.
        cta: "cta" Special::Cta(0);
        /// The CTA index in the grid's second dimension.
        cta_y: "cta_y" Special::Cta(1);
        /// The CTA index in the grid's third dimension.
        cta_z: "cta_z" Special::Cta(2);
        /// The number of CTAs in the grid, x.
        ctas: "ctas" Special::Grid(0);
        /// The CTA's rank in its cluster.
        cluster_rank: "rank" Special::ClusterRank;
    }
    instructions {
        /// Arrives at the cluster barrier; [`Self::wait_cluster`] must follow before the next arrival.
        arrive_cluster: ClusterArrive;
        /// [`Self::arrive_cluster`] that makes no earlier memory access visible, so it waits for none.
        arrive_cluster_relaxed: ClusterArriveRelaxed;
        /// Waits until all threads of the cluster have arrived.
        wait_cluster: ClusterWait;
        /// Allows dependent kernels to start (programmatic dependent launch). They wait for this kernel, and through its own wait for all
        /// before it.
        launch_dependents: LaunchDependents;
        /// Waits until prerequisite kernels have completed and their memory is visible.
        wait_for_prerequisites: WaitForPrerequisites;
        /// Aborts the kernel with an error.
        trap: Trap;
    }
}

/// An mbarrier, or the first of several.
#[derive(Debug, Clone, Copy)]
pub struct Barrier<'k>(pub(super) Shared<'k, u64>);

impl<'k> Barrier<'k> {
    /// Mbarrier `index` of the array.
    #[must_use]
    #[track_caller]
    pub fn at(self, index: impl IntoOperand<u32>) -> Self {
        Self(self.0.at(index))
    }

    /// The shared-memory address.
    #[track_caller]
    pub fn address(self) -> Value<'k, u32> {
        self.0.address()
    }

    #[track_caller]
    fn emit(self, op: MbarrierOp, operands: &[Operand]) {
        let operands = [&self.0.operands()[..], operands].concat();
        self.0.builder().emit(Op::Sync(SyncOp::Mbarrier(op)), &operands);
    }

    /// Initializes phase 0, which completes after `arrivals` arrivals. One thread calls it. Other threads need a CTA barrier
    /// before they use it, asynchronous copies [`Fence::MbarrierInit`].
    #[track_caller]
    pub fn init(self, arrivals: impl IntoOperand<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        self.emit(MbarrierOp::Init, &[arrivals.into_operand()]);
    }

    /// Arrives once.
    #[track_caller]
    pub fn arrive(self) {
        let _line = self.0.builder().at_line(Location::caller());
        self.emit(MbarrierOp::Arrive, &[]);
    }

    /// Arrives once at the same mbarrier of another CTA of the cluster. Copies that are started after a wait there do not overtake earlier
    /// reads of this thread.
    #[track_caller]
    pub fn arrive_in_cta(self, rank: impl IntoOperand<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        Self(self.0.of_cta(rank)).emit(MbarrierOp::ArriveInCluster, &[]);
    }

    /// Arrives likewise. Earlier writes of this thread are visible to threads that [wait](Self::wait_in_cluster) there. The arrival waits
    /// for these writes, which may take a microsecond.
    #[track_caller]
    pub fn release_in_cta(self, rank: impl IntoOperand<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        Self(self.0.of_cta(rank)).emit(MbarrierOp::ReleaseInCluster, &[]);
    }

    /// Arrives once and adds `bytes` to the phase's expected transaction count.
    #[track_caller]
    pub fn arrive_expecting(self, bytes: impl IntoOperand<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        self.emit(MbarrierOp::ArriveExpect, &[bytes.into_operand()]);
    }

    /// Returns whether the phase with this parity has completed.
    #[track_caller]
    pub fn is_over(self, parity: impl IntoOperand<u32>) -> Value<'k, bool> {
        let _line = self.0.builder().at_line(Location::caller());
        self.try_wait(MbarrierOp::TryWait, parity.into_operand())
    }

    #[track_caller]
    fn try_wait(self, op: MbarrierOp, parity: Operand) -> Value<'k, bool> {
        let operands = [&self.0.operands()[..], &[parity]].concat();
        let [over] = self.0.builder().effect(Op::Sync(SyncOp::Mbarrier(op)), &operands);
        over
    }

    /// Waits until the phase with this parity has completed.
    #[track_caller]
    pub fn wait(self, parity: impl IntoOperand<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        let k = self.0.builder();
        k.loop_(|| k.break_if(self.is_over(Value::<u32>::new(k, parity.into_operand()))));
    }

    /// Waits likewise. Writes of the cluster's threads before their [arrivals](Self::release_in_cta) are visible.
    #[track_caller]
    pub fn wait_in_cluster(self, parity: impl IntoOperand<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        let (k, parity) = (self.0.builder(), parity.into_operand());
        k.loop_(|| k.break_if(self.try_wait(MbarrierOp::TryWaitInCluster, parity)));
    }
}
