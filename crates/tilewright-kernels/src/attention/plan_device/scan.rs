//! Exclusive scan over the threads of a CTA, with one barrier.
//!
//! Each warp with values scans its own. After the barrier each warp reduces the sums of all warps, which has a shorter latency
//! than one warp that does it for all and a second barrier.

use super::{PlanDeviceRegs, THREADS};
use tilewright_ptx::{Arithmetic, Builder, Shared, Shuffle, Stored, Value, WarpReduction};

const WARPS: usize = THREADS as usize / 32;

/// Warp sums of one scan of `N` values per thread.
#[derive(Clone, Copy)]
pub(super) struct Scan<'k, T, const N: usize> {
    /// Indices of this warp and lane.
    warp: Value<'k, u32>,
    lane: Value<'k, u32>,
    /// `[warps][N]`
    sums: Shared<'k, T>,
}

/// A scan after its warp-level step.
#[derive(Clone, Copy)]
pub(super) struct PartialScan<'k, T, const N: usize> {
    scan: Scan<'k, T, N>,
    /// The sums over the lower lanes.
    before: [Value<'k, T>; N],
}

/// A type that can be scanned.
pub(super) trait Scannable: Arithmetic + Stored {
    /// The value of the lane `distance` below, or the lane's own if there is none.
    fn shuffle_up<'k>(k: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self>;
    /// The sum of the lanes before `count`, which is at most 31, and the sum of all.
    fn sum_first<'k>(
        k: &'k Builder,
        value: Value<'k, Self>,
        count_and_lane: [Value<'k, u32>; 2],
    ) -> [Value<'k, Self>; 2];
}

impl Scannable for u32 {
    fn shuffle_up<'k>(_: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self> {
        value.shuffle(Shuffle::Up, distance)
    }

    fn sum_first<'k>(
        k: &'k Builder,
        value: Value<'k, Self>,
        [count, lane]: [Value<'k, u32>; 2],
    ) -> [Value<'k, Self>; 2] {
        [value.unless(lane.ge(count), 0_u32), value].map(|value| k.reduce_warp(WarpReduction::Add, value))
    }
}

impl Scannable for u64 {
    fn shuffle_up<'k>(k: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self> {
        let [low, high] = [value.low(), value.high()].map(|half| half.shuffle(Shuffle::Up, distance));
        k.pack32(low, high)
    }

    fn sum_first<'k>(
        k: &'k Builder,
        value: Value<'k, Self>,
        [count, lane]: [Value<'k, u32>; 2],
    ) -> [Value<'k, Self>; 2] {
        let [with] = scan_warp(k, [value], lane);
        let of_lane = |value: Value<'k, u64>, lane: Value<'k, u32>| {
            k.pack32(value.low().of_lane(lane), value.high().of_lane(lane))
        };
        [of_lane(with - value, count), of_lane(with, k.constant(31))]
    }
}

impl<'k, T: Scannable, const N: usize> Scan<'k, T, N> {
    pub(super) fn declare(k: &'k Builder, name: &str, p: &PlanDeviceRegs<'k>) -> Self {
        Self { warp: p.warp, lane: p.lane, sums: k.shared(name, N * WARPS, 8) }
    }

    /// Zeroes the warp sums; each warp clears its own.
    pub(super) fn clear(self, k: &'k Builder) {
        k.when(self.lane.eq(31), || self.store([k.constant(T::from_bits(0)); N]));
    }

    /// Scans a warp if `active`, which must be uniform; otherwise values must be 0. A barrier must follow before
    /// [`PartialScan::finish`].
    pub(super) fn start(
        self,
        k: &'k Builder,
        values: [Value<'k, T>; N],
        active: Value<'k, bool>,
    ) -> PartialScan<'k, T, N> {
        let with = values.map(|_| k.var("with", T::from_bits(0)));
        k.when(active, || {
            with.into_iter().zip(scan_warp(k, values, self.lane)).for_each(|(var, sum)| var.set(sum));
        });
        let with = with.map(|var| var.get());
        k.when(self.lane.eq(31), || self.store(with));
        PartialScan { scan: self, before: std::array::from_fn(|i| with[i] - values[i]) }
    }

    fn store(self, sums: [Value<'k, T>; N]) {
        let at = self.sums.at(self.warp * N as u32);
        sums.into_iter().enumerate().for_each(|(i, sum)| at.plus(i).store(sum));
    }
}

impl<'k, T: Scannable, const N: usize> PartialScan<'k, T, N> {
    /// The sums over the previous threads, and over all. Called by whole warps.
    pub(super) fn finish(self, k: &'k Builder) -> [[Value<'k, T>; 2]; N] {
        let Scan { warp, lane, sums } = self.scan;
        let at = sums.at(lane * N as u32);
        let sums: [Value<'k, T>; N] = std::array::from_fn(|i| at.plus(i).load());
        let of_warps = sums.map(|sum| T::sum_first(k, sum, [warp, lane]));
        std::array::from_fn(|i| [of_warps[i][0] + self.before[i], of_warps[i][1]])
    }
}

/// Inclusive scan over a warp.
fn scan_warp<'k, T: Scannable, const N: usize>(
    k: &'k Builder,
    values: [Value<'k, T>; N],
    lane: Value<'k, u32>,
) -> [Value<'k, T>; N] {
    [1_u32, 2, 4, 8, 16].into_iter().fold(values, |sums, distance| {
        let below = sums.map(|sum| T::shuffle_up(k, sum, distance));
        std::array::from_fn(|i| sums[i] + below[i].unless(lane.lt(distance), T::from_bits(0)))
    })
}
