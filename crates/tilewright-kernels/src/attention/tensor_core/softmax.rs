//! Weights of keys as they come, and what was summed before brought to them ("Online normalizer calculation for softmax", Milakov
//! and Gimelshein 2018).
//!
//! Of all rows of a thread each step is done before the next: a row alone would wait for its own results.

use super::{
    cta::Cta,
    factors::ToReference,
    fragments::{RowTile, Sums},
};
use crate::tile::reduce;
use tilewright_ptx::build::{Value, Var};

/// As long as a logit is greater than the reference by no more than this, in base 2, the reference is kept: weights are 256 at most
/// then, which f16 and bf16 hold as well as 1, and what was summed before stays as it is (as in FlashAttention-4).
const KEPT: f32 = 8.0;

/// Products of queries and keys of some row tiles on their way to weights.
struct Rows<'a, 'k> {
    tiles: &'a [RowTile<'k>],
    logits: &'a [Vec<Sums<'k>>],
    scale: Value<'k, f32>,
}

/// Turns products of row tiles with keys into weights, rounded and in pairs, four for each 16 keys; brings what was summed before to
/// their references. `to` tells of factors of pages, if there are any.
pub(super) fn weigh<'k>(
    cta: &Cta<'k>,
    (tiles, logits): (&[RowTile<'k>], &[Vec<Sums<'k>>]),
    scale: Value<'k, f32>,
    to: Option<&ToReference<'k>>,
) -> Vec<Vec<[Value<'k, u32>; 4]>> {
    let rows = Rows { tiles, logits, scale };
    let (references, factors) = rows.refer();
    let of_tiles = factors.chunks_exact(2).map(|of_tile| [of_tile[0], of_tile[1]]);
    rows.rescale(&of_tiles.map(|factors| to.map_or(factors, |to| to.sums(factors))).collect::<Vec<_>>());
    rows.weigh(&references, &factors);
    if let Some(to) = to {
        logits.iter().for_each(|logits| to.weights(logits));
    }
    let pair = |tile: &Sums<'k>, half: usize| cta.narrow(tile[2 * half].get(), tile[2 * half + 1].get());
    let of_step =
        |tiles: &[Sums<'k>]| [pair(&tiles[0], 0), pair(&tiles[0], 1), pair(&tiles[1], 0), pair(&tiles[1], 1)];
    logits.iter().map(|logits| logits.chunks_exact(2).map(of_step).collect()).collect()
}

impl<'k> Rows<'_, 'k> {
    /// Both halves of each tile.
    fn halves(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.tiles.len()).flat_map(|tile| [(tile, 0), (tile, 1)])
    }

    /// This thread's keys, a logit of each half for each.
    fn keys(&self) -> impl Iterator<Item = Vec<Var<'k, f32>>> {
        let keys = (0..self.logits.first().map_or(0, Vec::len)).flat_map(|tile| [(tile, 0), (tile, 1)]);
        keys.map(|(keys, i)| {
            self.halves().map(|(tile, half)| self.logits[tile][keys][2 * half + i]).collect()
        })
    }

    /// The new reference of each half, less than infinite, and the factor that brings what was summed before to it.
    fn refer(&self) -> (Vec<Value<'k, f32>>, Vec<Value<'k, f32>>) {
        let before: Vec<_> =
            self.halves().map(|(tile, half)| self.tiles[tile].reference[half].get()).collect();
        let both = |max: Vec<Value<'k, f32>>, logits: Vec<Var<'k, f32>>| {
            max.iter().zip(logits).map(|(max, logit)| max.max(logit.get())).collect()
        };
        let max = reduce::quads_max(self.keys().fold(before.clone(), both));
        let of_half = |((tile, half), (before, max)): ((usize, usize), (Value<'k, f32>, Value<'k, f32>))| {
            // what is not a number, because both are infinite, is not kept either
            let kept = ((max - before) * self.scale).abs().le(KEPT);
            let reference = max.unless(kept, before);
            self.tiles[tile].reference[half].set(reference);
            // a row that has seen nothing subtracts 0: (-inf) - (-inf) would be NaN
            let reference = reference.unless(reference.eq(f32::NEG_INFINITY), 0.0);
            (reference, ((before - reference) * self.scale).exp2())
        };
        self.halves().zip(before.into_iter().zip(max)).map(of_half).unzip()
    }

    /// Brings sums of weighed values to new references; most KV tiles change none.
    fn rescale(&self, factors: &[[Value<'k, f32>; 2]]) {
        let k = self.scale.builder();
        let same = factors.iter().flatten().map(|factor| factor.eq(1.0));
        let same = same.reduce(|a, b| a & b).unwrap_or_else(|| k.constant(true));
        k.when(!k.all(same), || {
            for (tile, factors) in self.tiles.iter().zip(factors) {
                for (i, sum) in tile.o.iter().flat_map(|sums| sums.iter().enumerate()) {
                    sum.set(sum.get() * factors[i / 2]);
                }
            }
        });
    }

    /// Puts weights in the place of logits, and adds them to their sums.
    fn weigh(&self, references: &[Value<'k, f32>], factors: &[Value<'k, f32>]) {
        let k = self.scale.builder();
        let offsets: Vec<_> = references.iter().map(|reference| -(*reference * self.scale)).collect();
        let mut sums = vec![k.constant(0.0); offsets.len()];
        for logits in self.keys() {
            for (logit, (offset, sum)) in logits.into_iter().zip(offsets.iter().zip(&mut sums)) {
                let weight = logit.get().mul_add(self.scale, *offset).exp2();
                logit.set(weight);
                *sum = *sum + weight;
            }
        }
        for ((tile, half), (factor, sum)) in self.halves().zip(factors.iter().zip(sums)) {
            let cell = self.tiles[tile].sum[half];
            cell.set(cell.get().mul_add(*factor, sum));
        }
    }
}
