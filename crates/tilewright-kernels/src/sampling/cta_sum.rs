//! Sums over all threads of a row, from one accumulator per thread, and reductions of a warp or CTA.

use super::cta::CtaCollectives;
use tilewright_ptx::{Shuffle, Value, Var, WarpReduction};

/// Per-thread accumulator of a sum over the row's threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct CtaSum<'k> {
    cta: CtaCollectives<'k>,
    sum: Var<'k, u64>,
}

impl<'k> CtaSum<'k> {
    #[track_caller]
    pub(super) fn new(cta: CtaCollectives<'k>) -> Self {
        Self { cta, sum: cta.k.var("sum", 0_u64) }
    }

    #[track_caller]
    pub(super) fn add(&self, mass: Value<'k, u64>) {
        self.sum.set(self.sum.get() + mass);
    }

    /// Sum of this thread.
    #[track_caller]
    pub(super) fn of_thread(&self) -> Value<'k, u64> {
        self.sum.get()
    }

    /// Sum over all threads.
    #[track_caller]
    pub(super) fn of_all(&self) -> Value<'k, u64> {
        self.cta.sum(self.sum.get())
    }
}

impl<'k> CtaCollectives<'k> {
    /// Sum over the warp, in every lane.
    #[track_caller]
    pub(super) fn warp_sum(&self, value: Value<'k, u64>) -> Value<'k, u64> {
        let other = |x: Value<'k, u64>, mask: u32| {
            self.k.pack32(x.low().shuffle_xor(mask), x.high().shuffle_xor(mask))
        };
        [16, 8, 4, 2, 1].into_iter().fold(value, |x, mask| x + other(x, mask))
    }

    /// Maximum over the threads of this CTA; a barrier must come between accesses to the sums of warps and it.
    #[track_caller]
    pub(super) fn max_of_cta(&self, key: Value<'k, u32>) -> Value<'k, u32> {
        let k = self.k;
        let of_warp = k.reduce_warp(WarpReduction::MaxU32, key);
        k.when(k.lane().eq(0), || self.scan_partials.at(k.thread() >> 5).store(of_warp.to_u64()));
        k.sync_threads();
        let of_lane = self.scan_partials.at(k.lane().min(self.warps() - 1)).load();
        k.reduce_warp(WarpReduction::MaxU32, of_lane.low())
    }

    /// Exclusive prefix sum over the threads of this CTA.
    #[track_caller]
    pub(super) fn exclusive_sum(&self, value: Value<'k, u64>) -> Value<'k, u64> {
        self.exclusive_sum_and_total(value).0
    }

    /// [`Self::exclusive_sum`], and the sum over all threads of this CTA.
    #[track_caller]
    pub(super) fn exclusive_sum_and_total(&self, value: Value<'k, u64>) -> (Value<'k, u64>, Value<'k, u64>) {
        let (k, lane) = (self.k, self.k.lane());
        let through = self.warp_scan(value);
        k.sync_threads();
        k.when(lane.eq(31), || self.scan_partials.at(k.thread() >> 5).store(through));
        k.sync_threads();
        let of_warp = self.scan_partials.at(lane.min(self.warps() - 1)).load();
        let of_warps = self.warp_scan(of_warp);
        let warp = k.warp_index();
        let previous = (warp.max(1) - 1).named("previous");
        let of_lane =
            |lane: Value<'k, u32>| k.pack32(of_warps.low().of_lane(lane), of_warps.high().of_lane(lane));
        let before = warp.eq(0).select(0_u64, of_lane(previous)) + (through - value);
        (before, of_lane(k.constant(self.warps() - 1)))
    }

    /// Inclusive prefix sum over lanes.
    #[track_caller]
    pub(super) fn warp_scan(&self, value: Value<'k, u64>) -> Value<'k, u64> {
        let (k, lane) = (self.k, self.k.lane());
        [1_u32, 2, 4, 8, 16].into_iter().fold(value, |sum, distance| {
            let of = |word: Value<'k, u32>| word.shuffle(Shuffle::Up, distance);
            let other = k.pack32(of(sum.low()), of(sum.high()));
            sum + lane.ge(distance).select(other, 0_u64)
        })
    }
}
