//! Attention over bf16 tiles of keys and values: strips of 32 rows, with the products of [`bf16`](super::super::bf16).

use super::{KvTile, QueryTile, RowStrip, f32_attend::rescale};
use crate::cpu::simd::{
    ALIGN, Bf16Mma, KV_TOKENS, Matrix, ProductShape, PvProduct, STRIP, Simd,
    bf16::{DEPTH, DataRows},
};
use half::bf16;

impl QueryTile<'_, '_> {
    /// Loads the keys and values of a tile into scratch as bf16 pairs. Returns the mask of non-finite value rows; their pairs
    /// are 0.
    #[inline(always)]
    pub(super) fn load_bf16_tile<S: Simd>(&mut self, simd: S, mma: Bf16Mma, keys: &KvTile<'_>) -> u64 {
        let (dim, layout) = (self.ctx.params.plan.problem.head_dim(), &self.ctx.layout);
        let (now, (k, v)) = (keys.location, self.ctx.heads_from(keys.head));
        for first in (0..now.tokens).step_by(ALIGN) {
            let tokens = first..now.tokens.min(first + ALIGN);
            self.prefetch_next_tile(simd, keys, first / ALIGN);
            let to = self.scratch[layout.keys + first..layout.values].as_mut_ptr();
            let to = Matrix { ptr: to, stride: KV_TOKENS };
            let rows = DataRows { data: k, offsets: &now.k[tokens], width: dim.qk };
            // SAFETY: scratch holds [head_dim_qk, 64] f32 for keys; pairs take half of it.
            unsafe { mma.transpose_keys(simd, rows, to) };
        }
        let rows = DataRows { data: v, offsets: &now.v[..now.tokens], width: dim.vo };
        let values = &mut self.scratch[layout.values..][..KV_TOKENS * layout.vo];
        let to = Matrix { ptr: values.as_mut_ptr(), stride: layout.vo };
        // SAFETY: scratch holds [64, head_dim_vo] f32 for values, rows padded to whole registers.
        unsafe { mma.interleave_values(rows, to) }
    }

    /// Updates the state of all rows of a KV head with a tile of keys.
    #[inline(always)]
    pub(super) fn attend_bf16<S: Simd>(&mut self, simd: S, mma: Bf16Mma, nonfinite: u64, tile: &KvTile<'_>) {
        let (ctx, dim) = (self.ctx, self.ctx.params.plan.problem.head_dim());
        let all = tile.head * ctx.rows_per_head()..(tile.head + 1) * ctx.rows_per_head();
        for first in all.clone().step_by(STRIP) {
            let rows = STRIP.min(all.end - first);
            self.prefetch_during_strip(simd, tile, (first - all.start) / STRIP, all.len().div_ceil(STRIP));
            let mut visible: [u64; STRIP] = self.visible(first..first + rows, tile.range());
            let mut rescales = [1.0; STRIP];
            let any = visible.iter().fold(0, |any, visible| any | visible);
            if any == 0 {
                continue;
            }
            let width = (64 - any.leading_zeros() as usize).next_multiple_of(ALIGN);
            // SAFETY: scratch holds each matrix in the shape of `ScratchLayout`, queries and keys as pairs in half of it.
            // It pads queries for a strip at any row; matrices do not overlap. `Worker::run` holds the thread guard.
            unsafe {
                let base = self.scratch.as_mut_ptr();
                let queries = base.cast::<bf16>().add(first * dim.qk).cast_const();
                let queries = Matrix { ptr: queries, stride: dim.qk };
                let keys = Matrix { ptr: base.add(ctx.layout.keys).cast_const(), stride: KV_TOKENS };
                let logits = Matrix { ptr: base.add(ctx.layout.logits), stride: KV_TOKENS };
                let shape = ProductShape { rows, columns: width, depth: dim.qk };
                mma.multiply::<false>(shape, queries, keys, logits);
                let strip = RowStrip { first, rows, width };
                self.finish_logits(simd, strip, tile.positions);
                for (r, rescale_by) in rescales[..rows].iter_mut().enumerate() {
                    *rescale_by = self.softmax_row(simd, strip, r, visible[r]);
                    let (row, weights) = (logits.ptr.add(r * KV_TOKENS), base.add(ctx.layout.weights));
                    mma.round_weights(row, width, weights.cast::<bf16>().add(r * KV_TOKENS));
                }
                self.accumulate_pv_bf16(simd, mma, strip, &rescales[..rows]);
                if any & nonfinite != 0 {
                    visible.iter_mut().for_each(|visible| *visible &= nonfinite);
                    self.add_nonfinite_values(simd, first, &visible[..rows], tile);
                }
            }
        }
    }

    /// `o = o · rescale + weights · values` for the rows of a strip.
    ///
    /// # Safety
    /// Scratch holds the strip's weights, of a width that is a multiple of 16, and the tile's values as pairs.
    #[inline(always)]
    unsafe fn accumulate_pv_bf16<S: Simd>(
        &mut self,
        simd: S,
        mma: Bf16Mma,
        strip: RowStrip,
        rescales: &[f32],
    ) {
        let (layout, vo) = (&self.ctx.layout, self.ctx.params.plan.problem.head_dim().vo);
        // SAFETY: matrices have the shapes of `ScratchLayout`; the caller rounded weights, which pads them with 0 to a multiple
        // of `DEPTH`. `Worker::run` holds the thread guard.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let weights = base.add(layout.weights).cast::<bf16>();
            let weights = Matrix { ptr: weights.cast_const(), stride: KV_TOKENS };
            let values = Matrix { ptr: base.add(layout.values).cast_const(), stride: layout.vo };
            let depth = strip.width.next_multiple_of(DEPTH);
            let shape = ProductShape { rows: strip.rows, columns: vo, depth };
            let o = Matrix { ptr: base.add(layout.o + strip.first * layout.vo), stride: layout.vo };
            for (r, &rescale_by) in rescales.iter().enumerate() {
                rescale(simd, o.ptr.add(r * o.stride), vo, rescale_by);
            }
            if strip.rows.is_multiple_of(STRIP / 2) {
                return mma.multiply::<true>(shape, weights, values, o);
            }
            // a full strip would overwrite rows after this one
            let full = Matrix { ptr: base.add(layout.strip), stride: layout.vo };
            let elements = strip.rows * layout.vo;
            full.ptr.copy_from_nonoverlapping(o.ptr, elements);
            mma.multiply::<true>(shape, weights, values, full);
            o.ptr.copy_from_nonoverlapping(full.ptr, elements);
        }
    }

    /// `o += weights · values` over the keys in `visible`, from the cache.
    ///
    /// # Safety
    /// Scratch holds the strip's weights.
    #[inline(always)]
    unsafe fn add_nonfinite_values<S: Simd>(
        &mut self,
        simd: S,
        first: usize,
        visible: &[u64],
        keys: &KvTile<'_>,
    ) {
        let (layout, dim) = (&self.ctx.layout, self.ctx.params.plan.problem.head_dim().vo);
        let base = self.scratch.as_mut_ptr();
        for (r, visible) in visible.chunks(1).enumerate() {
            // SAFETY: matrices have the shapes of `ScratchLayout`.
            unsafe {
                let weights = base.add(layout.logits + r * KV_TOKENS).cast_const();
                let weights = Matrix { ptr: weights, stride: KV_TOKENS };
                let o = Matrix { ptr: base.add(layout.o + (first + r) * layout.vo), stride: layout.vo };
                self.accumulate_pv_from_cache(simd, PvProduct { visible, dim, weights, values: keys, o });
            }
        }
    }
}
