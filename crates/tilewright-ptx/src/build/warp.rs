//! What the lanes of a warp do together.

use super::{Builder, Of, Value};
use crate::{
    ir::Operand,
    isa::{
        Op,
        types::Scalar,
        warp::{Shuffle, Warp, WarpReduction},
    },
};

impl<T: Scalar> Value<'_, T> {
    /// The value of the lane whose number differs in the bits of `mask`; `T` has 32 bits.
    #[must_use]
    #[track_caller]
    pub fn shuffle_xor(self, mask: impl Of<u32>) -> Self {
        self.shuffle(Shuffle::Butterfly, mask)
    }

    /// The value of lane `lane`.
    #[must_use]
    #[track_caller]
    pub fn of_lane(self, lane: impl Of<u32>) -> Self {
        self.shuffle(Shuffle::Index, lane)
    }

    /// The value of the lane that `kind` and `which` say.
    #[must_use]
    #[track_caller]
    pub fn shuffle(self, kind: Shuffle, which: impl Of<u32>) -> Self {
        let value = self.k.in_register(self);
        let [shuffled] = self.k.effect(Op::Warp(Warp::Shuffle(kind)), &[value.is, which.of()]);
        shuffled
    }
}

impl Builder {
    #[track_caller]
    fn warp<T: Scalar>(&self, op: Warp, operands: &[Operand]) -> Value<'_, T> {
        let [value] = self.effect(Op::Warp(op), operands);
        value
    }

    /// One bit for each lane where `condition` holds.
    #[track_caller]
    pub fn ballot(&self, condition: Value<'_, bool>) -> Value<'_, u32> {
        self.warp(Warp::Ballot, &[condition.is])
    }

    /// Whether it holds in any lane.
    #[track_caller]
    pub fn any(&self, condition: Value<'_, bool>) -> Value<'_, bool> {
        self.warp(Warp::Any, &[condition.is])
    }

    /// Whether it holds in all lanes.
    #[track_caller]
    pub fn all(&self, condition: Value<'_, bool>) -> Value<'_, bool> {
        self.warp(Warp::All, &[condition.is])
    }

    /// One word of the words of all lanes.
    #[track_caller]
    pub fn reduce_warp(&self, op: WarpReduction, value: impl Of<u32>) -> Value<'_, u32> {
        self.warp(Warp::Reduce(op), &[value.of()])
    }

    /// The lanes with the same word, one bit each.
    #[track_caller]
    pub fn lanes_like(&self, value: impl Of<u32>) -> Value<'_, u32> {
        self.warp(Warp::Match, &[value.of()])
    }

    /// True in one lane of the warp.
    #[track_caller]
    pub fn elect(&self) -> Value<'_, bool> {
        self.warp(Warp::Elect, &[])
    }

    /// Waits for all lanes of the warp; what they wrote, all see.
    #[track_caller]
    pub fn sync_warp(&self) {
        self.act(Op::Warp(Warp::Sync), &[]);
    }

    /// The lanes that are here, one bit each.
    #[track_caller]
    pub fn active_lanes(&self) -> Value<'_, u32> {
        self.warp(Warp::ActiveMask, &[])
    }
}
