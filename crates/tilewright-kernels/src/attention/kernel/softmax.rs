//! Online softmax: update the running maximum and rescale the accumulators ("Online normalizer calculation for softmax", Milakov
//! and Gimelshein 2018).
//!
//! Each step is done for all rows of the thread before the next step, to expose instruction-level parallelism.

use super::{AccFragment, MmaCta, PageRescale, RowTile};
use crate::tile::reduce;
use tilewright_ptx::{Value, Var};

/// Per row tile, one number for each half.
type Halves<'k> = Vec<[Value<'k, f32>; 2]>;

/// One softmax step: `Q · Kᵀ` of some row tiles becomes weights.
struct SoftmaxStep<'a, 'k> {
    tiles: &'a [RowTile<'k>],
    logits: &'a [Vec<AccFragment<'k>>],
    scale: Value<'k, f32>,
}

/// Converts `Q · Kᵀ` to weights, rounded and packed in pairs, four words per 16 keys, and rescales the accumulators to the new
/// maxima. `page_rescale` applies per-page scales, if there are any.
pub(crate) fn online_softmax<'k>(
    cta: &MmaCta<'k>,
    tiles: &[RowTile<'k>],
    logits: &[Vec<AccFragment<'k>>],
    scale: Value<'k, f32>,
    page_rescale: Option<&PageRescale<'k>>,
) -> Vec<Vec<[Value<'k, u32>; 4]>> {
    let step = SoftmaxStep { tiles, logits, scale };
    let (row_maxes, rescale_factors) = step.update_max();
    step.rescale(&rescale_factors, page_rescale);
    step.exponentiate(&row_maxes);
    if let Some(page_rescale) = page_rescale {
        logits.iter().for_each(|logits| page_rescale.scale_weights(logits));
    }
    let pair =
        |tile: &AccFragment<'k>, half: usize| cta.round_pair(tile[2 * half].get(), tile[2 * half + 1].get());
    let of_step = |tiles: &[AccFragment<'k>]| {
        [pair(&tiles[0], 0), pair(&tiles[0], 1), pair(&tiles[1], 0), pair(&tiles[1], 1)]
    };
    logits.iter().map(|logits| logits.chunks_exact(2).map(of_step).collect()).collect()
}

/// The number that a row with maximum `max` subtracts from its logits or LSEs: 0 if it is -inf, because (-inf) - (-inf) is NaN.
#[track_caller]
pub(crate) fn finite_max(max: Value<'_, f32>) -> Value<'_, f32> {
    max.unless(max.eq(f32::NEG_INFINITY), 0.0)
}

impl<'k> SoftmaxStep<'_, 'k> {
    /// The logits of this thread's keys: per key, one of both halves of each tile.
    fn keys(&self) -> impl Iterator<Item = Vec<Var<'k, f32>>> {
        let keys = (0..self.logits.first().map_or(0, Vec::len)).flat_map(|tile| [(tile, 0), (tile, 1)]);
        keys.map(|(keys, i)| self.logits.iter().flat_map(|of| [of[keys][i], of[keys][2 + i]]).collect())
    }

    /// Updates the running maxima. Returns per half the value to subtract from the logits, and the rescale factor of the
    /// accumulators.
    fn update_max(&self) -> (Halves<'k>, Halves<'k>) {
        let old_maxes: Vec<_> = self.tiles.iter().flat_map(|tile| tile.max).map(|max| max.get()).collect();
        // reduce by fours to shorten the dependency chain
        let keys: Vec<_> = self.keys().collect();
        let mut max = old_maxes.clone();
        for four in keys.chunks(4) {
            for (half, max) in max.iter_mut().enumerate() {
                let pairs = four.chunks(2).map(|pair| pair[0][half].get().max(pair[1][half].get()));
                *max = pairs.reduce(|a, b| a.max(b)).map_or(*max, |of_four| max.max(of_four));
            }
        }
        let max = reduce::quads_max(max);
        let row_maxes: Vec<_> = max.iter().map(|max| finite_max(*max)).collect();
        let rescale_factors =
            old_maxes.iter().zip(&row_maxes).map(|(old, new)| ((*old - *new) * self.scale).exp2());
        let rescale_factors: Vec<_> = rescale_factors.collect();
        self.tiles.iter().flat_map(|tile| tile.max).zip(max).for_each(|(cell, max)| cell.set(max));
        let of_tiles =
            |of_halves: Vec<Value<'k, f32>>| of_halves.chunks_exact(2).map(|of| [of[0], of[1]]).collect();
        (of_tiles(row_maxes), of_tiles(rescale_factors))
    }

    /// Rescales the accumulators to the new maxima. Skipped if all factors are 1, which is common in later KV tiles and exact.
    fn rescale(&self, rescale_factors: &[[Value<'k, f32>; 2]], page_rescale: Option<&PageRescale<'k>>) {
        let k = self.scale.builder();
        // all factors are at most 1, also those of page scales
        let o_factors: Halves<'k> = rescale_factors
            .iter()
            .map(|of| page_rescale.map_or(*of, |page_rescale| page_rescale.rescale_factors(*of)))
            .collect();
        let unchanged = o_factors.iter().flatten().map(|factor| factor.eq(1.0));
        let unchanged = unchanged.reduce(|a, b| a & b).unwrap_or_else(|| k.constant(true));
        k.when(!k.all(unchanged), || {
            for (tile, (rescale_factors, o_factors)) in
                self.tiles.iter().zip(rescale_factors.iter().zip(o_factors))
            {
                for (i, sum) in tile.o.iter().flat_map(|fragment| fragment.iter().enumerate()) {
                    sum.set(sum.get() * o_factors[i / 2]);
                }
                tile.sum.iter().zip(rescale_factors).for_each(|(sum, factor)| sum.set(sum.get() * *factor));
            }
        });
    }

    /// Replaces logits by weights and adds them to the row sums.
    fn exponentiate(&self, row_maxes: &[[Value<'k, f32>; 2]]) {
        let k = self.scale.builder();
        let offsets: Vec<_> = row_maxes.iter().flatten().map(|by| -(*by * self.scale)).collect();
        let mut sums = vec![k.constant(0.0); offsets.len()];
        for logits in self.keys() {
            for (logit, (offset, sum)) in logits.into_iter().zip(offsets.iter().zip(&mut sums)) {
                let weight = logit.get().mul_add(self.scale, *offset).exp2();
                logit.set(weight);
                *sum = *sum + weight;
            }
        }
        for (cell, sum) in self.tiles.iter().flat_map(|tile| tile.sum).zip(sums) {
            cell.set(cell.get() + sum);
        }
    }
}
