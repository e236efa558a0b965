//! Sums over the threads of a CTA, each of those before it.
//!
//! Shuffles are what they cost: an SM does one warp's a cycle. So warps add up for themselves, those that have something to add,
//! and one of them alone adds up the warps.

use super::THREADS;
use tilewright_ptx::{
    build::{Arithmetic, Builder, Shared, Stored, Value},
    isa::{types::Scalar, warp::Shuffle},
};

const WARPS: usize = THREADS as usize / 32;

/// Memory of the sums of warps, for one scan.
#[derive(Clone, Copy)]
pub(super) struct Scan<'k, T: Scalar> {
    /// `[warps + 1]`: what is before each; of all.
    warps: Shared<'k, T>,
}

/// What can be added up.
pub(super) trait Summed: Arithmetic + Stored {
    /// The value of the lane so far below this one, or its own where there is none.
    fn from_below<'k>(k: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self>;
    /// Nothing.
    fn zero(k: &Builder) -> Value<'_, Self>;
}

impl Summed for u32 {
    fn from_below<'k>(_: &'k Builder, value: Value<'k, Self>, distance: u32) -> Value<'k, Self> {
        value.shuffle(Shuffle::Up, distance)
    }

    fn zero(k: &Builder) -> Value<'_, Self> {
        k.constant(0)
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
}

impl<'k, T: Summed> Scan<'k, T> {
    pub(super) fn declare(k: &'k Builder, name: &str) -> Self {
        Self { warps: k.shared(name, WARPS + 1, 8) }
    }

    /// The sum of `value` over the threads before this one, and over all of them; threads from `used` on have 0. All threads take
    /// part, once. What they wrote to memory before, all see afterwards.
    pub(super) fn exclusive(
        self,
        k: &'k Builder,
        value: Value<'k, T>,
        used: Value<'k, u32>,
    ) -> (Value<'k, T>, Value<'k, T>) {
        let (warp, last) = (k.warp_index(), k.lane().eq(31));
        let with = k.var("with", T::zero(k));
        k.when((warp * 32).lt(used), || with.set(of_warp(k, value)));
        k.when(last, || self.warps.at(warp).store(with.get()));
        k.sync_threads();
        k.when(warp.eq(0), || {
            let sum = self.warps.at(k.lane()).load();
            let with = of_warp(k, sum);
            self.warps.at(k.lane()).store(with - sum);
            k.when(last, || self.warps.plus(WARPS).store(with));
        });
        k.sync_threads();
        (self.warps.at(warp).load() + with.get() - value, self.warps.plus(WARPS).load())
    }
}

/// The sum over a warp's lanes up to this one.
fn of_warp<'k, T: Summed>(k: &'k Builder, value: Value<'k, T>) -> Value<'k, T> {
    let mut sum = value;
    for distance in [1_u32, 2, 4, 8, 16] {
        let below = T::from_below(k, sum, distance);
        sum = sum + below.unless(k.lane().lt(distance), T::zero(k));
    }
    sum
}
