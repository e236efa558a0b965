//! Exchange of logits: each warp computes partial sums of `Q · Kᵀ`, and all warps of a row group load all of them.
//!
//! ```text
//! warp w     rows 16 (w % R) .. + 16; c = w / R is its index among the 8 / R warps of these rows:
//!            keys 16 (c % (keys / 16)) .. + 16, and part c / (keys / 16) of the elements
//! ```
//!
//! Partial sums over elements are added when they are loaded.

use super::{
    body::WarpTile,
    layout::{MlaBodyLayout, MlaLayout, logits_stride},
};
use crate::attention::kernel::{AccFragment, FragmentLoader, MmaCta, partition::divide};
use tilewright_ptx::{Builder, Shared, Value};

/// The exchange buffer, as addressed by this thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogitExchange<'k> {
    cta: MmaCta<'k>,
    warp_tile: WarpTile<'k>,
    body: MlaBodyLayout,
    keys: usize,
    /// This lane's first logit of its warp's rows, in the first partial sum.
    at: Shared<'k, f32>,
}

/// Independent accumulators per warp, to hide the latency of dependent `mma`s.
const CHAINS: usize = 2;

impl<'k> LogitExchange<'k> {
    pub(super) fn new(
        cta: &MmaCta<'k>,
        warp_tile: WarpTile<'k>,
        layout: &MlaLayout,
        body: MlaBodyLayout,
    ) -> Self {
        let lane = cta.k.lane();
        let row = (warp_tile.group << 4) + (lane >> 2);
        let at = row * logits_stride(layout.keys) as u32 + ((lane & 3) << 1);
        Self { cta: *cta, warp_tile, body, keys: layout.keys, at: cta.at::<f32>(body.logits).at(at) }
    }

    /// Stride between partial sums.
    fn partial_sum(&self) -> usize {
        16 * self.body.groups * logits_stride(self.keys)
    }

    /// Computes and stores this warp's partial sum of a KV tile; valid after a barrier.
    pub(super) fn multiply(&self, fragments: &FragmentLoader<'k>, tile: Shared<'k, u32>) {
        let (cta, k, format) = (&self.cta, self.cta.k, self.cta.layout.k);
        let (dim_part, keys) = divide(self.warp_tile.column, self.keys / 16);
        let steps = format.steps() / self.body.dim_parts;
        k.when(dim_part.lt(self.body.dim_parts as u32), || {
            let first = dim_part * (steps * 32) as u32;
            let rows =
                cta.at::<u32>(self.body.q).byte(self.warp_tile.group * (16 * format.stride) as u32 + first);
            let of_keys = tile.byte(keys * (16 * format.stride) as u32 + first);
            let chains: Vec<[AccFragment<'k>; 2]> = (0..CHAINS).map(|_| [zeros(k), zeros(k)]).collect();
            for step in 0..steps {
                let left = fragments.query(cta, rows, step);
                let right = fragments.key(cta, of_keys, step);
                for (sums, right) in chains[step % CHAINS].iter().zip(right) {
                    k.mma(cta.elements, *sums, left, right);
                }
            }
            let to = self.at.at(dim_part * self.partial_sum() as u32 + (keys << 4));
            for (eight, half) in (0..2).flat_map(|eight| [0, 1].map(|half| (eight, half))) {
                let sum = |i: usize| {
                    let parts = chains.iter().map(|sums| sums[eight][2 * half + i].get());
                    parts.reduce(|a, b| a + b).unwrap_or_else(|| k.constant(0.0))
                };
                to.plus(8 * eight + 8 * half * logits_stride(self.keys)).store_vector([sum(0), sum(1)]);
            }
        });
    }

    /// Loads all logits of this warp's rows as accumulator fragments.
    pub(super) fn load(&self) -> Vec<AccFragment<'k>> {
        let k = self.cta.k;
        let half = |eight: usize, half: usize| {
            let at = self.at.plus(8 * eight + 8 * half * logits_stride(self.keys));
            let partial_sum = |part: usize| at.plus(part * self.partial_sum()).load_vector::<2>();
            let both = |a: [Value<'k, f32>; 2], b: [Value<'k, f32>; 2]| [a[0] + b[0], a[1] + b[1]];
            (0..self.body.dim_parts).map(partial_sum).reduce(both).unwrap_or_else(|| [k.constant(0.0); 2])
        };
        let tile = |eight: usize| {
            let [[a, b], [c, d]] = [half(eight, 0), half(eight, 1)];
            [a, b, c, d].map(|logit| k.var("logit", logit))
        };
        (0..self.keys / 8).map(tile).collect()
    }
}

fn zeros(k: &Builder) -> AccFragment<'_> {
    std::array::from_fn(|_| k.var("s", 0.0))
}
