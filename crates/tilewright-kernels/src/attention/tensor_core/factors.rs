//! Scales of quantized keys and values: one per tensor or head, or one per page in 8-bit caches.
//!
//! A single scale is folded into the scale of logits or outputs. Per-page scales are loaded with the page-table lookup
//! (`page_lookup`) and stored after the keys of a stage, `[2][keys]` f32. S is multiplied by the key's scale before masking, and
//! P by the value's scale before rounding:
//!
//! ```text
//! O = Σ p · v · s = R · Σ (p · s / R) · v
//! ```
//!
//! The running scale `R` is the maximum power of two of all scales so far, which keeps P in the range of f16. It is uniform per
//! warp and kept in shared memory to reduce register pressure.

use super::{cta::Cta, fragments::Sums};
use crate::attention::call::ScaleParams;
use tilewright_ptx::{
    build::{Shared, Value},
    isa::warp::WarpReduction,
};

/// The minimum and maximum `R` with normal reciprocals: 2^-126 and 2^126.
const LEAST: u32 = 1 << 23;
const MOST: u32 = 253 << 23;
/// Exponent bits of an f32.
const EXPONENT: u32 = 0xff << 23;

/// Whether scales are per page; `None` if that is not compiled in.
fn of_pages<'k>(cta: &Cta<'k>) -> Option<Value<'k, bool>> {
    let params = &cta.params;
    let any = |page: Value<'k, u64>| page.low() | page.high();
    (cta.kv.size() == 1).then(|| (any(params.k_scale.page) | any(params.v_scale.page)).ne(0))
}

/// The scale of an item's keys or values; 1 if scales are per page.
#[track_caller]
pub(super) fn of_item<'k>(cta: &Cta<'k>, scale: ScaleParams<'k>, head: Value<'k, u32>) -> Value<'k, f32> {
    of_item_or(cta, (scale, head), || cta.k.constant(1.0))
}

/// The scale of this warp's accumulators: that of the item's values, or `R`.
#[track_caller]
pub(super) fn of_sums<'k>(cta: &Cta<'k>, head: Value<'k, u32>) -> Value<'k, f32> {
    let reference = || place(cta, cta.k.thread() >> 5).cast().load();
    of_item_or(cta, (cta.params.v_scale, head), reference)
}

fn of_item_or<'k>(
    cta: &Cta<'k>,
    (scale, head): (ScaleParams<'k>, Value<'k, u32>),
    where_of_pages: impl FnOnce() -> Value<'k, f32>,
) -> Value<'k, f32> {
    let k = cta.k;
    let Some(pages) = of_pages(cta) else { return scale.at(k, k.constant(0), head) };
    let factor = k.unset_var("factor_of_item");
    k.when_else(pages, || factor.set(where_of_pages()), || factor.set(scale.at(k, k.constant(0), head)));
    factor.get()
}

/// The bits of a key's or value's scale, if scales are per page and the key exists; otherwise 0.
#[track_caller]
pub(super) fn of_key<'k>(
    cta: &Cta<'k>,
    (is_key, exists): (Value<'k, bool>, Value<'k, bool>),
    (page, head): (Value<'k, u32>, Value<'k, u32>),
) -> Value<'k, u32> {
    let (k, params) = (cta.k, &cta.params);
    let Some(pages) = of_pages(cta) else { return k.constant(0) };
    let factor = k.var::<f32>("factor_of_key", 0.0);
    k.when(pages & exists, || {
        let set = |scale: ScaleParams<'k>| factor.set(scale.at(k, page, head));
        k.when_else(is_key, || set(params.k_scale), || set(params.v_scale));
    });
    factor.get().reinterpret()
}

/// `R` of a warp, or 1 if scales are not per page; `None` if that is not compiled in.
#[track_caller]
pub(super) fn reference<'k>(cta: &Cta<'k>, warp: Value<'k, u32>) -> Option<Value<'k, f32>> {
    of_pages(cta).map(|of_pages| {
        let reference = cta.k.var::<f32>("reference", 1.0);
        cta.k.when(of_pages, || reference.set(place(cta, warp).cast().load()));
        reference.get()
    })
}

/// `R` of a warp, `1 / R`, and the previous `R` divided by `R`.
#[track_caller]
fn place<'k>(cta: &Cta<'k>, warp: Value<'k, u32>) -> Shared<'k, u32> {
    cta.at::<u32>(cta.layout.references).at(warp << 2)
}

/// Per-page scales of a body; no-ops if they are not compiled in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factors<'k> {
    cta: Cta<'k>,
    /// Keys per KV tile or stage.
    keys: usize,
    /// Whether scales are per page, and this warp's [`running_scale_slot`].
    of_pages: Option<(Value<'k, bool>, Shared<'k, u32>)>,
}

/// Rescaling of weights and accumulators to the running scale of a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct ToReference<'k> {
    factors: Factors<'k>,
    at: Shared<'k, f32>,
}

impl<'k> Factors<'k> {
    /// Starts with the minimum `R`, which is valid after a barrier.
    pub(super) fn new(cta: &Cta<'k>, keys: usize) -> Self {
        let of_pages = of_pages(cta).map(|of_pages| (of_pages, place(cta, cta.k.thread() >> 5)));
        let new = Self { cta: *cta, keys, of_pages };
        new.when(|place| new.set(place, [LEAST, 0, 0].map(|word| cta.k.constant(word))));
        new
    }

    fn when(&self, body: impl FnOnce(Shared<'k, u32>)) {
        if let Some((of_pages, reference)) = self.of_pages {
            self.cta.k.when(of_pages, || body(reference));
        }
    }

    fn set(&self, place: Shared<'k, u32>, words: [Value<'k, u32>; 3]) {
        let k = self.cta.k;
        k.when(k.lane().eq(0), || (0..3).for_each(|at| place.plus(at).store(words[at])));
    }

    /// Copies the scales from the key entries to `to`, by the first two threads of each key.
    #[track_caller]
    pub(super) fn bring(&self, thread: Value<'k, u32>, entries: Shared<'k, u32>, to: Shared<'k, u32>) {
        self.when(|_| {
            self.cta.k.when(thread.lt(2 * self.keys as u32), || {
                to.at(thread).store(entries.at(thread << 2).plus(3).load());
            });
        });
    }

    /// The scales of this thread's two columns of each 8 keys, or of their values.
    #[track_caller]
    fn of_columns(&self, at: Shared<'k, f32>) -> impl Iterator<Item = [Value<'k, f32>; 2]> {
        let at = at.at((self.cta.k.lane() & 3) << 1);
        (0..self.keys / 8).map(move |tile| at.plus(8 * tile).load_vector::<2>())
    }

    /// Multiplies logits by the scales of their keys, which are at `at`.
    #[track_caller]
    pub(super) fn scale_keys(&self, at: Shared<'k, f32>, logits: &[Vec<Sums<'k>>]) {
        self.when(|_| {
            for (tile, factors) in self.of_columns(at).enumerate() {
                let sums = logits.iter().flat_map(|logits| logits[tile].into_iter().enumerate());
                sums.for_each(|(i, sum)| sum.set(sum.get() * factors[i % 2]));
            }
        });
    }

    /// Updates the running scale for the values whose scales follow those of the keys at `at`.
    #[track_caller]
    pub(super) fn next(&self, at: Shared<'k, f32>) -> ToReference<'k> {
        let k = self.cta.k;
        let at = at.plus(self.keys);
        self.when(|place| {
            let before = place.load();
            let lane = k.lane() & (self.keys.min(32) as u32 - 1);
            let exponents = (0..self.keys)
                .step_by(32)
                .map(|key| at.at(lane).plus(key).load().reinterpret::<u32>() & EXPONENT);
            let most = exponents.reduce(|a, b| a.max(b)).unwrap_or_else(|| k.constant(0));
            let most = k.reduce_warp(WarpReduction::MaxU32, most.min(MOST));
            let reference = before.max(most);
            // all lanes have read the previous one
            k.sync_warp();
            let inverse = (k.constant(254_u32 << 23) - reference).reinterpret::<f32>();
            let of_before = (before.reinterpret::<f32>() * inverse).reinterpret::<u32>();
            self.set(place, [reference, inverse.reinterpret(), of_before]);
            k.sync_warp();
        });
        ToReference { factors: *self, at }
    }
}

impl<'k> ToReference<'k> {
    /// Multiplies weights by the scales of their values, relative to `R`.
    #[track_caller]
    pub(super) fn weights(&self, weights: &[Sums<'k>]) {
        self.factors.when(|place| {
            let inverse = place.plus(1).cast::<f32>().load();
            for (tile, factors) in weights.iter().zip(self.factors.of_columns(self.at)) {
                let factors = factors.map(|factor| factor * inverse);
                tile.iter().enumerate().for_each(|(i, weight)| weight.set(weight.get() * factors[i % 2]));
            }
        });
    }

    /// The rescale factors of the accumulators to new maxima and this `R`.
    #[track_caller]
    pub(super) fn sums(&self, factors: [Value<'k, f32>; 2]) -> [Value<'k, f32>; 2] {
        let Some((of_pages, place)) = self.factors.of_pages else { return factors };
        let of_before = self.factors.cta.k.var("of_before", 1.0);
        self.factors.cta.k.when(of_pages, || of_before.set(place.plus(2).cast::<f32>().load()));
        factors.map(|factor| factor * of_before.get())
    }
}
