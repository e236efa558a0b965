//! Attention over keys and values dequantized to f32, for every dtype and hook: one micro-kernel computes both products,
//! six rows at a time.

use super::{KvTile, QueryTile, RowStrip};
use crate::{
    cpu::simd::{
        ALIGN, KV_TOKENS, KvRows, Matrix, MatrixProduct, ProductShape, PvProduct, Simd, ValuesAt, gather,
    },
    tensor::{Data, each_data},
};

impl QueryTile<'_, '_> {
    /// Dequantizes the keys (transposed) and values of a tile into scratch.
    #[inline(always)]
    pub(super) fn load_f32_tile<S: Simd>(&mut self, simd: S, keys: &KvTile<'_>) {
        let (dim, layout) = (self.ctx.params.plan.problem.head_dim(), &self.ctx.layout);
        let (now, (k, v)) = (keys.location, self.ctx.heads_from(keys.head));
        let pe = self.ctx.params.inputs.k_pe.map(|pe| pe.view.data());
        let width = if pe.is_some() { dim.vo } else { dim.qk };
        for first in (0..now.tokens).step_by(ALIGN) {
            let tokens = first..now.tokens.min(first + ALIGN);
            self.prefetch_next_tile(simd, keys, first / ALIGN);
            let to = self.scratch[layout.keys + first..layout.values].as_mut_ptr();
            // SAFETY: scratch holds [head_dim_qk, 64] for keys, and `first` is a multiple of every register size.
            unsafe {
                let to = Matrix { ptr: to, stride: KV_TOKENS };
                simd.vectorize(gather::TransposeTask::new(k, &now.k[tokens.clone()], width, to));
                if let Some(pe) = pe {
                    let to = Matrix { ptr: to.ptr.add(width * KV_TOKENS), stride: KV_TOKENS };
                    simd.vectorize(gather::TransposeTask::new(pe, &now.pe[tokens], dim.qk - width, to));
                }
            }
        }
        if self.ctx.reads_values_once::<S>() {
            return;
        }
        let values = &mut self.scratch[layout.values..][..KV_TOKENS * layout.vo];
        let to = Matrix { ptr: values.as_mut_ptr(), stride: layout.vo };
        // SAFETY: scratch holds [64, head_dim_vo] for values, rows padded to whole registers.
        simd.vectorize(unsafe { gather::WidenTask::new(v, &now.v[..now.tokens], dim.vo, to) });
    }

    /// Applies the key and value hooks.
    #[inline(always)]
    pub(super) fn apply_kv_hooks<S: Simd>(&mut self, _: S, keys: &KvTile<'_>) {
        let (params, layout) = (self.ctx.params, &self.ctx.layout);
        let (dim, variant) = (params.plan.problem.head_dim(), params.variant);
        let kv_head = self.ctx.item.kv_heads.start + keys.head as u32;
        if params.hooks.key {
            let tile = &mut self.scratch[layout.keys..][..dim.qk * KV_TOKENS];
            variant.key(params.isa, kv_head, keys.positions, tile);
        }
        if params.hooks.value {
            let values = &mut self.scratch[layout.values..][..keys.location.tokens * layout.vo];
            let at = ValuesAt { kv_head, kv: keys.positions, stride: layout.vo, width: dim.vo };
            variant.value(params.isa, at, values);
        }
    }

    /// Updates the state of all rows of a KV head with a tile of keys.
    #[inline(always)]
    pub(super) fn attend_f32<S: Simd>(&mut self, simd: S, keys: &KvTile<'_>) {
        let rows_per_head = self.ctx.rows_per_head();
        let all = keys.head * rows_per_head..(keys.head + 1) * rows_per_head;
        for first in all.clone().step_by(S::TILE_ROWS) {
            let rows = S::TILE_ROWS.min(all.end - first);
            if !self.ctx.reads_values_once::<S>() {
                let strip = (first - all.start) / S::TILE_ROWS;
                self.prefetch_during_strip(simd, keys, strip, all.len().div_ceil(S::TILE_ROWS));
            }
            let visible: [u64; 6] = self.visible(first..first + rows, keys.range());
            let any = visible.iter().fold(0, |any, visible| any | visible);
            if any == 0 {
                continue;
            }
            let width = (64 - any.leading_zeros() as usize).next_multiple_of(S::LANES);
            let strip = RowStrip { first, rows, width };
            self.compute_weights(simd, strip, &visible[..rows], keys.positions);
            self.accumulate_pv(simd, first, &visible[..rows], keys);
        }
    }

    /// Computes the softmax weights of a strip.
    #[inline(always)]
    fn compute_weights<S: Simd>(
        &mut self,
        simd: S,
        strip: RowStrip,
        visible: &[u64],
        positions: &[f32; KV_TOKENS],
    ) {
        let (dim, layout) = (self.ctx.params.plan.problem.head_dim(), &self.ctx.layout);
        let RowStrip { first, rows, width } = strip;
        // SAFETY: scratch holds each matrix in the shape of `ScratchLayout`, padded to whole registers; they do not
        // overlap.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let queries = Matrix { ptr: base.add(first * dim.qk).cast_const(), stride: dim.qk };
            let keys = Matrix { ptr: base.add(layout.keys).cast_const(), stride: KV_TOKENS };
            let logits = Matrix { ptr: base.add(layout.logits), stride: KV_TOKENS };
            std::slice::from_raw_parts_mut(logits.ptr, rows * KV_TOKENS).fill(0.0);
            let shape = ProductShape { rows, columns: width, depth: dim.qk };
            MatrixProduct { shape, a: queries, b: keys, c: logits }.run(simd);
            self.finish_logits(simd, strip, positions);
            for (r, &visible) in visible.iter().enumerate() {
                let rescale_by = self.softmax_row(simd, strip, r, visible);
                let o = self.scratch.as_mut_ptr().add(layout.o + (first + r) * layout.vo);
                rescale(simd, o, dim.vo, rescale_by);
            }
        }
    }

    /// `o += weights · values` for at most `TILE_ROWS` rows, with values dequantized as they are loaded from the cache.
    ///
    /// # Safety
    /// Same as [`PvProduct::run`].
    #[inline(always)]
    pub(super) unsafe fn accumulate_pv_from_cache<S: Simd>(
        &self,
        simd: S,
        PvProduct { visible, dim, weights, values: tile, o }: PvProduct<'_, &KvTile<'_>>,
    ) {
        let offsets = &tile.location.v[..tile.location.tokens];
        // SAFETY: the caller guarantees weights and `o` in the shapes of `PvProduct`; `KvRows::new` checks the values.
        unsafe {
            each_data!(self.ctx.heads_from(tile.head).1, Data, v => {
                PvProduct { visible, dim, weights, values: KvRows::new(v, offsets, dim), o }.run(simd);
            });
        }
    }

    /// `o += weights · values` for the strip of rows from `first` on.
    #[inline(always)]
    fn accumulate_pv<S: Simd>(&mut self, simd: S, first: usize, visible: &[u64], keys: &KvTile<'_>) {
        let (layout, dim) = (&self.ctx.layout, self.ctx.params.plan.problem.head_dim().vo);
        // SAFETY: scratch holds each matrix in the shape of `ScratchLayout`, padded to whole registers.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let weights = Matrix { ptr: base.add(layout.logits).cast_const(), stride: KV_TOKENS };
            let o = Matrix { ptr: base.add(layout.o + first * layout.vo), stride: layout.vo };
            if self.ctx.reads_values_once::<S>() {
                for quarter in 0..4 {
                    self.prefetch_next_tile(simd, keys, 4 + quarter);
                    let mut part = [0; 6];
                    let tokens = 0xffff << (16 * quarter);
                    part.iter_mut().zip(visible).for_each(|(part, visible)| *part = visible & tokens);
                    let visible = &part[..visible.len()];
                    self.accumulate_pv_from_cache(simd, PvProduct { visible, dim, weights, values: keys, o });
                }
            } else {
                let values = Matrix { ptr: base.add(layout.values).cast_const(), stride: layout.vo };
                PvProduct { visible, dim, weights, values, o }.run(simd);
            }
        }
    }
}

/// `row *= factor`; does nothing if the factor is 1.
///
/// # Safety
/// `row` is writable for `width` elements, rounded up to whole registers.
#[inline(always)]
pub(super) unsafe fn rescale<S: Simd>(simd: S, row: *mut f32, width: usize, factor: f32) {
    if factor == 1.0 {
        return;
    }
    for at in (0..width).step_by(S::LANES) {
        // SAFETY: the caller guarantees `width` elements of `row`, rounded up to whole registers.
        unsafe { simd.store(row.add(at), simd.mul(simd.load(row.add(at)), simd.splat(factor))) };
    }
}
