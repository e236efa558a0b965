//! Sums over the threads of a CTA, each of those before it, with one barrier.
//!
//! Warps add up for themselves, those that have something to add. Behind the barrier each of them adds up the sums of all warps:
//! that is less to wait for than a warp that does it for all and a second barrier.

use super::{Params, THREADS};
use tilewright_ptx::{
    build::{Arithmetic, Builder, Shared, Stored, Value},
    isa::warp::{Shuffle, WarpReduction},
};

const WARPS: usize = THREADS as usize / 32;

/// Memory of the sums of warps, for one scan.
#[derive(Clone, Copy)]
pub(super) struct Scan<'k, T> {
    /// The numbers of this warp and lane.
    warp: Value<'k, u32>,
    lane: Value<'k, u32>,
    /// `[warps]`
    warps: Shared<'k, T>,
}

/// A scan whose warps have added up.
#[derive(Clone, Copy)]
pub(super) struct Started<'k, T> {
    scan: Scan<'k, T>,
    /// The sum over the lanes before this one.
    before: Value<'k, T>,
}

/// What can be added up.
pub(super) trait Summed: Arithmetic + Stored {
    /// The value of the lane so far below this one, or its own where there is none.
    fn from_below<'k>(k: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self>;
    /// Nothing.
    fn zero(k: &Builder) -> Value<'_, Self>;
    /// The sum of the first `count` lanes' values, at most 31 of them, and that of all; `count` and the number of this lane are told.
    fn of_first<'k>(
        k: &'k Builder,
        value: Value<'k, Self>,
        count_and_lane: [Value<'k, u32>; 2],
    ) -> (Value<'k, Self>, Value<'k, Self>);
}

impl Summed for u32 {
    fn from_below<'k>(_: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self> {
        value.shuffle(Shuffle::Up, distance)
    }

    fn zero(k: &Builder) -> Value<'_, Self> {
        k.constant(0)
    }

    fn of_first<'k>(
        k: &'k Builder,
        value: Value<'k, Self>,
        [count, lane]: [Value<'k, u32>; 2],
    ) -> (Value<'k, Self>, Value<'k, Self>) {
        let first = value.unless(lane.ge(count), 0_u32);
        (k.reduce_warp(WarpReduction::Add, first), k.reduce_warp(WarpReduction::Add, value))
    }
}

impl Summed for u64 {
    fn from_below<'k>(k: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self> {
        let [low, high] = [value.low(), value.high()].map(|half| half.shuffle(Shuffle::Up, distance));
        k.pack32(low, high)
    }

    fn zero(k: &Builder) -> Value<'_, Self> {
        k.constant(0)
    }

    fn of_first<'k>(
        k: &'k Builder,
        value: Value<'k, Self>,
        [count, lane]: [Value<'k, u32>; 2],
    ) -> (Value<'k, Self>, Value<'k, Self>) {
        let with = of_warp(k, value, lane);
        let of_lane = |value: Value<'k, u64>, lane: Value<'k, u32>| {
            k.pack32(value.low().of_lane(lane), value.high().of_lane(lane))
        };
        (of_lane(with - value, count), of_lane(with, k.constant(31)))
    }
}

impl<'k, T: Summed> Scan<'k, T> {
    pub(super) fn declare(k: &'k Builder, name: &str, p: &Params<'k>) -> Self {
        Self { warp: p.warp, lane: p.lane, warps: k.shared(name, WARPS, 8) }
    }

    /// Adds up warps. Threads from `used` on have 0. All threads take part, once; a barrier comes before [`Started::finish`].
    pub(super) fn start(self, k: &'k Builder, value: Value<'k, T>, used: Value<'k, u32>) -> Started<'k, T> {
        let with = k.var("with", T::zero(k));
        k.when((self.warp * 32).lt(used), || with.set(of_warp(k, value, self.lane)));
        k.when(self.lane.eq(31), || self.warps.at(self.warp).store(with.get()));
        Started { scan: self, before: with.get() - value }
    }
}

impl<'k, T: Summed> Started<'k, T> {
    /// The sum over the threads before this one, and over all of them. Whole warps ask.
    pub(super) fn finish(self, k: &'k Builder) -> (Value<'k, T>, Value<'k, T>) {
        let (before, total) =
            T::of_first(k, self.scan.warps.at(self.scan.lane).load(), [self.scan.warp, self.scan.lane]);
        (before + self.before, total)
    }
}

/// The sum over a warp's lanes up to this one.
fn of_warp<'k, T: Summed>(k: &'k Builder, value: Value<'k, T>, lane: Value<'k, u32>) -> Value<'k, T> {
    let mut sum = value;
    for distance in [1_u32, 2, 4, 8, 16] {
        let below = T::from_below(k, sum, distance);
        sum = sum + below.unless(lane.lt(distance), T::zero(k));
    }
    sum
}
