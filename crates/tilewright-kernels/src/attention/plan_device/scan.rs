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

/// Memory of the sums of warps, for one scan of `N` values of each thread.
#[derive(Clone, Copy)]
pub(super) struct Scan<'k, T, const N: usize> {
    /// The numbers of this warp and lane.
    warp: Value<'k, u32>,
    lane: Value<'k, u32>,
    /// `[warps][N]`
    sums: Shared<'k, T>,
}

/// A scan whose warps have added up.
#[derive(Clone, Copy)]
pub(super) struct Started<'k, T, const N: usize> {
    scan: Scan<'k, T, N>,
    /// The sums over the lanes before this one.
    before: [Value<'k, T>; N],
}

/// What can be added up.
pub(super) trait Summed: Arithmetic + Stored {
    /// The value of the lane so far below this one, or its own where there is none.
    fn from_below<'k>(k: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self>;
    /// Nothing.
    fn zero(k: &Builder) -> Value<'_, Self>;
    /// The sum of the lanes before `count`, which is at most 31, and that of all.
    fn of_first<'k>(
        k: &'k Builder,
        value: Value<'k, Self>,
        count_and_lane: [Value<'k, u32>; 2],
    ) -> [Value<'k, Self>; 2];
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
    ) -> [Value<'k, Self>; 2] {
        [value.unless(lane.ge(count), 0_u32), value].map(|value| k.reduce_warp(WarpReduction::Add, value))
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
    ) -> [Value<'k, Self>; 2] {
        let [with] = of_warp(k, [value], lane);
        let of_lane = |value: Value<'k, u64>, lane: Value<'k, u32>| {
            k.pack32(value.low().of_lane(lane), value.high().of_lane(lane))
        };
        [of_lane(with - value, count), of_lane(with, k.constant(31))]
    }
}

impl<'k, T: Summed, const N: usize> Scan<'k, T, N> {
    pub(super) fn declare(k: &'k Builder, name: &str, p: &Params<'k>) -> Self {
        Self { warp: p.warp, lane: p.lane, sums: k.shared(name, N * WARPS, 8) }
    }

    /// The sums of warps are 0 until they are added up. Each warp clears its own.
    pub(super) fn clear(self, k: &'k Builder) {
        k.when(self.lane.eq(31), || self.store([T::zero(k); N]));
    }

    /// Adds up a warp, if there is something to add `here`, which is the same in all lanes, and otherwise values are 0. A barrier
    /// comes before [`Started::finish`].
    pub(super) fn start(
        self,
        k: &'k Builder,
        values: [Value<'k, T>; N],
        here: Value<'k, bool>,
    ) -> Started<'k, T, N> {
        let with = values.map(|_| k.var("with", T::zero(k)));
        k.when(here, || {
            with.into_iter().zip(of_warp(k, values, self.lane)).for_each(|(var, sum)| var.set(sum));
        });
        let with = with.map(|var| var.get());
        k.when(self.lane.eq(31), || self.store(with));
        Started { scan: self, before: std::array::from_fn(|i| with[i] - values[i]) }
    }

    fn store(self, sums: [Value<'k, T>; N]) {
        let at = self.sums.at(self.warp * N as u32);
        sums.into_iter().enumerate().for_each(|(i, sum)| at.plus(i).store(sum));
    }
}

impl<'k, T: Summed, const N: usize> Started<'k, T, N> {
    /// The sums over the threads before this one, and over all of them. Whole warps ask.
    pub(super) fn finish(self, k: &'k Builder) -> [[Value<'k, T>; 2]; N] {
        let Scan { warp, lane, sums } = self.scan;
        let at = sums.at(lane * N as u32);
        let sums: [Value<'k, T>; N] = std::array::from_fn(|i| at.plus(i).load());
        let of_warps = sums.map(|sum| T::of_first(k, sum, [warp, lane]));
        std::array::from_fn(|i| [of_warps[i][0] + self.before[i], of_warps[i][1]])
    }
}

/// The sums over a warp's lanes up to this one.
fn of_warp<'k, T: Summed, const N: usize>(
    k: &'k Builder,
    values: [Value<'k, T>; N],
    lane: Value<'k, u32>,
) -> [Value<'k, T>; N] {
    [1_u32, 2, 4, 8, 16].into_iter().fold(values, |sums, distance| {
        let below = sums.map(|sum| T::from_below(k, sum, distance));
        std::array::from_fn(|i| sums[i] + below[i].unless(lane.lt(distance), T::zero(k)))
    })
}
