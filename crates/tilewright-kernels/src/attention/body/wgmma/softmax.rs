//! Online softmax of a consumer: row references, the rescale of outputs, and the exponentials in turns.
//!
//! A row's weights are relative to a reference of its logits: 0 before the first tile, then a maximum so far. It follows the
//! maximum only when that grows by more than 2^8. Weights and sums are then at most 2^8 times larger, which f32 sums and weights
//! of 16 bits hold without loss of relative accuracy. But the largest weight is not 1 then, so it is rounded. The rounding errors of
//! the largest weights of all tiles are summed, and outputs are divided by the sum of weights plus these errors, in which the error
//! of a dominant weight cancels. The LSE needs the exact sum.

use super::{EXPONENTIALS, consumer::Consumer};
use crate::{
    attention::kernel::{AccFragment, CurrentItem, MmaCta, softmax::finite_max},
    tile::reduce,
    variant::{BiasedLogits, SoftCapped},
};
use tilewright_ptx::{Elements, Value, Var};

/// Growth of a maximum base-2 logit above its reference without a rescale.
const THRESHOLD: f32 = 8.0;
/// Pairs of weights by which the scaled logits precede the exponentials, and these the rounding.
const AHEAD: usize = 4;
const BEHIND: usize = 3;

/// A row's new reference.
#[derive(Clone, Copy)]
pub(in crate::attention::body) struct Reference<'k> {
    /// Of the products of queries and keys.
    pub(in crate::attention::body) value: Value<'k, f32>,
    /// The factor of the sums so far.
    pub(in crate::attention::body) rescale: Value<'k, f32>,
    /// The base-2 logarithm of a weight is a scaled logit plus this.
    pub(in crate::attention::body) offset: Value<'k, f32>,
    /// The base-2 logarithm of the largest weight of the tile.
    largest: Value<'k, f32>,
}

impl<'k> Reference<'k> {
    /// From the maximum of a tile's logits and the last reference.
    pub(in crate::attention::body) fn new(
        max: Value<'k, f32>,
        last: Value<'k, f32>,
        scale: Value<'k, f32>,
    ) -> Self {
        let growth = (last - max) * scale;
        let moved = growth.lt(-THRESHOLD);
        let rescale = moved.select(growth, 0.0).exp2();
        Self { rescale, ..Self::kept(max, moved.select(max, last), scale) }
    }

    /// The reference `value` for a tile of this maximum.
    pub(in crate::attention::body) fn kept(
        max: Value<'k, f32>,
        value: Value<'k, f32>,
        scale: Value<'k, f32>,
    ) -> Self {
        let (k, offset) = (max.builder(), -(finite_max(value) * scale));
        Self { value, largest: max.mul_add(scale, offset), rescale: k.constant(1.0), offset }
    }

    /// Whether a maximum moves a reference.
    pub(in crate::attention::body) fn is_moved(
        max: Value<'k, f32>,
        last: Value<'k, f32>,
        scale: Value<'k, f32>,
    ) -> Value<'k, bool> {
        ((last - max) * scale).lt(-THRESHOLD)
    }

    /// The rounding error of the tile's largest weight.
    pub(in crate::attention::body) fn rounding_error(&self, cta: &MmaCta<'k>) -> Value<'k, f32> {
        let largest = self.largest.exp2();
        let (_, [rounded, _]) = round_pair(cta, largest, largest);
        rounded - largest
    }
}

/// The maximum of this thread's logits of a row.
pub(in crate::attention::body) fn row_max<'k>(logits: &[AccFragment<'k>], half: usize) -> Value<'k, f32> {
    of_row(logits, half, |a, b| a.max(b))
}

/// The minimum of this thread's logits of a row.
fn row_min<'k>(logits: &[AccFragment<'k>], half: usize) -> Value<'k, f32> {
    of_row(logits, half, |a, b| a.min(b))
}

/// This thread's logits of a row, combined by four chains.
fn of_row<'k>(
    logits: &[AccFragment<'k>],
    half: usize,
    combine: impl Fn(Value<'k, f32>, Value<'k, f32>) -> Value<'k, f32>,
) -> Value<'k, f32> {
    let mut logits = logits.iter().flat_map(|of| [of[2 * half], of[2 * half + 1]]).map(|logit| logit.get());
    let mut chains: Vec<_> = logits.by_ref().take(4).collect();
    for (at, logit) in logits.enumerate() {
        chains[at % 4] = combine(chains[at % 4], logit);
    }
    combine(combine(chains[0], chains[1]), combine(chains[2], chains[3]))
}

/// Two weights rounded to the dtype of values: packed, and as f32.
fn round_pair<'k>(
    cta: &MmaCta<'k>,
    low: Value<'k, f32>,
    high: Value<'k, f32>,
) -> (Value<'k, u32>, [Value<'k, f32>; 2]) {
    match cta.elements {
        Elements::F16 => {
            let pair = cta.k.f16x2(low, high);
            (pair.reinterpret(), pair.to_f32())
        }
        _ => {
            let pair = cta.k.bf16x2(low, high);
            (pair.reinterpret(), pair.to_f32())
        }
    }
}

/// Logits that become weights, which are rounded to pairs in the order of the words of the A operand.
pub(in crate::attention::body) struct Exponentials<'a, 'k> {
    pub(in crate::attention::body) cta: &'a MmaCta<'k>,
    pub(in crate::attention::body) logits: &'a [AccFragment<'k>],
    pub(in crate::attention::body) weights: &'a [Var<'k, u32>],
}

impl<'k> Exponentials<'_, 'k> {
    /// Replaces logits by rounded weights `2^exponent(half, logit)`; returns the sums of each row's weights in this thread.
    /// Exponents, exponentials and rounding are interleaved, because the assembler keeps their order. Calls `end` after the last
    /// exponential with one of the weights.
    pub(in crate::attention::body) fn run(
        &self,
        exponent: impl Fn(usize, Value<'k, f32>) -> Value<'k, f32>,
        end: impl Fn(Value<'k, f32>),
    ) -> [Value<'k, f32>; 2] {
        let pair = |at: usize| {
            let (step, word) = (at / 4, at % 4);
            let (fragment, half) = (2 * step + word / 2, word % 2);
            (half, [0, 1].map(|i| self.logits[fragment][2 * half + i]))
        };
        let mut sums: [[Option<Value<'k, f32>>; 2]; 2] = Default::default();
        let pairs = 2 * self.logits.len();
        let mut lower: [Option<Value<'k, u16>>; 2] = Default::default();
        for at in 0..AHEAD + pairs + BEHIND {
            if at < pairs {
                let (half, logits) = pair(at);
                logits.iter().for_each(|logit| logit.set(exponent(half, logit.get())));
            }
            if let Some(at) = at.checked_sub(AHEAD).filter(|at| *at < pairs) {
                pair(at).1.iter().for_each(|logit| logit.set(logit.get().exp2()));
                if at + 1 == pairs {
                    end(pair(at - BEHIND).1[0].get());
                }
            }
            if let Some(at) = at.checked_sub(AHEAD + BEHIND) {
                let (half, weights) = pair(at);
                let weights = weights.map(|weight| weight.get());
                match self.cta.elements {
                    Elements::E4m3 => {
                        let pair = self.cta.k.e4m3x2(weights[0], weights[1]).reinterpret::<u16>();
                        match lower[half].take() {
                            None => lower[half] = Some(pair),
                            Some(low) => self.weights[2 * (at / 4) + half].set(self.cta.k.pack16(low, pair)),
                        }
                    }
                    _ => self.weights[at].set(round_pair(self.cta, weights[0], weights[1]).0),
                }
                for (sum, weight) in sums[half].iter_mut().zip(weights) {
                    *sum = Some(sum.map_or(weight, |sum| sum + weight));
                }
            }
        }
        let zero = || self.cta.k.constant(0.0);
        sums.map(|of| of[0].unwrap_or_else(zero) + of[1].unwrap_or_else(zero))
    }
}

impl<'k> Consumer<'_, 'k> {
    /// Converts the logits of a tile to weights. Waits for the accumulators when the references are known, and calls `release` then. It is
    /// `None` for the first tile of an item, which has no accumulators to wait for.
    pub(super) fn softmax(&self, current: &CurrentItem<'k>, release: Option<&dyn Fn()>) {
        let scales = self.logit_scales(current);
        let maxima = [0, 1].map(|half| row_max(&self.logits, half));
        let references = self.move_references(maxima, scales, release);
        let exponent =
            |half: usize, logit: Value<'k, f32>| logit.mul_add(scales[half], references[half].offset);
        let added = self.exponentials(exponent);
        self.add_sums(added, &references);
    }

    /// The same for products that a soft cap makes logits. If all products of a warp are small, the cap is part of their exponents:
    /// these instructions fill the gaps between exponentials, and only the maxima are capped before. Otherwise calls `cap`, which
    /// caps all products.
    pub(super) fn capped_softmax(
        &self,
        current: &CurrentItem<'k>,
        caps: [SoftCapped<'k>; 2],
        cap: impl Fn(),
        release: &dyn Fn(),
    ) {
        let (k, scales) = (self.k, self.logit_scales(current));
        let largest = [0, 1].map(|half| row_max(&self.logits, half));
        let smallest = [0, 1].map(|half| row_min(&self.logits, half));
        let small = [0, 1].map(|half| caps[half].holds(largest[half].max(-smallest[half])));
        let small = !k.any(!(small[0] & small[1]));
        let maxima = [0, 1].map(|_| k.unset_var::<f32>("max"));
        k.when_else(
            small,
            || (0..2).for_each(|half| maxima[half].set(caps[half].of(largest[half]))),
            || {
                cap();
                (0..2).for_each(|half| maxima[half].set(row_max(&self.logits, half)));
            },
        );
        let references = self.move_references(maxima.map(|max| max.get()), scales, Some(release));
        let offsets = references.map(|reference| reference.offset);
        let added = [0, 1].map(|_| k.unset_var::<f32>("added"));
        let add = |sums: [Value<'k, f32>; 2]| added.iter().zip(sums).for_each(|(to, sum)| to.set(sum));
        let [upper, lower] = caps;
        let exponents = [upper.times(scales[0]), lower.times(scales[1])];
        k.when_else(
            small,
            || add(self.exponentials(|half, product| exponents[half].plus(product, offsets[half]))),
            || add(self.exponentials(|half, logit| logit.mul_add(scales[half], offsets[half]))),
        );
        self.add_sums(added.map(|sum| sum.get()), &references);
    }

    /// The same for logits that are products and a bias which grows evenly from key to key. One operation adds it to a product, in the
    /// unit of products, and the exponents convert the unit. Factors are above 0.
    pub(super) fn biased_softmax(
        &self,
        current: &CurrentItem<'k>,
        biases: &[BiasedLogits<'k>; 2],
        release: &dyn Fn(),
    ) {
        let scales = self.logit_scales(current);
        for (half, bias) in biases.iter().enumerate() {
            let step = bias.step * bias.factor.recip();
            let logits = self.logits.iter().flat_map(|of| &of[2 * half..][..2]);
            for (logit, offset) in logits.zip(&bias.offsets).filter(|(_, offset)| **offset != 0.0) {
                logit.set(step.mul_add(*offset, logit.get()));
            }
        }
        let in_logits = |half: usize, x: Value<'k, f32>| x.mul_add(biases[half].factor, biases[half].first);
        let maxima = [0, 1].map(|half| in_logits(half, row_max(&self.logits, half)));
        let references = self.move_references(maxima, scales, Some(release));
        let lines = [0, 1].map(|half| {
            let offset = biases[half].first.mul_add(scales[half], references[half].offset);
            (biases[half].factor * scales[half], offset)
        });
        let added = self.exponentials(|half, x| x.mul_add(lines[half].0, lines[half].1));
        self.add_sums(added, &references);
    }

    /// Moves the references to the maxima of a tile if these are larger by more than the threshold, and rescales sums and outputs.
    /// Then it is this consumer's turn.
    ///
    /// Threads of a row exchange their maxima only if one of their warp moves a reference: shuffles are slow while products read
    /// shared memory. A thread has the rounding error of its own largest weight: the largest of a row is one of the four.
    fn move_references(
        &self,
        maxima: [Value<'k, f32>; 2],
        scales: [Value<'k, f32>; 2],
        release: Option<&dyn Fn()>,
    ) -> [Reference<'k>; 2] {
        let k = self.k;
        let rescale = [0, 1].map(|_| k.var("rescale", 1.0));
        let moved =
            [0, 1].map(|half| Reference::is_moved(maxima[half], self.state.max[half].get(), scales[half]));
        let moved = k.any(moved[0] | moved[1]);
        // The assembler would move the wait before the maxima, which overlap with the products, but not across a branch that depends
        // on them. All warps of a warpgroup must wait at the same place.
        k.when(moved, || {
            let of_rows = reduce::quads_max(maxima.to_vec());
            for half in 0..2 {
                let reference = Reference::new(of_rows[half], self.state.max[half].get(), scales[half]);
                self.state.max[half].set(reference.value);
                rescale[half].set(reference.rescale);
            }
        });
        if let Some(release) = release {
            k.wgmma_wait(0);
            release();
            k.when(moved, || {
                for (i, o) in self.state.o.iter().flat_map(|of| of.iter().enumerate()) {
                    o.set(o.get() * rescale[i / 2].get());
                }
            });
        }
        self.wait_for_turn();
        // The assembler predicates this branch, and moves about 10 exponentials before the turn.
        k.when(moved, || {
            for sums in [&self.sum, &self.error] {
                sums.iter().zip(rescale).for_each(|(sum, rescale)| sum.set(sum.get() * rescale.get()));
            }
        });
        [0, 1].map(|half| Reference::kept(maxima[half], self.state.max[half].get(), scales[half]))
    }

    /// Computes weights; rounding and sums need no turn.
    fn exponentials(
        &self,
        exponent: impl Fn(usize, Value<'k, f32>) -> Value<'k, f32>,
    ) -> [Value<'k, f32>; 2] {
        let (cta, logits, weights) = (&self.shared.products(), &self.logits[..], &self.weights[..]);
        Exponentials { cta, logits, weights }.run(exponent, |weight| self.end_turn(weight))
    }

    /// Adds the sums of a tile's weights, and the rounding errors of the largest ones.
    fn add_sums(&self, added: [Value<'k, f32>; 2], references: &[Reference<'k>; 2]) {
        for half in 0..2 {
            self.sum[half].set(self.sum[half].get() + added[half]);
            let error = references[half].rounding_error(&self.shared.products());
            self.error[half].set(self.error[half].get() + error);
        }
    }

    /// Waits until the other consumer has computed its exponentials.
    fn wait_for_turn(&self) {
        self.k.sync_named(self.number + EXPONENTIALS, super::CONSUMERS);
    }

    /// Lets the other consumer compute its exponentials. The sign of a weight is 0, also of NaN, but the barrier depends on it: the
    /// assembler would move the arrival before the exponentials.
    fn end_turn(&self, weight: Value<'k, f32>) {
        let sign = weight.reinterpret::<u32>() >> 31;
        self.k.arrive_named((self.number ^ 1) + EXPONENTIALS + sign, super::CONSUMERS);
    }
}
