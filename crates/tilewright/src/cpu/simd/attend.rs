//! Executes one work item: a tile of query rows against a range of keys.
//!
//! The simple algorithm (flash attention):
//!
//! ```text
//! Q = the item's rows, all heads of the group
//! for each KV tile of 64 keys:
//!     S = Q · Kᵀ                       logits
//!     mask, then online softmax:       P = 2^((S - max) · scale · log2 e), rows rescaled when max grows
//!     O = O · rescale + P · V
//! o = O / sum,  lse = max · scale · log2 e + log2 sum
//! ```
//!
//! How the real code departs from it:
//!
//! 1. K and V rows are first brought into dense f32 tiles (pages, strides and dtypes end there), K transposed, so
//!    that both products are one micro-kernel over lanes; each KV byte is read once for all heads of its group. Values
//!    that only few rows weigh (decoding) are widened as they are read instead: a second tile would push the first out
//!    of first-level cache.
//! 2. Rows go six at a time through all three steps, so that S stays in registers and first-level cache.
//! 3. Keys that a row does not see are not multiplied by zero: they are not multiplied. NaN there cannot spread.
//! 4. KV tiles begin at multiples of 64 keys of the request, and each row's arithmetic is the same alone or among
//!    others: bits depend on a row's keys and on where splits fall, on nothing else.

use super::{
    Simd, Task, gather,
    place::{ALIGN, Call, KV_TOKENS, Layout, Located, Place},
    softmax::Row,
    tile::{self, Matrix, Right, Rows},
};
use crate::{attention::WorkItem, tensor::Data};

/// One worker's items; a [`Task`], so that it is compiled per instruction set.
pub(crate) struct Worker<'a> {
    pub(crate) call: &'a Call<'a>,
    pub(crate) items: &'a [WorkItem],
    pub(crate) scratch: &'a mut [f32],
}

impl Task for Worker<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let problem = &self.call.plan.problem;
        let (dim, group) = (problem.head_dim(), problem.heads().group());
        for item in self.items {
            let rows = item.kv_heads.len() * item.qo.len() * group;
            let layout = Layout::new(rows, (dim.qk, dim.vo));
            let request = &self.call.plan.requests.requests[item.request as usize];
            let place = Place { call: self.call, item, request, layout, rows };
            let mut tile = Tile { place, scratch: self.scratch };
            tile.load_queries(simd);
            tile.attend_all(simd);
            tile.store(simd);
        }
    }
}

/// A tile of query rows on its way through the keys.
struct Tile<'a, 'b> {
    place: Place<'a>,
    scratch: &'b mut [f32],
}

impl Tile<'_, '_> {
    /// Takes every KV tile of the item, and of each all KV heads: their rows lie side by side in memory.
    #[inline(always)]
    fn attend_all<S: Simd>(&mut self, simd: S) {
        let place = self.place;
        let (kv, heads) = (&place.item.kv, place.item.kv_heads.len());
        let (begin, end) = (kv.start as usize, kv.end as usize);
        let mut next = place.locate(begin, end);
        for start in (begin..end).step_by(KV_TOKENS) {
            let now = next;
            next = place.locate(start + KV_TOKENS, end);
            for head in 0..heads {
                let upcoming = if head + 1 < heads { (head + 1, &now) } else { (0, &next) };
                self.load_keys_and_values(simd, (head, &now), upcoming);
                self.attend(simd, head, start, &now);
            }
        }
    }

    #[inline(always)]
    fn load_queries<S: Simd>(&mut self, simd: S) {
        let dim = self.place.call.plan.problem.head_dim();
        let strides = self.place.call.q.strides();
        for r in 0..self.place.rows {
            let (token, head) = self.place.row(r);
            let offset = token * strides[0] + head * strides[1];
            let to = self.scratch[r * dim.qk..(r + 1) * dim.qk].as_mut_ptr();
            // SAFETY: `to` is a slice of `dim.qk` elements.
            unsafe { gather::widen(simd, self.place.call.q.data(), offset, to, dim.qk) };
        }
        self.scratch[self.place.layout.o..self.place.layout.o + self.place.rows * self.place.layout.vo]
            .fill(0.0);
        let (max, sums) = self.scratch[self.place.layout.max..self.place.layout.len]
            .split_at_mut(self.place.layout.sums - self.place.layout.max);
        max.fill(f32::NEG_INFINITY);
        sums.fill(0.0);
    }

    /// Brings the keys (transposed) and values of a tile and head into scratch, and asks for those of the next.
    #[inline(always)]
    fn load_keys_and_values<S: Simd>(
        &mut self,
        simd: S,
        (head, now): (usize, &Located),
        (next_head, next): (usize, &Located),
    ) {
        let (dim, layout) = (self.place.call.plan.problem.head_dim(), self.place.layout);
        let (k, v) = self.place.heads_from(head);
        let (next_k, next_v) = self.place.heads_from(next_head);
        // The memory is asked for the next tile in small portions between the work on this one: too much at once
        // would wait for itself.
        for first in (0..now.tokens).step_by(ALIGN) {
            let tokens = first..now.tokens.min(first + ALIGN);
            for token in first..next.tokens.min(first + ALIGN) {
                gather::prefetch(simd, next_k, next.k[token], dim.qk);
            }
            let to = self.scratch[layout.keys + first..layout.values].as_mut_ptr();
            // SAFETY: the keys' part of scratch is [head_dim_qk, 64], and `first` a multiple of all registers.
            unsafe {
                let to = Matrix { at: to, stride: KV_TOKENS };
                gather::transpose_rows(simd, k, &now.k[tokens], dim.qk, to);
            }
        }
        for token in 0..next.tokens {
            gather::prefetch(simd, next_v, next.v[token], dim.vo);
        }
        if self.place.reads_values_once::<S>() {
            return;
        }
        for token in 0..now.tokens {
            let value = self.scratch[layout.values + token * layout.vo..][..dim.vo].as_mut_ptr();
            // SAFETY: `value` is a slice of `dim.vo` elements.
            unsafe { gather::widen(simd, v, now.v[token], value, dim.vo) };
        }
    }

    /// Adds the keys at `now`, of which the first is `start`, to the state of every row of a KV head.
    #[inline(always)]
    fn attend<S: Simd>(&mut self, simd: S, head: usize, start: usize, now: &Located) {
        let plan = self.place.call.plan;
        let (dim, layout) = (plan.problem.head_dim(), self.place.layout);
        let (scale, place) = (self.place.scale(), self.place);
        let visible = |row: usize| place.visible(row, start, now.tokens);
        let all = head * place.rows_per_head()..(head + 1) * place.rows_per_head();
        for first in all.clone().step_by(S::TILE_ROWS) {
            let rows = S::TILE_ROWS.min(all.end - first);
            // later rows see at least as much as earlier ones
            let (least, most) = (visible(first), visible(first + rows - 1));
            if most == 0 {
                continue;
            }
            let width = most.next_multiple_of(S::LANES);
            let mut seen = [0; 6];
            (0..rows).for_each(|r| seen[r] = visible(first + r));

            // SAFETY: scratch holds each matrix with the shape and stride named in `Layout`, rounded up to whole
            // registers, and none overlaps another.
            unsafe {
                let base = self.scratch.as_mut_ptr();
                let queries = Matrix { at: base.add(first * dim.qk).cast_const(), stride: dim.qk };
                let keys = Matrix { at: base.add(layout.keys).cast_const(), stride: KV_TOKENS };
                let logits = Matrix { at: base.add(layout.logits), stride: KV_TOKENS };
                let o = Matrix { at: base.add(layout.o + first * layout.vo), stride: layout.vo };

                std::slice::from_raw_parts_mut(logits.at, rows * KV_TOKENS).fill(0.0);
                tile::multiply_add(simd, (rows, width, dim.qk), queries, keys, logits);
                for (r, &seen) in seen[..rows].iter().enumerate() {
                    let row = Row {
                        logits: logits.at.add(r * KV_TOKENS),
                        max: base.add(layout.max + first + r),
                        sums: base.add(layout.sums + (first + r) * ALIGN),
                    };
                    for unseen in seen..width {
                        *row.logits.add(unseen) = f32::NEG_INFINITY;
                    }
                    let factor = row.step(simd, width, scale);
                    rescale(simd, o.at.add(r * o.stride), dim.vo, factor);
                }
                let seen = (&seen[..rows], least);
                if place.reads_values_once::<S>() {
                    let offsets = &now.v[..now.tokens];
                    match place.heads_from(head).1 {
                        Data::F32(v) => weigh(simd, seen, dim.vo, (logits, Rows::new(v, offsets, dim.vo)), o),
                        Data::F16(v) => weigh(simd, seen, dim.vo, (logits, Rows::new(v, offsets, dim.vo)), o),
                        Data::Bf16(v) => {
                            weigh(simd, seen, dim.vo, (logits, Rows::new(v, offsets, dim.vo)), o);
                        }
                    }
                } else {
                    let values = Matrix { at: base.add(layout.values).cast_const(), stride: layout.vo };
                    weigh(simd, seen, dim.vo, (logits, values), o);
                }
            }
        }
    }

    /// Writes every row's state, to the output or to the workspace.
    #[inline(always)]
    fn store<S: Simd>(&mut self, simd: S) {
        let dim = self.place.call.plan.problem.head_dim();
        let num_heads = self.place.call.plan.problem.heads().qo;
        let scale = self.place.scale();
        for r in 0..self.place.rows {
            let layout = self.place.layout;
            let base = self.scratch.as_mut_ptr();
            // SAFETY: scratch holds a maximum and a register of sums for every row.
            let seen = unsafe {
                let (max, sums) = (base.add(layout.max + r), base.add(layout.sums + r * ALIGN));
                Row { logits: base, max, sums }.seen(simd)
            };
            let (token, head) = self.place.row(r);
            let o = &mut self.scratch[self.place.layout.o + r * self.place.layout.vo..][..dim.vo];
            let normalizer = seen.normalizer();
            o.iter_mut().for_each(|o| *o *= normalizer);
            // SAFETY: the schedule gives each output row and head, and each partial row, to one item.
            unsafe {
                if let Some(first) = self.place.item.partial {
                    let row = first as usize + r;
                    self.place.call.partial_o.part(row * dim.vo, dim.vo).copy_from_slice(o);
                    self.place.call.partial_lse.part(row, 1)[0] = seen.lse(scale);
                } else {
                    self.place.call.o.store(token, head, o);
                    if let Some(lse) = &self.place.call.lse {
                        lse.part(token * num_heads + head, 1)[0] = seen.lse(scale);
                    }
                }
            }
        }
    }
}

/// `row *= factor`, nothing when it is 1.
///
/// # Safety
/// `row` points to `width` elements, rounded up to whole registers.
#[inline(always)]
unsafe fn rescale<S: Simd>(simd: S, row: *mut f32, width: usize, factor: f32) {
    if factor == 1.0 {
        return;
    }
    for at in (0..width).step_by(S::LANES) {
        // SAFETY: the caller's promise.
        unsafe { simd.store(row.add(at), simd.mul(simd.load(row.add(at)), simd.splat(factor))) };
    }
}

/// `o += weights · values`, for each row only over the keys that it has seen: all rows together over the first
/// `least`, then each alone over the rest.
///
/// # Safety
/// As [`tile::multiply_add`], with `seen.len()` rows.
#[inline(always)]
unsafe fn weigh<S: Simd, B: Right<S>>(
    simd: S,
    (seen, least): (&[usize], usize),
    width: usize,
    (weights, values): (Matrix<*mut f32>, B),
    o: Matrix<*mut f32>,
) {
    let weights = Matrix { at: weights.at.cast_const(), stride: weights.stride };
    // SAFETY: the caller's promise; rows and keys stay below its shapes.
    unsafe {
        tile::multiply_add(simd, (seen.len(), width, least), weights, values, o);
        for (r, &seen) in seen.iter().enumerate().filter(|(_, seen)| **seen > least) {
            let weights = Matrix { at: weights.at.add(r * weights.stride + least), ..weights };
            let o = Matrix { at: o.at.add(r * o.stride), ..o };
            tile::multiply_add(simd, (1, width, seen - least), weights, values.skip(least), o);
        }
    }
}
