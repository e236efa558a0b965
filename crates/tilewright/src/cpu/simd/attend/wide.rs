//! Keys and values widened to f32, for every dtype and every hook: one micro-kernel over lanes does both products, six rows at
//! a time.

use super::{Keys, Tile};
use crate::{
    cpu::simd::{
        Simd, gather,
        hooks::ValuesAt,
        place::{ALIGN, KV_TOKENS},
        tile::{Matrix, Product, Rows},
        weigh::Weigh,
    },
    tensor::Data,
};

impl Tile<'_, '_> {
    /// Brings the keys (transposed) and values of a tile and head into scratch.
    #[inline(always)]
    pub(super) fn load_keys_and_values<S: Simd>(&mut self, simd: S, keys: &Keys<'_>) {
        let (dim, layout) = (self.place.call.plan.problem.head_dim(), &self.place.layout);
        let (now, (k, v)) = (keys.at, self.place.heads_from(keys.head));
        let pe = self.place.call.inputs.k_pe.map(|(pe, _)| pe.data());
        let width = if pe.is_some() { dim.vo } else { dim.qk };
        for first in (0..now.tokens).step_by(ALIGN) {
            let tokens = first..now.tokens.min(first + ALIGN);
            self.foresee(simd, keys, first / ALIGN);
            let to = self.scratch[layout.keys + first..layout.values].as_mut_ptr();
            // SAFETY: the keys' part of scratch is [head_dim_qk, 64], and `first` a multiple of all registers.
            unsafe {
                let to = Matrix { at: to, stride: KV_TOKENS };
                simd.vectorize(gather::Transpose::new(k, &now.k[tokens.clone()], width, to));
                if let Some(pe) = pe {
                    let to = Matrix { at: to.at.add(width * KV_TOKENS), stride: KV_TOKENS };
                    simd.vectorize(gather::Transpose::new(pe, &now.pe[tokens], dim.qk - width, to));
                }
            }
        }
        if self.place.reads_values_once::<S>() {
            return;
        }
        let values = &mut self.scratch[layout.values..][..KV_TOKENS * layout.vo];
        let to = Matrix { at: values.as_mut_ptr(), stride: layout.vo };
        // SAFETY: the values' part of scratch is [64, head_dim_vo], rounded up.
        simd.vectorize(unsafe { gather::Widen::new(v, &now.v[..now.tokens], dim.vo, to) });
    }

    /// Applies the variant's hooks to keys and values.
    #[inline(always)]
    pub(super) fn transform_keys_and_values<S: Simd>(&mut self, _: S, keys: &Keys<'_>) {
        let (call, layout) = (self.place.call, &self.place.layout);
        let (dim, variant) = (call.plan.problem.head_dim(), call.inputs.variant);
        let kv_head = self.place.item.kv_heads.start + keys.head as u32;
        if call.live.key {
            let tile = &mut self.scratch[layout.keys..][..dim.qk * KV_TOKENS];
            variant.key(call.isa, kv_head, keys.positions, tile);
        }
        if call.live.value {
            let values = &mut self.scratch[layout.values..][..keys.at.tokens * layout.vo];
            let at = ValuesAt { kv_head, kv: keys.positions, stride: layout.vo, width: dim.vo };
            variant.value(call.isa, at, values);
        }
    }

    /// Adds the keys to the state of every row of a KV head.
    #[inline(always)]
    pub(super) fn attend<S: Simd>(&mut self, simd: S, keys: &Keys<'_>) {
        let rows_per_head = self.place.rows_per_head();
        let all = keys.head * rows_per_head..(keys.head + 1) * rows_per_head;
        for first in all.clone().step_by(S::TILE_ROWS) {
            let rows = S::TILE_ROWS.min(all.end - first);
            if !self.place.reads_values_once::<S>() {
                let strip = ((first - all.start) / S::TILE_ROWS, all.len().div_ceil(S::TILE_ROWS));
                self.foresee_under_strip(simd, keys, strip);
            }
            let seen: [u64; 6] = self.seen((first, rows), (keys.start, keys.at.tokens));
            let any = seen.iter().fold(0, |any, seen| any | seen);
            if any == 0 {
                continue;
            }
            let width = (64 - any.leading_zeros() as usize).next_multiple_of(S::LANES);
            self.weigh_keys(simd, (first, &seen[..rows]), width, keys.positions);
            self.weigh_values(simd, (first, &seen[..rows]), keys);
        }
    }

    /// From queries and keys to weights, for the strip of rows from `first` on over `width` keys.
    #[inline(always)]
    fn weigh_keys<S: Simd>(
        &mut self,
        simd: S,
        (first, seen): (usize, &[u64]),
        width: usize,
        positions: &[f32; KV_TOKENS],
    ) {
        let (dim, layout, rows) = (self.place.call.plan.problem.head_dim(), &self.place.layout, seen.len());
        // SAFETY: scratch holds each matrix with the shape and stride named in `Layout`, rounded up to whole
        // registers, and none overlaps another.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let queries = Matrix { at: base.add(first * dim.qk).cast_const(), stride: dim.qk };
            let keys = Matrix { at: base.add(layout.keys).cast_const(), stride: KV_TOKENS };
            let logits = Matrix { at: base.add(layout.logits), stride: KV_TOKENS };
            std::slice::from_raw_parts_mut(logits.at, rows * KV_TOKENS).fill(0.0);
            Product { shape: (rows, width, dim.qk), a: queries, b: keys, c: logits }.run(simd);
            self.find_logits(simd, (first, rows), width, positions);
            for (r, &seen) in seen.iter().enumerate() {
                let factor = self.weigh_row(simd, (first + r, r), (seen, width));
                let o = self.scratch.as_mut_ptr().add(layout.o + (first + r) * layout.vo);
                rescale(simd, o, dim.vo, factor);
            }
        }
    }

    /// `o += weights · values` with values as they lie in memory, for at most as many rows as a strip of the micro-kernel has.
    ///
    /// # Safety
    /// As [`Weigh::run`].
    #[inline(always)]
    pub(super) unsafe fn weigh_rows<S: Simd>(
        &self,
        simd: S,
        (seen, keys): (&[u64], &Keys<'_>),
        weights: Matrix<*const f32>,
        o: Matrix<*mut f32>,
    ) {
        let (width, offsets) = (self.place.call.plan.problem.head_dim().vo, &keys.at.v[..keys.at.tokens]);
        // SAFETY: the caller's promise.
        unsafe {
            match self.place.heads_from(keys.head).1 {
                Data::F32(v) => {
                    Weigh { seen, width, weights, values: Rows::new(v, offsets, width), o }.run(simd);
                }
                Data::F16(v) => {
                    Weigh { seen, width, weights, values: Rows::new(v, offsets, width), o }.run(simd);
                }
                Data::Bf16(v) => {
                    Weigh { seen, width, weights, values: Rows::new(v, offsets, width), o }.run(simd);
                }
                Data::E4m3(v) => {
                    Weigh { seen, width, weights, values: Rows::new(v, offsets, width), o }.run(simd);
                }
                Data::E5m2(v) => {
                    Weigh { seen, width, weights, values: Rows::new(v, offsets, width), o }.run(simd);
                }
                Data::I8(v) => {
                    Weigh { seen, width, weights, values: Rows::new(v, offsets, width), o }.run(simd);
                }
            }
        }
    }

    /// From weights and values to outputs, for the strip of rows from `first` on.
    #[inline(always)]
    fn weigh_values<S: Simd>(&mut self, simd: S, (first, seen): (usize, &[u64]), keys: &Keys<'_>) {
        let (layout, width) = (&self.place.layout, self.place.call.plan.problem.head_dim().vo);
        // SAFETY: as in `weigh_keys`.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let weights = Matrix { at: base.add(layout.logits).cast_const(), stride: KV_TOKENS };
            let o = Matrix { at: base.add(layout.o + first * layout.vo), stride: layout.vo };
            if self.place.reads_values_once::<S>() {
                for quarter in 0..4 {
                    self.foresee(simd, keys, 4 + quarter);
                    let mut of_quarter = [0; 6];
                    let tokens = 0xffff << (16 * quarter);
                    of_quarter.iter_mut().zip(seen).for_each(|(part, seen)| *part = seen & tokens);
                    self.weigh_rows(simd, (&of_quarter[..seen.len()], keys), weights, o);
                }
            } else {
                let values = Matrix { at: base.add(layout.values).cast_const(), stride: layout.vo };
                Weigh { seen, width, weights, values, o }.run(simd);
            }
        }
    }
}

/// `row *= factor`, nothing when it is 1.
///
/// # Safety
/// `row` points to `width` elements, rounded up to whole registers.
#[inline(always)]
pub(super) unsafe fn rescale<S: Simd>(simd: S, row: *mut f32, width: usize, factor: f32) {
    if factor == 1.0 {
        return;
    }
    for at in (0..width).step_by(S::LANES) {
        // SAFETY: the caller's promise.
        unsafe { simd.store(row.add(at), simd.mul(simd.load(row.add(at)), simd.splat(factor))) };
    }
}
