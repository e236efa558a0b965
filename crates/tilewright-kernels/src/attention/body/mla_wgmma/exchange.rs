//! Online softmax of a consumer, and the exchange of weights and row references with the other one.
//!
//! References are those of [`wgmma::softmax`](crate::attention::body::wgmma): they follow a row's maximum only when that grows by
//! more than 2^8. Both consumers use the reference of the last tile whose weights were published. The follower adds the leader's
//! weights before it moves its reference, and the leader the follower's after that, so published weights are never rescaled.

use super::{CONSUMERS, FOLLOWER_WEIGHTS, LEADER_WEIGHTS, LEADER_WEIGHTS_READ, consumer::Consumer};
use crate::{
    attention::body::wgmma::softmax::{Exponentials, Reference, row_max},
    tile::{reduce, sums},
};
use tilewright_ptx::{
    build::{Shared, Value},
    isa::sync::Fence,
};

/// A tile's contribution to a row.
#[derive(Clone, Copy)]
pub(super) struct RowStep<'k> {
    /// The factor of accumulators and sums so far.
    pub(super) rescale: Value<'k, f32>,
    /// The sum of this thread's weights.
    sum: Value<'k, f32>,
    /// The rounding error of the largest weight.
    error: Value<'k, f32>,
}

impl<'k> Consumer<'_, 'k> {
    /// Lets the leader write its first weights.
    pub(super) fn begin_exchange(&self) {
        self.k.when(self.number.ne(0), || self.end_read());
    }

    /// Takes the follower's last arrival.
    pub(super) fn end_exchange(&self) {
        self.k.when(self.number.eq(0), || self.wait_until_read());
    }

    /// Of the leader: waits until the follower has read its last weights.
    pub(super) fn wait_until_read(&self) {
        self.k.sync_named(LEADER_WEIGHTS_READ, CONSUMERS);
    }

    /// Of the follower: the leader's weights have been read.
    pub(super) fn end_read(&self) {
        self.k.arrive_named(LEADER_WEIGHTS_READ, CONSUMERS);
    }

    /// Converts the logits of a tile to weights, and moves the row references. Accumulators and sums keep the last ones.
    pub(super) fn compute_weights(&self, scale: Value<'k, f32>) -> [RowStep<'k>; 2] {
        let cta = &self.shared.cta;
        let own = [0, 1].map(|half| row_max(&self.logits, half));
        let maxima = reduce::quads_max(own.to_vec());
        let references = [0, 1].map(|half| Reference::new(maxima[half], self.state.max[half].get(), scale));
        let exponentials = Exponentials { cta, logits: &self.logits, weights: &self.weights };
        let sums = exponentials.run(scale, references.map(|reference| reference.offset), |_| ());
        [0, 1].map(|half| {
            let reference = references[half];
            self.state.max[half].set(reference.value);
            RowStep { rescale: reference.rescale, sum: sums[half], error: reference.rounding_error(cta) }
        })
    }

    /// Publishes the weights of a tile, and the references, as consumer `half`.
    pub(super) fn publish(&self, half: usize, steps: &[RowStep<'k>; 2]) {
        let k = self.k;
        let (tile, row) = (self.shared.weights(half), self.first_row() + (k.lane() & 15));
        for (step, words) in self.weights.chunks_exact(4).enumerate() {
            let at = tile.chunk(row, (k.lane() >> 4) + 2 * step as u32);
            k.store_matrix::<4, _>(at, std::array::from_fn(|i| words[i].get()), false);
        }
        k.when((k.lane() & 3).eq(0), || {
            for (lower, step) in steps.iter().enumerate() {
                let at = self.references(half).plus(16 * lower);
                at.store_vector([self.state.max[lower].get(), step.rescale]);
            }
        });
        // products read the weights
        k.fence(Fence::ProxyAsyncShared);
        k.arrive_named([LEADER_WEIGHTS, FOLLOWER_WEIGHTS][half], CONSUMERS);
    }

    /// Waits for the weights of consumer `half`, and takes over its references; returns the factors of the sums so far.
    pub(super) fn receive(&self, half: usize) -> [Value<'k, f32>; 2] {
        self.k.sync_named([LEADER_WEIGHTS, FOLLOWER_WEIGHTS][half], CONSUMERS);
        [0, 1].map(|lower| {
            let [reference, rescale] = self.references(half).plus(16 * lower).load_vector();
            self.state.max[lower].set(reference);
            rescale
        })
    }

    /// The reference of this thread's first row, as published by consumer `half`.
    fn references(&self, half: usize) -> Shared<'k, f32> {
        let row = sums::first_row(self.k.thread());
        self.shared.cta.at::<f32>(self.shared.arena.references[half]).at(row << 1)
    }

    /// Brings accumulators and sums to new references.
    pub(super) fn rescale(&self, factors: [Value<'k, f32>; 2]) {
        self.k.when(self.is_rescaled(factors), || self.multiply_state(factors));
    }

    /// The same after products in flight have completed. The wait is in both branches, or the assembler would move it up.
    pub(super) fn rescale_after_products(&self, factors: [Value<'k, f32>; 2]) {
        let k = self.k;
        k.when_else(
            self.is_rescaled(factors),
            || {
                k.wgmma_wait(0);
                self.multiply_state(factors);
            },
            || k.wgmma_wait(0),
        );
    }

    fn is_rescaled(&self, factors: [Value<'k, f32>; 2]) -> Value<'k, bool> {
        self.k.any(factors[0].ne(1.0) | factors[1].ne(1.0))
    }

    fn multiply_state(&self, factors: [Value<'k, f32>; 2]) {
        for fragment in &self.state.o {
            fragment.iter().enumerate().for_each(|(i, o)| o.set(o.get() * factors[i / 2]));
        }
        for (half, factor) in factors.into_iter().enumerate() {
            self.sum[half].set(self.sum[half].get() * factor);
            self.error[half].set(self.error[half].get() * factor);
        }
    }

    /// Adds the sums of a tile, after they have been rescaled.
    pub(super) fn add_sums(&self, steps: &[RowStep<'k>; 2]) {
        for (half, step) in steps.iter().enumerate() {
            self.sum[half].set(self.sum[half].get() + step.sum);
            self.error[half].set(self.error[half].get() + step.error);
        }
    }
}
