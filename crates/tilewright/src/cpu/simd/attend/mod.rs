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
//!    others: bits depend on a row's keys and on where splits fall, on nothing else (but see 5).
//! 5. Tensors that are bf16 throughout are not widened where the machine multiplies bf16 (`pairs`; the rest is `wide`): strips are
//!    of 32 rows then, weights are rounded to bf16, and what rows do not see weighs 0. Only if all values are finite, so that
//!    3 still holds. Which way a call goes depends on its problem and variant alone, so that 4 holds too.
//! 6. A variant's hooks are called where they do something: for a row of 64 logits, a tile of keys or values, a query row.

mod pairs;
mod wide;

use super::{
    Simd, Task,
    dots::{self, Dots, STRIP},
    gather,
    hooks::RowAt,
    place::{ALIGN, Call, KV_TOKENS, Layout, Located, Place},
    softmax::Row,
    state,
};
use crate::attention::WorkItem;

/// So many rows before one is read or written, its memory is asked for.
const ROWS_AHEAD: usize = 16;

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
        let _ready = self.call.dots.map(Dots::begin);
        for item in self.items {
            let rows = item.kv_heads.len() * item.qo.len() * group;
            let layout = Layout::new(rows, (dim.qk, dim.vo));
            let segment = &self.call.plan.requests.segments[item.segment as usize];
            let place = Place { call: self.call, item, segment, layout, rows };
            let mut tile = Tile { place: &place, scratch: self.scratch };
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

/// A KV tile of one head.
struct Keys<'a> {
    head: usize,
    /// The first of its keys, in the segment.
    start: usize,
    at: &'a Located,
    positions: &'a [f32; KV_TOKENS],
    /// The tile after it.
    next: &'a Located,
}

/// A tile of query rows on its way through the keys.
struct Tile<'a, 'b> {
    place: &'a Place<'a>,
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
                let keys = Keys { head, start, at: &now, positions: &positions, next: &next };
                self.find_scales(head, &now);
                match place.dots::<S>() {
                    Some(dots) => {
                        let special = self.pair_keys_and_values(simd, dots, &keys);
                        self.attend_pairs(simd, (dots, special), &keys);
                    }
                    None => {
                        self.load_keys_and_values(simd, &keys);
                        self.transform_keys_and_values(simd, &keys);
                        self.attend(simd, &keys);
                    }
                }
            }
        }
    }

    /// Asks the memory for a share of the KV tile that comes next, of all heads: the `part`-th eighth of what is due under the
    /// work on this head, four while keys are brought here, four while values are weighed. Little at a time, since the
    /// processor waits when it has asked for more than it can keep in mind; all heads of a token together, since they lie side
    /// by side.
    #[inline(always)]
    fn foresee<S: Simd>(&self, simd: S, keys: &Keys<'_>, part: usize) {
        let (call, next, heads) = (self.place.call, keys.next, self.place.item.kv_heads.len());
        let dim = call.plan.problem.head_dim();
        let width = if call.inputs.k_pe.is_some() { dim.vo } else { dim.qk };
        let share = |part: usize| next.tokens * part / (8 * heads);
        for token in share(8 * keys.head + part)..share(8 * keys.head + part + 1) {
            for head in 0..heads {
                let (k, v) = self.place.heads_from(head);
                gather::prefetch(simd, k, next.k[token], width);
                gather::prefetch(simd, v, next.v[token], dim.vo);
            }
        }
    }

    /// [`Tile::foresee`] of the share of strip `strip` of `strips` in the values' four parts.
    #[inline(always)]
    fn foresee_under_strip<S: Simd>(&self, simd: S, keys: &Keys<'_>, (strip, strips): (usize, usize)) {
        for part in 4 + 4 * strip / strips..4 + 4 * (strip + 1) / strips {
            self.foresee(simd, keys, part);
        }
    }

    #[inline(always)]
    fn load_queries<S: Simd>(&mut self, simd: S) {
        let (place, dim) = (self.place, self.place.call.plan.problem.head_dim());
        let (q, pe) = place.call.inputs.q;
        for r in 0..place.rows {
            // rows of different tokens are pages apart, where the processor foresees nothing
            let (token, head) = place.row((r + ROWS_AHEAD).min(place.rows - 1));
            let offset = token * q.strides()[0] + head * q.strides()[1];
            gather::prefetch(simd, q.data(), offset, q.shape()[2]);
            let (token, head) = place.row(r);
            if place.dots::<S>().is_some() {
                let to = self.scratch[r * dim.qk / 2..(r + 1) * dim.qk / 2].as_mut_ptr();
                // SAFETY: a row of pairs is half as long as one of f32.
                unsafe { dots::copy_query(q, place.call.plan.problem.dtype_kv(), (token, head), to.cast()) };
                continue;
            }
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

    /// What each of the `rows` rows from `first` on sees of a KV tile; nothing beyond them.
    #[inline(always)]
    fn seen<const N: usize>(&self, (first, rows): (usize, usize), tile: (usize, usize)) -> [u64; N] {
        let group = self.place.call.plan.problem.heads().group();
        let mut seen = [0; N];
        for r in 0..rows {
            seen[r] = if self.place.call.by_key {
                let bits = &self.scratch[self.place.layout.seen + 2 * (first + r)..][..2];
                u64::from(bits[0].to_bits()) | u64::from(bits[1].to_bits()) << 32
            } else if r > 0 && !(first + r).is_multiple_of(group) {
                seen[r - 1] // the heads of a group see the same
            } else {
                self.place.seen(first + r, tile)
            };
        }
        seen
    }

    /// Finds the scales of a tile's keys and values, where they are not 1.
    #[inline(always)]
    fn find_scales(&mut self, head: usize, now: &Located) {
        let (scales, layout) = (&self.place.call.inputs.scales, &self.place.layout);
        let kv_head = self.place.item.kv_heads.start as usize + head;
        let (k, v) = self.scratch[layout.scales..][..2 * KV_TOKENS].split_at_mut(KV_TOKENS);
        for (scale, to) in [(&scales.k, k), (&scales.v, v)] {
            if !scale.is_one() {
                let pages = now.page[..now.tokens].iter();
                to.iter_mut().zip(pages).for_each(|(to, &page)| *to = scale.factor(page as usize, kv_head));
            }
        }
    }

    /// From products to logits, for the strip of `rows` rows from `first` on: the scales of keys, and the variant's hook.
    ///
    /// # Safety
    /// `width` is a multiple of the lanes and at most [`KV_TOKENS`].
    #[inline(always)]
    unsafe fn find_logits<S: Simd>(
        &mut self,
        simd: S,
        (first, rows): (usize, usize),
        width: usize,
        positions: &[f32; KV_TOKENS],
    ) {
        let (place, call, layout) = (self.place, self.place.call, &self.place.layout);
        let scaled = !call.inputs.scales.k.is_one();
        if !scaled && !call.live.logits {
            return;
        }
        // SAFETY: scratch holds each part with the shape named in `Layout`, and none overlaps another.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            for r in 0..rows {
                let (max, sums) = (base.add(layout.max), base.add(layout.sums));
                let row = Row { logits: base.add(layout.logits + r * KV_TOKENS), max, sums };
                if scaled {
                    row.multiply(simd, width, base.add(layout.scales));
                }
                if call.live.logits {
                    row.scale(simd, width, call.plan.problem.scale());
                }
            }
            if call.live.logits {
                let mut at = [RowAt::default(); STRIP];
                at[..rows].iter_mut().enumerate().for_each(|(r, at)| *at = place.row_at(first + r));
                let logits = base.add(layout.logits).cast::<[f32; KV_TOKENS]>();
                let logits = std::slice::from_raw_parts_mut(logits, rows);
                call.inputs.variant.logits(call.isa, &at[..rows], positions, logits);
            }
        }
    }

    /// From logits to weights, for row `r`, the `at`-th of its strip; returns the factor that brings what the row has of
    /// earlier keys to the new maximum.
    ///
    /// # Safety
    /// `width` is a multiple of the lanes, at most [`KV_TOKENS`], and above every bit of `seen`.
    #[inline(always)]
    unsafe fn weigh_row<S: Simd>(
        &mut self,
        simd: S,
        (r, at): (usize, usize),
        (seen, width): (u64, usize),
    ) -> f32 {
        let (call, layout, mut factor) = (self.place.call, &self.place.layout, 1.0);
        // SAFETY: scratch holds each part with the shape named in `Layout`, and none overlaps another.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let row = Row {
                logits: base.add(layout.logits + at * KV_TOKENS),
                max: base.add(layout.max + r),
                sums: base.add(layout.sums + r * ALIGN),
            };
            if call.live.softmax {
                row.hide(seen, width, f32::NEG_INFINITY);
                factor = row.step(simd, width, self.place.scale());
            } else {
                row.hide(seen, width, 0.0);
            }
            if !call.inputs.scales.v.is_one() {
                row.multiply(simd, width, base.add(layout.scales + KV_TOKENS));
                // whatever scale a hidden key has
                row.hide(seen, width, 0.0);
            }
        }
        factor
    }

    /// Writes every row's state, to the output or to the workspace.
    #[inline(always)]
    fn store<S: Simd>(&mut self, simd: S) {
        let (place, layout) = (self.place, &self.place.layout);
        let (call, dim) = (place.call, place.call.plan.problem.head_dim().vo);
        let softmax = call.live.softmax;
        let scale = place.scale();
        for r in 0..place.rows {
            if place.item.partial.is_none() {
                let (token, head) = place.row((r + ROWS_AHEAD).min(place.rows - 1));
                call.o.prefetch(simd, (token, head), dim);
            }
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
