//! Sums over the threads of a CTA, each of those before it.

use super::THREADS;
use tilewright_ptx::{
    build::{Builder, Shared, Value},
    isa::warp::Shuffle,
};

/// Memory of the sums of warps.
#[derive(Clone, Copy)]
pub(super) struct Scan<'k> {
    warps: Shared<'k, u64>,
}

impl<'k> Scan<'k> {
    pub(super) fn declare(k: &'k Builder) -> Self {
        Self { warps: k.shared("warp_sums", THREADS as usize / 32, 8) }
    }

    /// The sum of `value` over the threads before this one, and over all of them. All threads take part; none may read what the
    /// last scan gave from memory afterwards.
    pub(super) fn exclusive(self, k: &'k Builder, value: Value<'k, u64>) -> (Value<'k, u64>, Value<'k, u64>) {
        let (inclusive, warp) = (of_warp(k, value), k.warp_index());
        k.when(k.lane().eq(31), || self.warps.at(warp).store(inclusive));
        k.sync_threads();
        // every warp adds up all warps for itself
        let warps = of_warp(k, self.warps.at(k.lane()).load());
        let total = of_lane(k, warps, k.constant(31));
        let before = of_lane(k, warps, warp.max(1) - 1);
        let before = before.unless(warp.eq(0), 0_u64);
        k.sync_threads();
        (before + inclusive - value, total)
    }
}

/// The sum over a warp's lanes up to this one.
fn of_warp<'k>(k: &'k Builder, value: Value<'k, u64>) -> Value<'k, u64> {
    let mut sum = value;
    for distance in [1_u32, 2, 4, 8, 16] {
        let [low, high] = [sum.low(), sum.high()].map(|half| half.shuffle(Shuffle::Up, distance));
        let of_other = k.pack32(low, high).unless(k.lane().lt(distance), 0_u64);
        sum = sum + of_other;
    }
    sum
}

fn of_lane<'k>(k: &'k Builder, value: Value<'k, u64>, lane: Value<'k, u32>) -> Value<'k, u64> {
    k.pack32(value.low().of_lane(lane), value.high().of_lane(lane))
}
