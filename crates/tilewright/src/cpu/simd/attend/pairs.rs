//! Keys and values that stay bf16: strips of 32 rows, multiplied by what the machine has for it (see [`dots`](super::super::dots)).

use super::{Keys, Tile, wide::rescale};
use crate::cpu::simd::{
    Simd,
    dots::{self, Dots, STRIP},
    place::{ALIGN, KV_TOKENS},
    tile::Matrix,
};
use half::bf16;

impl Tile<'_, '_> {
    /// Brings a tile of keys and values of a head into scratch as pairs. Returns the bits of values that are not finite, which
    /// are 0 among the pairs.
    #[inline(always)]
    pub(super) fn pair_keys_and_values<S: Simd>(&mut self, simd: S, dots: Dots, keys: &Keys<'_>) -> u64 {
        let (dim, layout) = (self.place.call.plan.problem.head_dim(), &self.place.layout);
        let (now, (k, v)) = (keys.at, self.place.heads_from(keys.head));
        for first in (0..now.tokens).step_by(ALIGN) {
            let tokens = first..now.tokens.min(first + ALIGN);
            self.foresee(simd, keys, first / ALIGN);
            let to = self.scratch[layout.keys + first..layout.values].as_mut_ptr();
            let to = Matrix { at: to, stride: KV_TOKENS };
            // SAFETY: the keys' part of scratch is twice [head_dim_qk / 2, 64].
            unsafe { dots.pair_keys(simd, (k, &now.k[tokens], dim.qk), to) };
        }
        let offsets = &now.v[..now.tokens];
        let values = &mut self.scratch[layout.values..][..KV_TOKENS * layout.vo];
        let to = Matrix { at: values.as_mut_ptr(), stride: layout.vo };
        // SAFETY: the values' part of scratch is [64, head_dim_vo], rounded up.
        unsafe { dots.pair_values((v, offsets, dim.vo), to) }
    }

    /// Adds the keys to the state of every row of a KV head.
    #[inline(always)]
    pub(super) fn attend_pairs<S: Simd>(&mut self, simd: S, (dots, special): (Dots, u64), tile: &Keys<'_>) {
        let (place, dim) = (self.place, self.place.call.plan.problem.head_dim());
        let all = tile.head * place.rows_per_head()..(tile.head + 1) * place.rows_per_head();
        for first in all.clone().step_by(STRIP) {
            let rows = STRIP.min(all.end - first);
            self.foresee_under_strip(simd, tile, ((first - all.start) / STRIP, all.len().div_ceil(STRIP)));
            let mut seen: [u64; STRIP] = self.seen((first, rows), (tile.start, tile.at.tokens));
            let mut factors = [1.0; STRIP];
            let any = seen.iter().fold(0, |any, seen| any | seen);
            if any == 0 {
                continue;
            }
            let width = (64 - any.leading_zeros() as usize).next_multiple_of(ALIGN);
            // SAFETY: scratch holds each matrix with the shape and stride named in `Layout`, queries and keys as pairs in half of
            // it; a strip of queries can be read from any row on. None overlaps another.
            unsafe {
                let base = self.scratch.as_mut_ptr();
                let queries = base.cast::<bf16>().add(first * dim.qk).cast_const();
                let queries = Matrix { at: queries, stride: dim.qk };
                let keys = Matrix { at: base.add(place.layout.keys).cast_const(), stride: KV_TOKENS };
                let logits = Matrix { at: base.add(place.layout.logits), stride: KV_TOKENS };
                dots.multiply::<false>((rows, width, dim.qk), queries, keys, logits);
                self.find_logits(simd, (first, rows), width, tile.positions);
                for (r, factor) in factors[..rows].iter_mut().enumerate() {
                    *factor = self.weigh_row(simd, (first + r, r), (seen[r], width));
                    let (row, weights) = (logits.at.add(r * KV_TOKENS), base.add(place.layout.weights));
                    dots.round_weights(row, width, weights.cast::<bf16>().add(r * KV_TOKENS));
                }
                self.weigh_pairs(simd, dots, (first, &factors[..rows]), width);
                if any & special != 0 {
                    seen.iter_mut().for_each(|seen| *seen &= special);
                    self.weigh_special(simd, (first, &seen[..rows]), tile);
                }
            }
        }
    }

    /// `o = o · factor + weights · values` for the strip of rows from `first` on.
    ///
    /// # Safety
    /// Scratch holds the strip's weights in `width` columns, a multiple of 16, and the tile's values as pairs.
    #[inline(always)]
    unsafe fn weigh_pairs<S: Simd>(
        &mut self,
        simd: S,
        dots: Dots,
        (first, factors): (usize, &[f32]),
        width: usize,
    ) {
        let (layout, vo) = (&self.place.layout, self.place.call.plan.problem.head_dim().vo);
        // SAFETY: as in `attend_pairs`; weights are 0 from `width` to the next whole depth.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let weights = base.add(layout.weights).cast::<bf16>();
            let weights = Matrix { at: weights.cast_const(), stride: KV_TOKENS };
            let values = Matrix { at: base.add(layout.values).cast_const(), stride: layout.vo };
            let shape = (factors.len(), vo, width.next_multiple_of(dots::DEPTH));
            let o = Matrix { at: base.add(layout.o + first * layout.vo), stride: layout.vo };
            for (r, &factor) in factors.iter().enumerate() {
                rescale(simd, o.at.add(r * o.stride), vo, factor);
            }
            if factors.len().is_multiple_of(STRIP / 2) {
                return dots.multiply::<true>(shape, weights, values, o);
            }
            // a whole strip would write to the rows of others, too
            let strip = Matrix { at: base.add(layout.strip), stride: layout.vo };
            let elements = factors.len() * layout.vo;
            strip.at.copy_from_nonoverlapping(o.at, elements);
            dots.multiply::<true>(shape, weights, values, strip);
            o.at.copy_from_nonoverlapping(strip.at, elements);
        }
    }

    /// `o += weights · values` over the keys of `seen` alone.
    ///
    /// # Safety
    /// Scratch holds the strip's weights.
    #[inline(always)]
    unsafe fn weigh_special<S: Simd>(&mut self, simd: S, (first, seen): (usize, &[u64]), keys: &Keys<'_>) {
        let layout = &self.place.layout;
        let base = self.scratch.as_mut_ptr();
        for (r, seen) in seen.chunks(1).enumerate() {
            // SAFETY: as in `attend_pairs`.
            unsafe {
                let weights = base.add(layout.logits + r * KV_TOKENS).cast_const();
                let weights = Matrix { at: weights, stride: KV_TOKENS };
                let o = Matrix { at: base.add(layout.o + (first + r) * layout.vo), stride: layout.vo };
                self.weigh_rows(simd, (seen, keys), weights, o);
            }
        }
    }
}
