//! Asynchronous copies.

use super::{Barrier, Builder, CachePolicy, Global, IntoOperand, Shared, Value};
use crate::{
    ir::Operand,
    isa::{Op, copies::CopyOp, types::Scalar},
};

/// An asynchronous copy of 4, 8 or 16 bytes from global to shared memory.
#[derive(Debug)]
pub struct GlobalToShared<'k, T> {
    to: Shared<'k, T>,
    from: Global<'k, T>,
    bytes: usize,
    policy: Option<CachePolicy<'k>>,
}

impl<'k, T> GlobalToShared<'k, T> {
    /// A copy with the default L2 cache policy.
    pub fn new(to: Shared<'k, T>, from: Global<'k, T>, bytes: usize) -> Self {
        Self { to, from, bytes, policy: None }
    }

    /// The copy with an L2 cache policy, if there is one.
    #[must_use]
    pub fn with_policy(self, policy: Option<CachePolicy<'k>>) -> Self {
        Self { policy, ..self }
    }
}

/// A box of a tensor.
#[derive(Debug, Clone, Copy)]
pub struct TensorBox<'c, 'k> {
    /// The address of the tensor map.
    pub map: Value<'k, u64>,
    /// The coordinates of its first element, innermost first.
    pub corner: &'c [Value<'k, u32>],
    /// The L2 cache policy of its bytes, if it is not the default one.
    pub policy: Option<CachePolicy<'k>>,
    /// The CTAs of the cluster that receive it, or 1: this one alone.
    pub ctas: u32,
}

impl<'c, 'k> TensorBox<'c, 'k> {
    /// A box for this CTA with the default L2 cache policy.
    pub fn new(map: Value<'k, u64>, corner: &'c [Value<'k, u32>]) -> Self {
        Self { map, corner, policy: None, ctas: 1 }
    }
}

impl Builder {
    #[track_caller]
    fn copy_op(&self, op: CopyOp, operands: &[&[Operand]]) {
        self.emit(Op::Copy(op), &operands.concat());
    }

    /// Starts a copy. Only the first `read` bytes are read; the rest is zero-filled.
    #[track_caller]
    pub fn copy_async<T: Scalar>(&self, copy: GlobalToShared<'_, T>, read: impl IntoOperand<u32>) {
        let (policy, last) = CachePolicy::operand(copy.policy);
        let operands: [&[Operand]; 4] =
            [&copy.to.operands(), &copy.from.operands(), &[read.into_operand()], &last];
        self.copy_op(CopyOp::Async(copy.bytes, policy), &operands);
    }

    /// Copies 4, 8 or 16 bytes, or zero-fills them without a read if `absent`. A predicate takes fewer instructions than a byte
    /// count.
    #[track_caller]
    pub fn copy_async_unless<T: Scalar>(
        &self,
        absent: Value<'_, bool>,
        to: Shared<'_, T>,
        from: Global<'_, T>,
        bytes: usize,
    ) {
        self.copy_op(
            CopyOp::AsyncUnless(bytes),
            &[&to.operands(), &from.operands(), &[absent.into_operand()]],
        );
    }

    /// Commits this thread's pending copies as a group.
    #[track_caller]
    pub fn commit_copies(&self) {
        self.copy_op(CopyOp::AsyncCommit, &[]);
    }

    /// Waits until at most `incomplete` of this thread's most recent groups are incomplete.
    #[track_caller]
    pub fn wait_copies(&self, incomplete: usize) {
        self.copy_op(CopyOp::AsyncWait(incomplete), &[]);
    }

    /// Arrives at `barrier` when this thread's prior copies are complete.
    #[track_caller]
    pub fn arrive_after_copies(&self, barrier: Barrier<'_>) {
        self.copy_op(CopyOp::AsyncArrive, &[&barrier.0.operands()]);
    }

    /// Copies `bytes`, a multiple of 16, and signals them to `barrier`.
    #[track_caller]
    pub fn load_bulk<T: Scalar>(
        &self,
        to: Shared<'_, T>,
        from: Global<'_, T>,
        bytes: impl IntoOperand<u32>,
        barrier: Barrier<'_>,
    ) {
        let operands: [&[Operand]; 4] =
            [&to.operands(), &from.operands(), &[bytes.into_operand()], &barrier.0.operands()];
        self.copy_op(CopyOp::BulkLoad, &operands);
    }

    /// Loads a box of a tensor and signals its bytes to `barrier`: those of this CTA, or of each of several CTAs of the cluster, at the
    /// same addresses.
    #[track_caller]
    pub fn load_tensor<T: Scalar>(&self, to: Shared<'_, T>, from: TensorBox<'_, '_>, barrier: Barrier<'_>) {
        let corner: Vec<Operand> = from.corner.iter().map(|at| at.operand).collect();
        let (policy, last) = CachePolicy::operand(from.policy);
        let op = CopyOp::TensorLoad { dims: corner.len(), ctas: from.ctas, policy };
        let map = [from.map.operand, Operand::Const(0)];
        self.copy_op(op, &[&to.operands(), &map, &barrier.0.operands(), &corner, &last]);
    }
}
