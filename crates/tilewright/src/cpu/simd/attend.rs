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
//! 3. Keys that a row does not see are not multiplied by zero: they are not multiplied. NaN there cannot spread. What each
//!    row sees of a tile is 64 bits: none skips the row, all of them costs nothing more.
//! 4. KV tiles begin at multiples of 64 keys of the request, and each row's arithmetic is the same alone or among
//!    others: bits depend on a row's keys and on where splits fall, on nothing else.
//! 5. A variant's hooks are called where they do something: for a row of 64 logits, a tile of keys or values, a query row.

use super::{
    Simd, Task, gather,
    hooks::ValuesAt,
    place::{ALIGN, Call, KV_TOKENS, Layout, Located, Place},
    softmax::Row,
    state,
    tile::{Matrix, Product, Rows},
    weigh::Weigh,
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
            let segment = &self.call.plan.requests.segments[item.segment as usize];
            let place = Place { call: self.call, item, segment, layout, rows };
            let mut tile = Tile { place, scratch: self.scratch };
            tile.load_queries(simd);
            tile.attend_all(simd);
            tile.store(simd);
        }
    }
}

/// Whether any row of an item sees anything of a KV tile.
enum Tokens {
    Some,
    None,
    /// Nothing, and nothing of all later tiles.
    NoMore,
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
            let positions = match place.call.live.reads_positions {
                true => place.key_positions(start, now.tokens),
                false => [0.0; KV_TOKENS],
            };
            if place.call.by_key {
                match self.find_seen((start, now.tokens), &positions) {
                    Tokens::Some => {}
                    Tokens::None => continue,
                    Tokens::NoMore => break,
                }
            }
            for head in 0..heads {
                let upcoming = if head + 1 < heads { (head + 1, &now) } else { (0, &next) };
                self.load_keys_and_values(simd, (head, &now), upcoming);
                self.transform_keys_and_values(simd, head, &now, &positions);
                self.attend(simd, head, (start, &now), &positions);
            }
        }
    }

    #[inline(always)]
    fn load_queries<S: Simd>(&mut self, simd: S) {
        let (place, dim) = (self.place, self.place.call.plan.problem.head_dim());
        let (q, pe) = place.call.inputs.q;
        for r in 0..place.rows {
            let (token, head) = place.row(r);
            let row = &mut self.scratch[r * dim.qk..(r + 1) * dim.qk];
            let width = q.shape()[2];
            for (view, to) in [(Some(q), 0), (pe, width)] {
                let Some(view) = view else { continue };
                let offset = token * view.strides()[0] + head * view.strides()[1];
                let part = &mut row[to..to + view.shape()[2]];
                // SAFETY: `part` has as many elements as a row of the view.
                unsafe { gather::widen(simd, view.data(), offset, part.as_mut_ptr(), part.len()) };
            }
            if place.call.live.query {
                place.call.inputs.variant.query(place.call.isa, place.row_at(r), row);
            }
        }
        self.scratch[place.layout.o..place.layout.o + place.rows * place.layout.vo].fill(0.0);
        let (max, sums) = self.scratch[place.layout.max..place.layout.seen]
            .split_at_mut(place.layout.sums - place.layout.max);
        max.fill(f32::NEG_INFINITY);
        sums.fill(0.0);
    }

    /// Finds what every row sees of the KV tile at `start`, and whether any row sees anything.
    fn find_seen(&mut self, tile: (usize, usize), positions: &[f32; KV_TOKENS]) -> Tokens {
        let (place, mut all_shown, mut any) = (self.place, true, 0);
        let (variant, live) = (place.call.inputs.variant, place.call.live);
        for r in 0..place.rows {
            let mut seen = place.seen(r, tile);
            all_shown &= seen != 0;
            if live.mask && seen != 0 {
                seen &= variant.mask(place.call.isa, place.row_at(r), positions);
            }
            any |= seen;
            let to = &mut self.scratch[place.layout.seen + 2 * r..][..2];
            (to[0], to[1]) = (f32::from_bits(seen as u32), f32::from_bits((seen >> 32) as u32));
        }
        match any {
            // a staircase that has ended does not begin again; one that was shown nothing here may go on
            0 if all_shown && live.properties.monotone_mask => Tokens::NoMore,
            0 => Tokens::None,
            _ => Tokens::Some,
        }
    }

    /// What row `r` sees of a KV tile.
    #[inline(always)]
    fn seen(&self, r: usize, tile: (usize, usize)) -> u64 {
        if !self.place.call.by_key {
            return self.place.seen(r, tile);
        }
        let bits = &self.scratch[self.place.layout.seen + 2 * r..][..2];
        u64::from(bits[0].to_bits()) | u64::from(bits[1].to_bits()) << 32
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
        let pe = self.place.call.inputs.k_pe.map(|(pe, _)| pe.data());
        let width = if pe.is_some() { dim.vo } else { dim.qk };
        // The memory is asked for the next tile in small portions between the work on this one: too much at once
        // would wait for itself.
        for first in (0..now.tokens).step_by(ALIGN) {
            let tokens = first..now.tokens.min(first + ALIGN);
            for token in first..next.tokens.min(first + ALIGN) {
                gather::prefetch(simd, next_k, next.k[token], width);
            }
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
        for token in 0..next.tokens {
            gather::prefetch(simd, next_v, next.v[token], dim.vo);
        }
        if self.place.reads_values_once::<S>() {
            return;
        }
        let values = &mut self.scratch[layout.values..][..KV_TOKENS * layout.vo];
        let to = Matrix { at: values.as_mut_ptr(), stride: layout.vo };
        // SAFETY: the values' part of scratch is [64, head_dim_vo], rounded up.
        simd.vectorize(unsafe { gather::Widen::new(v, &now.v[..now.tokens], dim.vo, to) });
    }

    /// Applies the variant's hooks to keys and values, and finds their scales.
    #[inline(always)]
    fn transform_keys_and_values<S: Simd>(
        &mut self,
        _: S,
        head: usize,
        now: &Located,
        positions: &[f32; KV_TOKENS],
    ) {
        let (call, layout) = (self.place.call, self.place.layout);
        let (dim, variant) = (call.plan.problem.head_dim(), call.inputs.variant);
        let kv_head = self.place.item.kv_heads.start + head as u32;
        if call.live.key {
            let keys = &mut self.scratch[layout.keys..][..dim.qk * KV_TOKENS];
            variant.key(call.isa, kv_head, positions, keys);
        }
        if call.live.value {
            let values = &mut self.scratch[layout.values..][..now.tokens * layout.vo];
            let at = ValuesAt { kv_head, kv: positions, stride: layout.vo, width: dim.vo };
            variant.value(call.isa, at, values);
        }
        let (k, v) = self.scratch[layout.scales..][..2 * KV_TOKENS].split_at_mut(KV_TOKENS);
        for (scale, to) in [(&call.inputs.scales.k, k), (&call.inputs.scales.v, v)] {
            if !scale.is_one() {
                let pages = now.page[..now.tokens].iter();
                to.iter_mut()
                    .zip(pages)
                    .for_each(|(to, &page)| *to = scale.factor(page as usize, kv_head as usize));
            }
        }
    }

    /// Adds the keys at `now`, of which the first is `start`, to the state of every row of a KV head.
    #[inline(always)]
    fn attend<S: Simd>(
        &mut self,
        simd: S,
        head: usize,
        (start, now): (usize, &Located),
        positions: &[f32; KV_TOKENS],
    ) {
        let place = self.place;
        let all = head * place.rows_per_head()..(head + 1) * place.rows_per_head();
        for first in all.clone().step_by(S::TILE_ROWS) {
            let rows = S::TILE_ROWS.min(all.end - first);
            let mut seen = [0_u64; 6];
            (0..rows).for_each(|r| seen[r] = self.seen(first + r, (start, now.tokens)));
            let any = seen.iter().fold(0, |any, seen| any | seen);
            if any == 0 {
                continue;
            }
            let width = (64 - any.leading_zeros() as usize).next_multiple_of(S::LANES);
            self.weigh_keys(simd, (first, &seen[..rows]), width, positions);
            self.weigh_values(simd, head, (first, &seen[..rows]), now);
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
        let (call, layout) = (self.place.call, self.place.layout);
        let (dim, rows) = (call.plan.problem.head_dim(), seen.len());
        // SAFETY: scratch holds each matrix with the shape and stride named in `Layout`, rounded up to whole
        // registers, and none overlaps another.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let queries = Matrix { at: base.add(first * dim.qk).cast_const(), stride: dim.qk };
            let keys = Matrix { at: base.add(layout.keys).cast_const(), stride: KV_TOKENS };
            let logits = Matrix { at: base.add(layout.logits), stride: KV_TOKENS };
            std::slice::from_raw_parts_mut(logits.at, rows * KV_TOKENS).fill(0.0);
            Product { shape: (rows, width, dim.qk), a: queries, b: keys, c: logits }.run(simd);
            for (r, &seen) in seen.iter().enumerate() {
                let row = Row {
                    logits: logits.at.add(r * KV_TOKENS),
                    max: base.add(layout.max + first + r),
                    sums: base.add(layout.sums + (first + r) * ALIGN),
                };
                if !call.inputs.scales.k.is_one() {
                    row.multiply(simd, width, base.add(layout.scales));
                }
                if call.live.logits {
                    row.scale(simd, width, call.plan.problem.scale());
                    let logits = &mut *row.logits.cast::<[f32; KV_TOKENS]>();
                    call.inputs.variant.logits(call.isa, self.place.row_at(first + r), positions, logits);
                }
                if call.live.softmax {
                    row.hide(seen, width, f32::NEG_INFINITY);
                    let factor = row.step(simd, width, self.place.scale());
                    rescale(simd, base.add(layout.o + (first + r) * layout.vo), dim.vo, factor);
                } else {
                    row.hide(seen, width, 0.0);
                }
                if !call.inputs.scales.v.is_one() {
                    row.multiply(simd, width, base.add(layout.scales + KV_TOKENS));
                }
            }
        }
    }

    /// From weights and values to outputs, for the strip of rows from `first` on.
    #[inline(always)]
    fn weigh_values<S: Simd>(&mut self, simd: S, head: usize, (first, seen): (usize, &[u64]), now: &Located) {
        let (layout, width) = (self.place.layout, self.place.call.plan.problem.head_dim().vo);
        // SAFETY: as in `weigh_keys`.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let weights = Matrix { at: base.add(layout.logits).cast_const(), stride: KV_TOKENS };
            let o = Matrix { at: base.add(layout.o + first * layout.vo), stride: layout.vo };
            if self.place.reads_values_once::<S>() {
                let offsets = &now.v[..now.tokens];
                match self.place.heads_from(head).1 {
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
            } else {
                let values = Matrix { at: base.add(layout.values).cast_const(), stride: layout.vo };
                Weigh { seen, width, weights, values, o }.run(simd);
            }
        }
    }

    /// Writes every row's state, to the output or to the workspace.
    #[inline(always)]
    fn store<S: Simd>(&mut self, simd: S) {
        let (place, layout) = (self.place, self.place.layout);
        let (call, dim) = (place.call, place.call.plan.problem.head_dim().vo);
        let softmax = call.live.softmax;
        let scale = place.scale();
        for r in 0..place.rows {
            let base = self.scratch.as_mut_ptr();
            // SAFETY: scratch holds a maximum and a register of sums for every row.
            let (max, sum) = unsafe {
                let (max, sums) = (base.add(layout.max + r), base.add(layout.sums + r * ALIGN));
                Row { logits: base, max, sums }.seen(simd)
            };
            let o = &mut self.scratch[layout.o + r * layout.vo..][..dim];
            // SAFETY: the schedule gives each output row and head, and each partial row, to one item.
            unsafe {
                let Some(first) = place.item.partial else {
                    state::finish(call, place.row(r), o, (max * scale, sum));
                    continue;
                };
                if softmax {
                    let normalizer = if sum == 0.0 { 0.0 } else { sum.recip() };
                    o.iter_mut().for_each(|o| *o *= normalizer);
                }
                let row = first as usize + r;
                call.partial_o.part(row * dim, dim).copy_from_slice(o);
                let lse = if sum == 0.0 { f32::NEG_INFINITY } else { max * scale + sum.log2() };
                call.partial_lse.part(row, 1)[0] = lse;
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
