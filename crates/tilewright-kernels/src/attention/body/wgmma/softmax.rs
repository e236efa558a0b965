//! Online softmax of a consumer: row references, the rescale of outputs, and the exponentials in turns.
//!
//! A row's weights are relative to a reference of its logits: 0 before the first tile, then a maximum so far. It follows the
//! maximum only when that grows by more than 2^8. Weights and sums are then at most 2^8 times larger, which f32 sums and weights
//! of 16 bits hold without loss of relative accuracy. But the largest weight is not 1 then, so it is rounded. The rounding errors of
//! the largest weights of all tiles are summed, and outputs are divided by the sum of weights plus these errors, in which the error
//! of a dominant weight cancels. The LSE needs the exact sum.

use super::{EXPONENTIALS, consumer::Consumer};
use crate::{
    attention::kernel::{
        cta::{CurrentItem, MmaCta},
        fragments::AccFragment,
        softmax::finite_max,
    },
    tile::reduce,
};
use tilewright_ptx::{
    build::{Value, Var},
    isa::matrix::Elements,
};

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

/// The maximum of this thread's logits of a row, by four chains.
pub(in crate::attention::body) fn row_max<'k>(logits: &[AccFragment<'k>], half: usize) -> Value<'k, f32> {
    let mut logits = logits.iter().flat_map(|of| [of[2 * half], of[2 * half + 1]]).map(|logit| logit.get());
    let mut chains: Vec<_> = logits.by_ref().take(4).collect();
    for (at, logit) in logits.enumerate() {
        chains[at % 4] = chains[at % 4].max(logit);
    }
    let pair = [chains[0].max(chains[1]), chains[2].max(chains[3])];
    pair[0].max(pair[1])
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
    /// Replaces logits by rounded weights; returns the sums of each row's weights in this thread. Scaled logits, exponentials and
    /// rounding are interleaved, because the assembler keeps their order. Calls `end` after the last exponential with one of the
    /// weights.
    pub(in crate::attention::body) fn run(
        &self,
        scales: [Value<'k, f32>; 2],
        offsets: [Value<'k, f32>; 2],
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
                logits.iter().for_each(|logit| logit.set(logit.get().mul_add(scales[half], offsets[half])));
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
    /// Converts the logits of a tile to weights. Waits for the accumulators when the references are known, and calls `release` then.
    ///
    /// Threads of a row exchange their maxima only if one of their warp moves a reference: shuffles are slow while products read
    /// shared memory. A thread has the rounding error of its own largest weight: the largest of a row is one of the four.
    pub(super) fn softmax(&self, current: &CurrentItem<'k>, release: impl Fn()) {
        let k = self.k;
        let scales = self.logit_scales(current);
        let own = [0, 1].map(|half| row_max(&self.logits, half));
        let rescale = [0, 1].map(|_| k.var("rescale", 1.0));
        let moved =
            [0, 1].map(|half| Reference::is_moved(own[half], self.state.max[half].get(), scales[half]));
        let moved = k.any(moved[0] | moved[1]);
        // The assembler would move the wait before the maxima, which overlap with the products, but not across a branch that depends
        // on them. All warps of a warpgroup must wait at the same place.
        k.when(moved, || {
            let maxima = reduce::quads_max(own.to_vec());
            for half in 0..2 {
                let reference = Reference::new(maxima[half], self.state.max[half].get(), scales[half]);
                self.state.max[half].set(reference.value);
                rescale[half].set(reference.rescale);
                self.sum[half].set(self.sum[half].get() * reference.rescale);
                self.error[half].set(self.error[half].get() * reference.rescale);
            }
        });
        k.wgmma_wait(0);
        release();
        // both branches take the turn: the assembler would move the exponentials before it
        k.when_else(
            moved,
            || {
                for (i, o) in self.state.o.iter().flat_map(|of| of.iter().enumerate()) {
                    o.set(o.get() * rescale[i / 2].get());
                }
                self.wait_for_turn();
            },
            || self.wait_for_turn(),
        );
        // rounding and sums need no turn
        let references =
            [0, 1].map(|half| Reference::kept(own[half], self.state.max[half].get(), scales[half]));
        let (cta, logits, weights) = (&self.shared.products(), &self.logits[..], &self.weights[..]);
        let offsets = references.map(|reference| reference.offset);
        let added =
            Exponentials { cta, logits, weights }.run(scales, offsets, |weight| self.end_turn(weight));
        for half in 0..2 {
            self.sum[half].set(self.sum[half].get() + added[half]);
            let error = references[half].rounding_error(cta);
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
