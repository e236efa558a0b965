//! Sums and maxima over lanes and warps.

use tilewright_ptx::build::{Shared, Value};

/// Maximum over four adjacent lanes; the same in all four.
#[track_caller]
pub(crate) fn quad_max(x: Value<'_, f32>) -> Value<'_, f32> {
    [1, 2].into_iter().fold(x, |x, mask| x.max(x.shuffle_xor(mask)))
}

/// [`quad_max`] of several values, interleaved to hide shuffle latency.
#[track_caller]
pub(crate) fn quads_max<'k>(values: Vec<Value<'k, f32>>) -> Vec<Value<'k, f32>> {
    [1, 2].into_iter().fold(values, |values, mask| {
        let others: Vec<_> = values.iter().map(|x| x.shuffle_xor(mask)).collect();
        values.iter().zip(others).map(|(x, other)| x.max(other)).collect()
    })
}

/// Sum over four adjacent lanes; the same in all four.
#[track_caller]
pub(crate) fn quad_sum(x: Value<'_, f32>) -> Value<'_, f32> {
    [1, 2].into_iter().fold(x, |x, mask| x + x.shuffle_xor(mask))
}

/// Sum over a warp; the same in all lanes.
#[track_caller]
pub(crate) fn warp_sum(x: Value<'_, f32>) -> Value<'_, f32> {
    [16, 8, 4, 2, 1].into_iter().fold(x, |x, mask| x + x.shuffle_xor(mask))
}

/// Maximum over a warp; the same in all lanes.
#[track_caller]
pub(crate) fn warp_max(x: Value<'_, f32>) -> Value<'_, f32> {
    [16, 8, 4, 2, 1].into_iter().fold(x, |x, mask| x.max(x.shuffle_xor(mask)))
}

/// Reduces over all `threads` threads of a CTA with `reduce_warp` in each warp and `combine` over warps; the same in
/// all threads. `memory` holds one value per warp; synchronize before reusing it.
#[track_caller]
pub(crate) fn over_cta<'k>(
    memory: Shared<'k, f32>,
    threads: u32,
    x: Value<'k, f32>,
    reduce_warp: impl Fn(Value<'k, f32>) -> Value<'k, f32>,
    combine: impl Fn(Value<'k, f32>, Value<'k, f32>) -> Value<'k, f32>,
) -> Value<'k, f32> {
    let (k, warp_value) = (x.builder(), reduce_warp(x));
    let (thread, warps) = (k.thread(), threads / 32);
    if warps == 1 {
        return warp_value;
    }
    k.when((thread & 31).eq(0), || memory.at(thread >> 5).store(warp_value));
    k.sync_threads();
    let first = memory.load();
    (1..warps as usize).fold(first, |x, warp| combine(x, memory.plus(warp).load()))
}
