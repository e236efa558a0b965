//! Where a thread is, and how threads wait for each other.

use super::{Builder, Of, Shared, Value};
use crate::{
    ir::Operand,
    isa::{
        Op,
        sync::{Fence, Mbarrier, Special, Sync},
        types::Scalar,
    },
};
use std::panic::Location;

impl Builder {
    #[track_caller]
    fn special<T: Scalar>(&self, special: Special, name: &str) -> Value<'_, T> {
        let before = self.0.borrow().kernel.registers.len();
        let value = self.pure::<T>(Op::Sync(Sync::Special(special)), &[]);
        let new = self.0.borrow().kernel.registers.len() > before;
        if new { value.named(name) } else { value }
    }

    /// The thread in its CTA.
    #[track_caller]
    pub fn thread(&self) -> Value<'_, u32> {
        self.special(Special::Thread(0), "thread")
    }

    /// The lane in its warp.
    #[track_caller]
    pub fn lane(&self) -> Value<'_, u32> {
        self.special(Special::Lane, "lane")
    }

    /// The warp in its CTA, the same register in all lanes, so that branches on it are known to be uniform.
    #[track_caller]
    pub fn warp_index(&self) -> Value<'_, u32> {
        (self.thread() >> 5).of_lane(0).named("warp")
    }

    /// The CTA in the grid.
    #[track_caller]
    pub fn cta(&self) -> Value<'_, u32> {
        self.special(Special::Cta(0), "cta")
    }

    /// The CTA in the grid's second dimension.
    #[track_caller]
    pub fn cta_y(&self) -> Value<'_, u32> {
        self.special(Special::Cta(1), "cta_y")
    }

    /// The CTA in the grid's third dimension.
    #[track_caller]
    pub fn cta_z(&self) -> Value<'_, u32> {
        self.special(Special::Cta(2), "cta_z")
    }

    /// CTAs of the grid.
    #[track_caller]
    pub fn ctas(&self) -> Value<'_, u32> {
        self.special(Special::Grid(0), "ctas")
    }

    /// The CTA's rank in its cluster.
    #[track_caller]
    pub fn cluster_rank(&self) -> Value<'_, u32> {
        self.special(Special::ClusterRank, "rank")
    }

    /// Nanoseconds of the device's clock; each call reads it anew.
    #[track_caller]
    pub fn global_timer(&self) -> Value<'_, u64> {
        let [time] = self.effect(Op::Sync(Sync::Special(Special::GlobalTimer)), &[]);
        time
    }

    #[track_caller]
    fn sync(&self, op: Sync, operands: &[Operand]) {
        self.act(Op::Sync(op), operands);
    }

    /// Waits for all threads of the CTA.
    #[track_caller]
    pub fn sync_threads(&self) {
        let threads = self.0.borrow().kernel.threads;
        self.sync_some(0, threads);
    }

    /// Waits until `threads` threads came to barrier `id` (0 to 15; 0 is that of [`Builder::sync_threads`]).
    #[track_caller]
    pub fn sync_some(&self, id: impl Of<u32>, threads: u32) {
        self.sync(Sync::Barrier, &[id.of(), Operand::Const(threads.into())]);
    }

    /// Comes to barrier `id` without waiting.
    #[track_caller]
    pub fn arrive_some(&self, id: impl Of<u32>, threads: u32) {
        self.sync(Sync::BarrierArrive, &[id.of(), Operand::Const(threads.into())]);
    }

    /// Orders what it says.
    #[track_caller]
    pub fn fence(&self, fence: Fence) {
        self.sync(Sync::Fence(fence), &[]);
    }

    /// Arrives at the cluster's barrier and waits there.
    #[track_caller]
    pub fn sync_cluster(&self) {
        self.sync(Sync::ClusterArrive, &[]);
        self.sync(Sync::ClusterWait, &[]);
    }

    /// The same shared address in another CTA of the cluster.
    #[track_caller]
    pub fn map_to_cta<'k>(&'k self, address: Value<'k, u32>, rank: impl Of<u32>) -> Value<'k, u32> {
        self.pure(Op::Sync(Sync::MapToCta), &[address.is, rank.of()])
    }

    /// Up to so many registers for each thread of this warpgroup.
    #[track_caller]
    pub fn take_registers(&self, count: u32) {
        self.sync(Sync::TakeRegisters(count), &[]);
    }

    /// Down to so many registers for each thread of this warpgroup.
    #[track_caller]
    pub fn give_registers(&self, count: u32) {
        self.sync(Sync::GiveRegisters(count), &[]);
    }

    /// Lets kernels that depend on this one begin.
    #[track_caller]
    pub fn launch_dependents(&self) {
        self.sync(Sync::LaunchDependents, &[]);
    }

    /// Waits for the kernels that this one depends on.
    #[track_caller]
    pub fn wait_for_prerequisites(&self) {
        self.sync(Sync::WaitForPrerequisites, &[]);
    }

    /// Sleeps for about so many nanoseconds.
    #[track_caller]
    pub fn sleep(&self, nanoseconds: impl Of<u32>) {
        self.sync(Sync::Sleep, &[nanoseconds.of()]);
    }

    /// Ends the kernel with an error.
    #[track_caller]
    pub fn trap(&self) {
        self.sync(Sync::Trap, &[]);
    }

    /// `count` mbarriers in shared memory, not yet initialised.
    #[track_caller]
    pub fn barriers(&self, name: &str, count: usize) -> Barrier<'_> {
        Barrier(self.shared(name, count, 8))
    }
}

/// An mbarrier, or the first of several.
#[derive(Debug, Clone, Copy)]
pub struct Barrier<'k>(pub(super) Shared<'k, u64>);

impl<'k> Barrier<'k> {
    /// The one `index` further on.
    #[must_use]
    #[track_caller]
    pub fn at(self, index: impl Of<u32>) -> Self {
        Self(self.0.at(index))
    }

    /// The same in another CTA of the cluster.
    #[must_use]
    #[track_caller]
    pub fn of_cta(self, rank: impl Of<u32>) -> Self {
        Self(self.0.of_cta(rank))
    }

    /// Its address.
    #[track_caller]
    pub fn address(self) -> Value<'k, u32> {
        self.0.address()
    }

    #[track_caller]
    fn act(self, op: Mbarrier, operands: &[Operand]) {
        let operands = [&self.0.operands()[..], operands].concat();
        self.0.builder().act(Op::Sync(Sync::Mbarrier(op)), &operands);
    }

    /// Begins its life in phase 0, which ends after so many arrivals. By one thread; others need a barrier of the CTA to see it,
    /// asynchronous copies [`Fence::MbarrierInit`].
    #[track_caller]
    pub fn init(self, arrivals: impl Of<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        self.act(Mbarrier::Init, &[arrivals.of()]);
    }

    /// Ends its life: its memory may be used for other things. By one thread, when nobody waits any more.
    #[track_caller]
    pub fn invalidate(self) {
        let _line = self.0.builder().at_line(Location::caller());
        self.act(Mbarrier::Invalidate, &[]);
    }

    /// One arrival.
    #[track_caller]
    pub fn arrive(self) {
        let _line = self.0.builder().at_line(Location::caller());
        self.act(Mbarrier::Arrive, &[]);
    }

    /// One arrival at the barrier of another CTA ([`Barrier::of_cta`]).
    #[track_caller]
    pub fn arrive_remote(self) {
        let _line = self.0.builder().at_line(Location::caller());
        self.act(Mbarrier::ArriveRemote, &[]);
    }

    /// One arrival, and the phase waits for so many bytes more.
    #[track_caller]
    pub fn arrive_expecting(self, bytes: impl Of<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        self.act(Mbarrier::ArriveExpect, &[bytes.of()]);
    }

    /// The phase waits for so many bytes more.
    #[track_caller]
    pub fn expect(self, bytes: impl Of<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        self.act(Mbarrier::Expect, &[bytes.of()]);
    }

    /// Whether the phase of parity `parity` is over.
    #[track_caller]
    pub fn is_over(self, parity: impl Of<u32>) -> Value<'k, bool> {
        let _line = self.0.builder().at_line(Location::caller());
        let operands = [&self.0.operands()[..], &[parity.of()]].concat();
        let [over] = self.0.builder().effect(Op::Sync(Sync::Mbarrier(Mbarrier::TryWait)), &operands);
        over
    }

    /// Waits until the phase of parity `parity` is over.
    #[track_caller]
    pub fn wait(self, parity: impl Of<u32>) {
        let _line = self.0.builder().at_line(Location::caller());
        let k = self.0.builder();
        k.forever(|| k.leave_when(self.is_over(Value::<u32>::new(k, parity.of()))));
    }
}
