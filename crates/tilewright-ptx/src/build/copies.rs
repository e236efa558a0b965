//! Copies that complete later.

use super::{Barrier, Builder, Global, Of, Shared, Value};
use crate::{
    ir::Operand,
    isa::{Op, copies::Copy, types::Scalar},
};

/// What else a tensor load does.
#[derive(Debug, Clone, Copy, Default)]
pub struct BulkOptions<'k> {
    /// Into the CTAs of the cluster whose bits are set, instead of this one alone.
    pub multicast: Option<Value<'k, u16>>,
}

impl Builder {
    #[track_caller]
    fn copy_op(&self, op: Copy, operands: &[&[Operand]]) {
        self.act(Op::Copy(op), &operands.concat());
    }

    /// Copies 4, 8 or 16 bytes; of these `read` are read, and the rest is 0.
    #[track_caller]
    pub fn copy_async<T: Scalar>(
        &self,
        to: Shared<'_, T>,
        from: Global<'_, T>,
        bytes: usize,
        read: impl Of<u32>,
    ) {
        self.copy_op(Copy::Async(bytes), &[&to.operands(), &from.operands(), &[read.of()]]);
    }

    /// Copies 4, 8 or 16 bytes, or makes them 0 where they are `absent`: nothing is read then. It takes fewer instructions than a
    /// number of bytes.
    #[track_caller]
    pub fn copy_async_unless<T: Scalar>(
        &self,
        absent: Value<'_, bool>,
        to: Shared<'_, T>,
        from: Global<'_, T>,
        bytes: usize,
    ) {
        self.copy_op(Copy::AsyncUnless(bytes), &[&to.operands(), &from.operands(), &[absent.of()]]);
    }

    /// Ends a group of this thread's copies.
    #[track_caller]
    pub fn commit_copies(&self) {
        self.copy_op(Copy::AsyncCommit, &[]);
    }

    /// Waits until at most so many of this thread's youngest groups are incomplete.
    #[track_caller]
    pub fn wait_copies(&self, incomplete: usize) {
        self.copy_op(Copy::AsyncWait(incomplete), &[]);
    }

    /// Arrives at `barrier` when this thread's copies so far are complete.
    #[track_caller]
    pub fn arrive_after_copies(&self, barrier: Barrier<'_>) {
        self.copy_op(Copy::AsyncArrive, &[&barrier.0.operands()]);
    }

    /// Copies bytes, a multiple of 16, and reports them to `barrier`.
    #[track_caller]
    pub fn load_bulk<T: Scalar>(
        &self,
        to: Shared<'_, T>,
        from: Global<'_, T>,
        bytes: impl Of<u32>,
        barrier: Barrier<'_>,
    ) {
        let operands: [&[Operand]; 4] =
            [&to.operands(), &from.operands(), &[bytes.of()], &barrier.0.operands()];
        self.copy_op(Copy::BulkLoad, &operands);
    }

    /// Copies bytes, a multiple of 16, in this thread's bulk group.
    #[track_caller]
    pub fn store_bulk<T: Scalar>(&self, to: Global<'_, T>, from: Shared<'_, T>, bytes: impl Of<u32>) {
        self.copy_op(Copy::BulkStore, &[&to.operands(), &from.operands(), &[bytes.of()]]);
    }

    /// The same, added in f32 to what is there.
    #[track_caller]
    pub fn add_bulk(&self, to: Global<'_, f32>, from: Shared<'_, f32>, bytes: impl Of<u32>) {
        self.copy_op(Copy::BulkReduceAddF32, &[&to.operands(), &from.operands(), &[bytes.of()]]);
    }

    /// Loads a box of a tensor, whose corner is at `coordinates` (the innermost first), and reports its bytes to `barrier`.
    #[track_caller]
    pub fn load_tensor<T: Scalar>(
        &self,
        to: Shared<'_, T>,
        (map, coordinates): (Value<'_, u64>, &[Value<'_, u32>]),
        barrier: Barrier<'_>,
        options: BulkOptions<'_>,
    ) {
        let coordinates: Vec<Operand> = coordinates.iter().map(|at| at.is).collect();
        let (map, dims) = ([map.is, Operand::Const(0)], coordinates.len());
        let (op, mask) = match options.multicast {
            None => (Copy::TensorLoad(dims), vec![]),
            Some(mask) => (Copy::TensorLoadMulticast(dims), vec![mask.is]),
        };
        self.copy_op(op, &[&to.operands(), &map, &barrier.0.operands(), &coordinates, &mask]);
    }

    /// Stores a box, in this thread's bulk group.
    #[track_caller]
    pub fn store_tensor<T: Scalar>(
        &self,
        (map, coordinates): (Value<'_, u64>, &[Value<'_, u32>]),
        from: Shared<'_, T>,
    ) {
        let coordinates: Vec<Operand> = coordinates.iter().map(|at| at.is).collect();
        let map = [map.is, Operand::Const(0)];
        self.copy_op(Copy::TensorStore(coordinates.len()), &[&map, &from.operands(), &coordinates]);
    }

    /// Asks for a box in L2.
    #[track_caller]
    pub fn prefetch_tensor(&self, map: Value<'_, u64>, coordinates: &[Value<'_, u32>]) {
        let coordinates: Vec<Operand> = coordinates.iter().map(|at| at.is).collect();
        self.copy_op(Copy::TensorPrefetch(coordinates.len()), &[&[map.is, Operand::Const(0)], &coordinates]);
    }

    /// Ends a group of this thread's bulk stores.
    #[track_caller]
    pub fn commit_bulk(&self) {
        self.copy_op(Copy::BulkCommit, &[]);
    }

    /// Waits until at most so many of this thread's youngest groups still write.
    #[track_caller]
    pub fn wait_bulk(&self, incomplete: usize) {
        self.copy_op(Copy::BulkWait(incomplete), &[]);
    }

    /// Waits until at most so many of them still read shared memory.
    #[track_caller]
    pub fn wait_bulk_read(&self, incomplete: usize) {
        self.copy_op(Copy::BulkWaitRead(incomplete), &[]);
    }
}
