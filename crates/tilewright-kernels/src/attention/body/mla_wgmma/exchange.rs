//! Online softmax of a consumer, and the exchange of weights and row references with the other one.
//!
//! References are those of [`wgmma::softmax`](crate::attention::body::wgmma): they follow a row's maximum only when that grows by
//! more than 2^8. Both consumers use the reference of the last tile whose weights were published. The follower adds the leader's
//! weights before it moves its reference, and the leader the follower's after that, so published weights are never rescaled.

use super::{CONSUMERS, FOLLOWER_WEIGHTS, LEADER_WEIGHTS, LEADER_WEIGHTS_READ, consumer::MlaConsumer};
use crate::{
    attention::body::wgmma::softmax::{Exponentials, Reference, row_max},
    tile::{reduce, sums},
};
use tilewright_ptx::{
    build::{Shared, Value},
    isa::sync::Fence,
};

/// The share of one tile in the sums of this thread's rows.
pub(super) struct TileSums<'k> {
    /// Factors of the sums and accumulators so far.
    pub(super) factors: [Value<'k, f32>; 2],
    /// The sums of weights.
    added: [Value<'k, f32>; 2],
    /// With the rounding errors of the largest weights.
    references: [Reference<'k>; 2],
}

impl<'k> MlaConsumer<'_, 'k> {
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

    /// Converts the logits of a tile to weights, and moves the row references.
    ///
    /// Shuffles are slow while products read shared memory, so threads exchange their maxima only if one of them moves a reference.
    /// A thread has the rounding error of its own largest weight: the largest of a row is one of the four.
    pub(super) fn compute_weights(&self, scale: Value<'k, f32>) -> TileSums<'k> {
        let (k, cta) = (self.k, &self.shared.cta);
        let own = [0, 1].map(|half| row_max(&self.logits, half));
        let factors = [0, 1].map(|_| k.var("factor", 1.0));
        let moved = [0, 1].map(|half| Reference::is_moved(own[half], self.state.max[half].get(), scale));
        k.when(k.any(moved[0] | moved[1]), || {
            let maxima = reduce::quads_max(own.to_vec());
            for half in 0..2 {
                let reference = Reference::new(maxima[half], self.state.max[half].get(), scale);
                self.state.max[half].set(reference.value);
                factors[half].set(reference.rescale);
            }
        });
        let references = [0, 1].map(|half| Reference::kept(own[half], self.state.max[half].get(), scale));
        let exponentials = Exponentials { cta, logits: &self.logits, weights: &self.weights };
        let added = exponentials.run(|half, logit| logit.mul_add(scale, references[half].offset), |_| ());
        TileSums { factors: factors.map(|factor| factor.get()), added, references }
    }

    /// Adds the sums of a tile, after [`Self::rescale_sums`].
    pub(super) fn add(&self, tile: &TileSums<'k>) {
        self.update_sums(|half, [sum, error]| {
            [sum + tile.added[half], error + tile.references[half].rounding_error(&self.shared.cta)]
        });
    }

    /// Publishes the weights of a tile, and the references, as consumer `half`.
    pub(super) fn publish(&self, half: usize, factors: [Value<'k, f32>; 2]) {
        let k = self.k;
        let (tile, row) = (self.shared.weights(half), self.first_row() + (k.lane() & 15));
        for (step, words) in self.weights.chunks_exact(4).enumerate() {
            let at = tile.chunk(row, (k.lane() >> 4) + 2 * step as u32);
            k.store_matrix::<4, _>(at, std::array::from_fn(|i| words[i].get()), false);
        }
        k.when((k.lane() & 3).eq(0), || {
            for (lower, factor) in factors.into_iter().enumerate() {
                let at = self.references(half).plus(16 * lower);
                at.store_vector([self.state.max[lower].get(), factor]);
            }
        });
        // products read the weights
        k.fence(Fence::ProxyAsyncShared);
        k.arrive_named([LEADER_WEIGHTS, FOLLOWER_WEIGHTS][half], CONSUMERS);
    }

    /// Waits for the weights of consumer `half`, takes over its references and rescales the sums; returns the factors of the
    /// accumulators.
    pub(super) fn receive(&self, half: usize) -> [Value<'k, f32>; 2] {
        self.k.sync_named([LEADER_WEIGHTS, FOLLOWER_WEIGHTS][half], CONSUMERS);
        let factors = [0, 1].map(|lower| {
            let [reference, factor] = self.references(half).plus(16 * lower).load_vector();
            self.state.max[lower].set(reference);
            factor
        });
        self.rescale_sums(factors);
        factors
    }

    /// Rescales the sums to new references.
    pub(super) fn rescale_sums(&self, factors: [Value<'k, f32>; 2]) {
        self.k.when(self.is_rescaled(factors), || {
            self.update_sums(|half, sums| sums.map(|sum| sum * factors[half]));
        });
    }

    /// The reference of this thread's first row, as published by consumer `half`.
    fn references(&self, half: usize) -> Shared<'k, f32> {
        let row = sums::first_row(self.k.thread());
        self.shared.cta.at::<f32>(self.shared.arena.references[half]).at(row << 1)
    }

    /// Rescales the accumulators to new references.
    pub(super) fn rescale(&self, factors: [Value<'k, f32>; 2]) {
        self.k.when(self.is_rescaled(factors), || self.multiply_accumulators(factors));
    }

    /// Rescales sums and accumulators, these after products in flight have completed. The assembler would move the wait up, but not
    /// across a branch. All warps of a warpgroup must wait at the same place.
    pub(super) fn rescale_after_products(&self, factors: [Value<'k, f32>; 2]) {
        self.rescale_sums(factors);
        self.k.wgmma_wait(0);
        self.rescale(factors);
    }

    fn is_rescaled(&self, factors: [Value<'k, f32>; 2]) -> Value<'k, bool> {
        self.k.any(factors[0].ne(1.0) | factors[1].ne(1.0))
    }

    fn multiply_accumulators(&self, factors: [Value<'k, f32>; 2]) {
        for fragment in &self.state.o {
            fragment.iter().enumerate().for_each(|(i, o)| o.set(o.get() * factors[i / 2]));
        }
    }

    /// Updates this thread's sums of weights and of rounding errors of both rows. They are in shared memory to reduce register
    /// pressure.
    fn update_sums(&self, update: impl Fn(usize, [Value<'k, f32>; 2]) -> [Value<'k, f32>; 2]) {
        let at = self.sums(self.k.thread());
        let [upper_sum, lower_sum, upper_error, lower_error] = at.load_vector::<4>();
        let [upper, lower] = [update(0, [upper_sum, upper_error]), update(1, [lower_sum, lower_error])];
        at.store_vector([upper[0], lower[0], upper[1], lower[1]]);
    }

    /// The sums of a consumer thread: of the weights of both rows, then of the rounding errors.
    pub(super) fn sums(&self, thread: Value<'k, u32>) -> Shared<'k, f32> {
        self.shared.cta.at::<f32>(self.shared.arena.sums).at(thread << 2)
    }
}
