//! Warp-level primitives: shuffles, votes, reductions, `elect`.

use super::{Builder, IntoOperand, Value};
use crate::{
    ir::Operand,
    isa::{Op, Scalar, Shuffle, WarpOp, WarpReduction},
};

impl<T: Scalar> Value<'_, T> {
    /// The value of lane `lane ^ mask`; `T` has 32 bits.
    #[must_use]
    #[track_caller]
    pub fn shuffle_xor(self, mask: impl IntoOperand<u32>) -> Self {
        self.shuffle(Shuffle::Butterfly, mask)
    }

    /// The value of lane `lane`.
    #[must_use]
    #[track_caller]
    pub fn of_lane(self, lane: impl IntoOperand<u32>) -> Self {
        self.shuffle(Shuffle::Index, lane)
    }

    /// The value of the lane that `kind` and `which` select.
    #[must_use]
    #[track_caller]
    pub fn shuffle(self, kind: Shuffle, which: impl IntoOperand<u32>) -> Self {
        let value = self.k.in_register(self);
        let [shuffled] =
            self.k.effect(Op::Warp(WarpOp::Shuffle(kind)), &[value.operand, which.into_operand()]);
        shuffled
    }
}

impl Builder {
    #[track_caller]
    fn warp<T: Scalar>(&self, op: WarpOp, operands: &[Operand]) -> Value<'_, T> {
        let [value] = self.effect(Op::Warp(op), operands);
        value
    }

    /// A bitmask of the lanes with a true `condition`.
    #[track_caller]
    pub fn ballot(&self, condition: Value<'_, bool>) -> Value<'_, u32> {
        self.warp(WarpOp::Ballot, &[condition.operand])
    }

    /// Returns whether `condition` is true in any lane.
    #[track_caller]
    pub fn any(&self, condition: Value<'_, bool>) -> Value<'_, bool> {
        self.warp(WarpOp::Any, &[condition.operand])
    }

    /// Returns whether `condition` is true in all lanes.
    #[track_caller]
    pub fn all(&self, condition: Value<'_, bool>) -> Value<'_, bool> {
        self.warp(WarpOp::All, &[condition.operand])
    }

    /// Reduces the words of all lanes to one.
    #[track_caller]
    pub fn reduce_warp(&self, op: WarpReduction, value: impl IntoOperand<u32>) -> Value<'_, u32> {
        self.warp(WarpOp::Reduce(op), &[value.into_operand()])
    }

    /// Elects one lane of the warp: true in that lane only.
    #[track_caller]
    pub fn elect(&self) -> Value<'_, bool> {
        self.warp(WarpOp::Elect, &[])
    }

    /// Barrier of the warp's lanes, with memory ordering between them.
    #[track_caller]
    pub fn sync_warp(&self) {
        self.emit(Op::Warp(WarpOp::Sync), &[]);
    }
}
