//! Keys and values that stay bf16: strips of 32 rows, multiplied by what the machine has for it (see [`dots`](super::super::dots)).

use super::Tile;
use crate::cpu::simd::{
    Simd,
    dots::{self, Dots, STRIP},
    gather,
    place::{ALIGN, KV_TOKENS, Located},
    tile::{Matrix, Rows},
    weigh::Weigh,
};
use half::bf16;

impl Tile<'_, '_> {
    /// Brings a tile of keys and values of a head into scratch as pairs, and asks for those of the next. Returns the
    /// bits of values that are not finite, which are 0 among the pairs.
    #[inline(always)]
    pub(super) fn pair_keys_and_values<S: Simd>(
        &mut self,
        simd: S,
        dots: Dots,
        (head, now): (usize, &Located),
        (next_head, next): (usize, &Located),
    ) -> u64 {
        let (dim, layout) = (self.place.call.plan.problem.head_dim(), self.place.layout);
        let (k, v) = self.place.heads_from(head);
        let (next_k, next_v) = self.place.heads_from(next_head);
        for first in (0..now.tokens).step_by(ALIGN) {
            let tokens = first..now.tokens.min(first + ALIGN);
            for token in first..next.tokens.min(first + ALIGN) {
                gather::prefetch(simd, next_k, next.k[token], dim.qk);
            }
            let to = self.scratch[layout.keys + first..layout.values].as_mut_ptr();
            let to = Matrix { at: to, stride: KV_TOKENS };
            // SAFETY: the keys' part of scratch is twice [head_dim_qk / 2, 64].
            unsafe { dots::pair_keys(simd, (dots::elements(k), &now.k[tokens], dim.qk), to) };
        }
        for token in 0..next.tokens {
            gather::prefetch(simd, next_v, next.v[token], dim.vo);
        }
        let offsets = &now.v[..now.tokens];
        let values = &mut self.scratch[layout.values..][..KV_TOKENS * layout.vo];
        let to = Matrix { at: values.as_mut_ptr(), stride: layout.vo };
        // SAFETY: the values' part of scratch is [64, head_dim_vo], rounded up.
        unsafe { dots.pair_values((dots::elements(v), offsets, dim.vo), to) }
    }

    /// Adds the keys at `now`, of which the first is `start`, to the state of every row of a KV head.
    #[inline(always)]
    pub(super) fn attend_pairs<S: Simd>(
        &mut self,
        simd: S,
        (dots, special): (Dots, u64),
        head: usize,
        (start, now): (usize, &Located),
        positions: &[f32; KV_TOKENS],
    ) {
        let (place, dim) = (self.place, self.place.call.plan.problem.head_dim());
        let all = head * place.rows_per_head()..(head + 1) * place.rows_per_head();
        for first in all.clone().step_by(STRIP) {
            let rows = STRIP.min(all.end - first);
            let (mut seen, mut factors) = ([0_u64; STRIP], [1.0; STRIP]);
            (0..rows).for_each(|r| seen[r] = self.seen(first + r, (start, now.tokens)));
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
                dots.multiply((rows, width, dim.qk), queries, keys, logits);
                for (r, factor) in factors[..rows].iter_mut().enumerate() {
                    *factor = self.weigh_row(simd, (first + r, r), (seen[r], width), positions);
                }
                self.weigh_pairs(simd, dots, (first, &factors[..rows]), width);
                if any & special != 0 {
                    seen.iter_mut().for_each(|seen| *seen &= special);
                    self.weigh_special(simd, head, (first, &seen[..rows]), now);
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
        let (layout, vo) = (self.place.layout, self.place.call.plan.problem.head_dim().vo);
        // SAFETY: as in `attend_pairs`; weights are 0 from `width` to the next whole depth.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let weights = base.add(layout.weights).cast::<bf16>();
            dots.round_weights((factors.len(), width), base.add(layout.logits), weights);
            let weights = Matrix { at: weights.cast_const(), stride: KV_TOKENS };
            let values = Matrix { at: base.add(layout.values).cast_const(), stride: layout.vo };
            let sums = Matrix { at: base.add(layout.sums_of_values), stride: layout.vo };
            let depth = width.next_multiple_of(dots::DEPTH);
            dots.multiply((factors.len(), vo, depth), weights, values, sums);
            for (r, &factor) in factors.iter().enumerate() {
                let (o, sums) = (base.add(layout.o + (first + r) * layout.vo), sums.at.add(r * layout.vo));
                let factor = simd.splat(factor);
                for at in (0..vo).step_by(S::LANES) {
                    let sum = simd.mul_add(simd.load(o.add(at)), factor, simd.load(sums.add(at)));
                    simd.store(o.add(at), sum);
                }
            }
        }
    }

    /// `o += weights · values` over the keys of `seen` alone.
    ///
    /// # Safety
    /// Scratch holds the strip's weights.
    #[inline(always)]
    unsafe fn weigh_special<S: Simd>(
        &mut self,
        simd: S,
        head: usize,
        (first, seen): (usize, &[u64]),
        now: &Located,
    ) {
        let (layout, width) = (self.place.layout, self.place.call.plan.problem.head_dim().vo);
        let values = dots::elements(self.place.heads_from(head).1);
        let values = Rows::new(values, &now.v[..now.tokens], width);
        let base = self.scratch.as_mut_ptr();
        for (r, seen) in seen.chunks(1).enumerate() {
            // SAFETY: as in `attend_pairs`.
            unsafe {
                let weights = base.add(layout.logits + r * KV_TOKENS).cast_const();
                let weights = Matrix { at: weights, stride: KV_TOKENS };
                let o = Matrix { at: base.add(layout.o + (first + r) * layout.vo), stride: layout.vo };
                Weigh { seen, width, weights, values, o }.run(simd);
            }
        }
    }
}
