//! Scales of quantized keys and values: one per tensor or head, or one per page in 8-bit caches.
//!
//! A single scale is folded into the scale of logits or outputs. Per-page scales are loaded with the page-table lookup
//! (`page_lookup`) and stored after the keys and values of a stage. S is multiplied by the key's scale before masking, and
//! P by the value's scale before rounding:
//!
//! ```text
//! O = Σ p · v · s = R · Σ (p · s / R) · v
//! ```
//!
//! The running scale `R` is the maximum power of two of all scales so far, which keeps P in the range of f16. It is uniform per
//! warp and kept in shared memory to reduce register pressure.

use super::{cta::MmaCta, fragments::AccFragment, partition::ThreadGroup};
use crate::attention::params::ScaleTensorRegs;
use tilewright_ptx::{Shared, Value, WarpReduction};

/// The minimum and maximum `R` with normal reciprocals: 2^-126 and 2^126.
const MIN_RUNNING_SCALE: u32 = 1 << 23;
const MAX_RUNNING_SCALE: u32 = 253 << 23;
/// Exponent bits of an f32.
const EXPONENT: u32 = 0xff << 23;

/// Whether scales are per page; `None` if that is not compiled in.
fn per_page<'k>(cta: &MmaCta<'k>) -> Option<Value<'k, bool>> {
    let params = &cta.params;
    let any = |page: Value<'k, u64>| page.low() | page.high();
    (cta.kv.size() == 1).then(|| (any(params.k_scale.page) | any(params.v_scale.page)).ne(0))
}

/// The scale of an item's keys or values; 1 if scales are per page.
#[track_caller]
pub(crate) fn item_scale<'k>(
    cta: &MmaCta<'k>,
    scale: ScaleTensorRegs<'k>,
    head: Value<'k, u32>,
) -> Value<'k, f32> {
    item_scale_or(cta, scale, head, || cta.k.constant(1.0))
}

/// The scale of this warp's accumulators: that of the item's values, or `R`.
#[track_caller]
pub(crate) fn accumulator_scale<'k>(cta: &MmaCta<'k>, head: Value<'k, u32>) -> Value<'k, f32> {
    let running_scale = || running_scale_slot(cta, cta.k.thread() >> 5).cast().load();
    item_scale_or(cta, cta.params.v_scale, head, running_scale)
}

fn item_scale_or<'k>(
    cta: &MmaCta<'k>,
    scale: ScaleTensorRegs<'k>,
    head: Value<'k, u32>,
    if_per_page: impl FnOnce() -> Value<'k, f32>,
) -> Value<'k, f32> {
    let k = cta.k;
    let Some(per_page) = per_page(cta) else { return scale.at(k, k.constant(0), head) };
    let value = k.unset_var("factor_of_item");
    k.when_else(per_page, || value.set(if_per_page()), || value.set(scale.at(k, k.constant(0), head)));
    value.get()
}

/// The bits of a key's or value's scale, if scales are per page and the key exists; otherwise 0.
#[track_caller]
pub(crate) fn entry_scale<'k>(
    cta: &MmaCta<'k>,
    is_key: Value<'k, bool>,
    exists: Value<'k, bool>,
    page: Value<'k, u32>,
    head: Value<'k, u32>,
) -> Value<'k, u32> {
    let (k, params) = (cta.k, &cta.params);
    let Some(per_page) = per_page(cta) else { return k.constant(0) };
    let value = k.var::<f32>("factor_of_key", 0.0);
    k.when(per_page & exists, || {
        let set = |scale: ScaleTensorRegs<'k>| value.set(scale.at(k, page, head));
        k.when_else(is_key, || set(params.k_scale), || set(params.v_scale));
    });
    value.get().reinterpret()
}

/// `R` of a warp, or 1 if scales are not per page; `None` if that is not compiled in.
#[track_caller]
pub(crate) fn running_scale<'k>(cta: &MmaCta<'k>, warp: Value<'k, u32>) -> Option<Value<'k, f32>> {
    per_page(cta).map(|per_page| {
        let running_scale = cta.k.var::<f32>("reference", 1.0);
        cta.k.when(per_page, || running_scale.set(running_scale_slot(cta, warp).cast().load()));
        running_scale.get()
    })
}

/// `R` of a warp, `1 / R`, and the previous `R` divided by `R`.
#[track_caller]
fn running_scale_slot<'k>(cta: &MmaCta<'k>, warp: Value<'k, u32>) -> Shared<'k, u32> {
    cta.at::<u32>(cta.layout.running_scales).at(warp << 2)
}

/// Per-page scales of a body; no-ops if they are not compiled in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageScales<'k> {
    cta: MmaCta<'k>,
    /// Keys per KV tile or stage.
    keys: usize,
    /// Whether scales are per page, and this warp's [`running_scale_slot`].
    per_page: Option<(Value<'k, bool>, Shared<'k, u32>)>,
}

/// Rescaling of weights and accumulators to the running scale of a tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageRescale<'k> {
    page_scales: PageScales<'k>,
    at: Shared<'k, f32>,
}

impl<'k> PageScales<'k> {
    /// Starts with the minimum `R`, which is valid after a barrier.
    pub(crate) fn new(cta: &MmaCta<'k>, keys: usize) -> Self {
        let per_page = per_page(cta).map(|per_page| (per_page, running_scale_slot(cta, cta.k.thread() >> 5)));
        let new = Self { cta: *cta, keys, per_page };
        new.when(|slot| new.set(slot, [MIN_RUNNING_SCALE, 0, 0].map(|word| cta.k.constant(word))));
        new
    }

    fn when(&self, body: impl FnOnce(Shared<'k, u32>)) {
        if let Some((per_page, slot)) = self.per_page {
            self.cta.k.when(per_page, || body(slot));
        }
    }

    fn set(&self, slot: Shared<'k, u32>, words: [Value<'k, u32>; 3]) {
        let k = self.cta.k;
        k.when(k.lane().eq(0), || (0..3).for_each(|at| slot.plus(at).store(words[at])));
    }

    /// Copies the scales from `count` entries to `to`.
    #[track_caller]
    pub(crate) fn copy_to_stage(
        &self,
        threads: ThreadGroup<'k>,
        entries: Shared<'k, u32>,
        count: usize,
        to: Shared<'k, u32>,
    ) {
        let thread = threads.index;
        self.when(|_| {
            for first in (0..count).step_by(threads.count) {
                self.cta.k.when(thread.lt((count - first) as u32), || {
                    to.at(thread).plus(first).store(entries.at(thread << 2).plus(4 * first + 3).load());
                });
            }
        });
    }

    /// The scales of this thread's two columns of each 8 keys, or of their values.
    #[track_caller]
    fn column_scales(&self, at: Shared<'k, f32>) -> impl Iterator<Item = [Value<'k, f32>; 2]> {
        let at = at.at((self.cta.k.lane() & 3) << 1);
        (0..self.keys / 8).map(move |tile| at.plus(8 * tile).load_vector::<2>())
    }

    /// Multiplies logits by the scales of their keys, which are at `at`.
    #[track_caller]
    pub(crate) fn scale_logits(&self, at: Shared<'k, f32>, logits: &[Vec<AccFragment<'k>>]) {
        self.when(|_| {
            for (tile, scales) in self.column_scales(at).enumerate() {
                let sums = logits.iter().flat_map(|logits| logits[tile].into_iter().enumerate());
                sums.for_each(|(i, sum)| sum.set(sum.get() * scales[i % 2]));
            }
        });
    }

    /// Updates the running scale for the values whose scales are at `at`.
    #[track_caller]
    pub(crate) fn update(&self, at: Shared<'k, f32>) -> PageRescale<'k> {
        let k = self.cta.k;
        self.when(|slot| {
            let old = slot.load();
            let lane = k.lane() & (self.keys.min(32) as u32 - 1);
            let exponents = (0..self.keys)
                .step_by(32)
                .map(|key| at.at(lane).plus(key).load().reinterpret::<u32>() & EXPONENT);
            let max_exponent = exponents.reduce(|a, b| a.max(b)).unwrap_or_else(|| k.constant(0));
            let max_exponent = k.reduce_warp(WarpReduction::MaxU32, max_exponent.min(MAX_RUNNING_SCALE));
            let running_scale = old.max(max_exponent);
            // all lanes have read the previous one
            k.sync_warp();
            let inverse = (k.constant(254_u32 << 23) - running_scale).reinterpret::<f32>();
            let old_ratio = (old.reinterpret::<f32>() * inverse).reinterpret::<u32>();
            self.set(slot, [running_scale, inverse.reinterpret(), old_ratio]);
            k.sync_warp();
        });
        PageRescale { page_scales: *self, at }
    }
}

impl<'k> PageRescale<'k> {
    /// Multiplies weights by the scales of their values, relative to `R`.
    #[track_caller]
    pub(crate) fn scale_weights(&self, weights: &[AccFragment<'k>]) {
        self.page_scales.when(|slot| {
            let inverse = slot.plus(1).cast::<f32>().load();
            for (tile, scales) in weights.iter().zip(self.page_scales.column_scales(self.at)) {
                let scales = scales.map(|scale| scale * inverse);
                tile.iter().enumerate().for_each(|(i, weight)| weight.set(weight.get() * scales[i % 2]));
            }
        });
    }

    /// The rescale factors of the accumulators to new maxima and this `R`.
    #[track_caller]
    pub(crate) fn rescale_factors(&self, factors: [Value<'k, f32>; 2]) -> [Value<'k, f32>; 2] {
        let Some((per_page, slot)) = self.page_scales.per_page else { return factors };
        let old_ratio = self.page_scales.cta.k.var("of_before", 1.0);
        self.page_scales.cta.k.when(per_page, || old_ratio.set(slot.plus(2).cast::<f32>().load()));
        factors.map(|factor| factor * old_ratio.get())
    }
}
