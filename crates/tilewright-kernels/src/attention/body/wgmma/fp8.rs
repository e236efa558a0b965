//! The loop of a consumer over products of e4m3.
//!
//! ```text
//! for each KV tile j, from the last to the first:
//!     start S' = Q · K(j-1)ᵀ
//!     P = 2^(S · scale - reference · scale + 6)  rounded to e4m3
//!     start T = P · V(j)                         in the registers of S
//!     wait for S': mask, row maxima              while T is computed
//!     O = O · r, if a reference moved, with r = 2^((old - new) · scale)
//!     O = O + T · r
//! ```
//!
//! - Accumulators of 8-bit products have about 13 bits on Hopper, so the sums of a tile are added to f32 registers.
//! - A reference follows the maximum of its row when that is larger by more than 2^2.8. Weights are then below 2^8.8 = 446, and e4m3
//!   ends at 448. The factor 2^6 of outputs and sums is removed at the end of an item. With exact maxima of random logits, a
//!   warp would rescale its outputs in about 40 % of the tiles of a prompt of 16,384.
//! - The exponentials of both warpgroups run at the same time. In turns, as with 16 bits, a prompt of 16,384 took 3 % longer.
//! - S and S' change roles, so two tiles are processed per iteration where none needs a mask; other tiles copy S' to S.

use super::{Consumer, Exponentials, Masked, softmax::row_max};
use crate::{
    attention::kernel::{cta::CurrentItem, fragments::AccFragment, softmax::finite_max},
    tile::{SharedTile, reduce},
};
use tilewright_ptx::{Major, Shared, Value, Var, WgmmaLeft, WgmmaOperands};

/// Base-2 logarithm of the weight of a logit that equals its reference.
const REFERENCE_WEIGHT: f32 = 6.0;
/// The inverse of that weight.
pub(super) const WEIGHT_UNIT: f32 = 1.0 / 64.0;
/// Growth of a maximum base-2 logit above its reference without a rescale.
const THRESHOLD: f32 = 2.8;

/// Logits of a tile and those of the one before it.
type Buffers<'c, 'k> = [&'c Vec<AccFragment<'k>>; 2];

impl<'c, 'k> Consumer<'c, 'k> {
    /// Processes the KV tiles of an item before `end`.
    pub(super) fn process_fp8(&self, current: &CurrentItem<'k>, end: Value<'k, u32>) {
        let (k, first) = (self.k, self.first_tile.get());
        let buffers = [&self.logits, &self.next_logits];
        let tile = k.var("tile", end - 1);
        self.start_logits(current, buffers[0]);
        let mask = self.prepare_mask(current, tile.get(), Masked::Any);
        k.wgmma_wait(0);
        self.release_products(tile.get());
        self.mask(current, tile.get(), buffers[0], &mask);
        let maxima = self.maxima(buffers[0]);
        self.state.max.iter().zip(maxima).for_each(|(to, max)| to.set(max));
        k.loop_(|| {
            k.break_if(tile.get().eq(first));
            self.fp8_pairs(current, tile);
            k.when(tile.get().ne(first), || {
                self.fp8_tile(current, tile, Masked::Any, buffers);
                let pairs = buffers[0].iter().flatten().zip(buffers[1].iter().flatten());
                pairs.for_each(|(to, from)| to.set(from.get()));
            });
        });
        self.fp8_weights(current, buffers[0]);
        self.add_values(current, tile.get(), Masked::Any, buffers[0]);
        k.wgmma_wait(0);
        self.release(self.values);
        let pairs = self.state.o.iter().flatten().zip(buffers[0].iter().flatten());
        pairs.for_each(|(o, sum)| o.set(o.get() + sum.get()));
    }

    /// Processes pairs of tiles as long as none needs a mask, nor the tile after them.
    fn fp8_pairs(&self, current: &CurrentItem<'k>, tile: Var<'k, u32>) {
        if self.hooks.masks_all_tiles() {
            return;
        }
        let [begin, end] = self.unmasked.map(|tile| tile.get());
        let last = begin.max(self.first_tile.get()) + 1;
        let buffers = [&self.logits, &self.next_logits];
        self.k.loop_(|| {
            self.k.break_if(tile.get().le(last) | tile.get().ge(end));
            self.fp8_tile(current, tile, Masked::No, buffers);
            self.fp8_tile(current, tile, Masked::No, [buffers[1], buffers[0]]);
        });
    }

    /// Adds the values of `tile`, and computes the logits of the tile before it, which becomes `tile`.
    fn fp8_tile(
        &self,
        current: &CurrentItem<'k>,
        tile: Var<'k, u32>,
        masked: Masked,
        [logits, next]: Buffers<'_, 'k>,
    ) {
        let k = self.k;
        self.keys.wait_full();
        self.multiply_keys(next);
        self.fp8_weights(current, logits);
        self.add_values(current, tile.get(), masked, logits);
        tile.set(tile.get() - 1);
        let mask = self.prepare_mask(current, tile.get(), masked);
        k.wgmma_wait(1);
        self.release_products(tile.get());
        self.mask(current, tile.get(), next, &mask);
        let scales = self.logit_scales(current);
        let last = self.state.max.map(|max| max.get());
        let own = [0, 1].map(|half| row_max(next, half));
        let growth = |max: Value<'k, f32>, half: usize| (last[half] - max) * scales[half];
        let is_moved = |max: Value<'k, f32>, half: usize| growth(max, half).lt(-THRESHOLD);
        let rescale = [0, 1].map(|_| k.var("rescale", 1.0));
        // the assembler would move the wait before the maxima, but not across a branch that depends on them
        k.when(k.any(is_moved(own[0], 0) | is_moved(own[1], 1)), || {
            let maxima = reduce::quads_max(own.to_vec());
            for half in 0..2 {
                let moved = is_moved(maxima[half], half);
                let factor = moved.select(growth(maxima[half], half), 0.0).exp2();
                rescale[half].set(factor);
                self.sum[half].set(self.sum[half].get() * factor);
                self.state.max[half].set(moved.select(maxima[half], last[half]));
            }
            for (i, o) in self.state.o.iter().flat_map(|of| of.iter().enumerate()) {
                o.set(o.get() * rescale[i / 2].get());
            }
        });
        k.wgmma_wait(0);
        self.release(self.values);
        for (o, sums) in self.state.o.iter().zip(logits) {
            for (i, (o, sum)) in o.iter().zip(sums).enumerate() {
                o.set(sum.get().mul_add(rescale[i / 2].get(), o.get()));
            }
        }
    }

    /// Maxima of the logits of this thread's rows.
    fn maxima(&self, logits: &[AccFragment<'k>]) -> [Value<'k, f32>; 2] {
        let maxima = reduce::quads_max([0, 1].map(|half| row_max(logits, half)).to_vec());
        [maxima[0], maxima[1]]
    }

    /// Converts the logits of a tile to weights, and adds them to the sums of this thread.
    fn fp8_weights(&self, current: &CurrentItem<'k>, logits: &[AccFragment<'k>]) {
        let (k, scales, cta) = (self.k, self.logit_scales(current), &self.shared.products());
        let offsets = [0, 1].map(|half| {
            let max = finite_max(self.state.max[half].get());
            max.mul_add(-scales[half], k.constant(REFERENCE_WEIGHT))
        });
        let exponentials = Exponentials { cta, logits, weights: &self.weights };
        let added = exponentials.run(|half, logit| logit.mul_add(scales[half], offsets[half]), |_| ());
        self.sum.iter().zip(added).for_each(|(sum, added)| sum.set(sum.get() + added));
    }

    /// Starts `T = P · V` of a tile.
    fn add_values(
        &self,
        current: &CurrentItem<'k>,
        tile: Value<'k, u32>,
        masked: Masked,
        sums: &[AccFragment<'k>],
    ) {
        let k = self.k;
        self.values.wait_full();
        k.when(masked.holds(self, tile), || self.clean_values(current, tile));
        let values = self.shared.values.0.stage(self.values.stage()).rows_descriptor();
        let sums: Vec<_> = sums[..self.state.o.len()].iter().flatten().copied().collect();
        k.wgmma_fence();
        for (step, weights) in self.weights.chunks_exact(4).enumerate() {
            let left = WgmmaLeft::Registers(std::array::from_fn(|i| weights[i].get()));
            let right = values.depth_step(step);
            let operands = WgmmaOperands { elements: self.elements(), left, right, right_major: Major::K };
            k.wgmma(&sums, operands, step > 0);
        }
        k.wgmma_commit();
    }

    /// Replaces NaN in a transposed tile by 0 and writes the masks of its keys, as `kernel::nonfinite` does; a fence must follow. A
    /// thread has 4 bytes of 8 elements.
    pub(super) fn extract_transposed(&self, values: SharedTile<'k>, masks: Shared<'k, u16>) {
        let (k, cta, config) = (self.k, &self.shared.cta, &self.shared.config);
        let (words, groups) = (config.kv_tokens() as u32 / 4, config.vo() / 8);
        k.repeat((k.thread(), words * groups as u32), cta.threads as u32, |at| {
            let (word, group) = (at & (words - 1), at / words);
            let chunk = word >> 2;
            let found: [_; 4] = std::array::from_fn(|_| k.var::<u32>("found", 0));
            for element in 0..8_u32 {
                let at = values.chunk((group << 3) + element, chunk).cast::<u32>().at(word & 3);
                let bytes = at.load();
                // the sign bits of NaN
                let nan = ((bytes & 0x7f7f_7f7f) + 0x0101_0101) & 0x8080_8080;
                at.store(bytes & !((nan - (nan >> 7)) | nan));
                for (byte, found) in found.iter().enumerate() {
                    let bit = (nan >> (8 * byte as u32 + 7)) & 1;
                    found.set(found.get() | (bit << element));
                }
            }
            for (byte, found) in found.iter().enumerate() {
                let key = (chunk << 4) + ((word & 3) << 1) + (8 * (byte as u32 / 2) + byte as u32 % 2);
                masks.at(key * groups as u32 + group).store((found.get() * 0x101).low());
            }
        });
    }
}
