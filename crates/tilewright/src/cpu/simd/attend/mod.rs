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
//! 5. Tensors that are bf16 throughout are not widened where the machine multiplies bf16 (`bf16_attend`; the rest is
//!    `f32_attend`): strips are of 32 rows then, weights are rounded to bf16, and what rows do not see weighs 0. Only if
//!    all values are finite, so that 3 still holds. Which way a call goes depends on its problem and variant alone, so that
//!    4 holds too.
//! 6. A variant's hooks are called where they do something: for a row of 64 logits, a tile of keys or values, a query row.

mod bf16_attend;
mod f32_attend;

use super::{
    ALIGN, AttentionParams, Bf16Mma, ItemContext, KV_TOKENS, KvLocation, STRIP, ScratchLayout, Simd,
    SoftmaxRow, Task, bf16, epilogue, gather,
};
use crate::attention::{WorkItem, variant::QueryRow};
use std::ops::Range;

/// Prefetch distance of query loads and output stores, in rows.
const PREFETCH_ROWS: usize = 16;

/// One worker's items; a [`Task`], so that it is compiled per instruction set.
pub(crate) struct Worker<'a> {
    pub(crate) params: &'a AttentionParams<'a>,
    pub(crate) items: &'a [WorkItem],
    pub(crate) scratch: &'a mut [f32],
}

impl Task for Worker<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let problem = &self.params.plan.problem;
        let (dim, group) = (problem.head_dim(), problem.heads().group());
        let _guard = self.params.bf16_mma.map(Bf16Mma::configure_thread);
        for item in self.items {
            let rows = item.kv_heads.len() * item.qo.len() * group;
            let layout = ScratchLayout::new(rows, dim);
            let segment = &self.params.plan.requests.segments[item.segment as usize];
            let ctx = ItemContext { params: self.params, item, segment, layout, rows };
            let mut tile = QueryTile { ctx: &ctx, scratch: self.scratch };
            tile.load_queries(simd);
            tile.attend_kv_tiles(simd);
            tile.store(simd);
        }
    }
}

/// Visibility of a KV tile to the rows of an item.
enum Visibility {
    Visible,
    Hidden,
    /// This tile and all later ones are hidden.
    HiddenFromHere,
}

/// A KV tile of one head.
struct KvTile<'a> {
    head: usize,
    /// Index of its first key in the segment.
    start: usize,
    location: &'a KvLocation,
    positions: &'a [f32; KV_TOKENS],
    /// Location of the next tile, for prefetching.
    next: &'a KvLocation,
}

/// Rows of a KV head that are multiplied together, with the first keys of a KV tile.
#[derive(Clone, Copy)]
struct RowStrip {
    /// Index of its first row in the item.
    first: usize,
    rows: usize,
    /// Number of keys: a multiple of the lanes, at most [`KV_TOKENS`].
    width: usize,
}

impl KvTile<'_> {
    /// Its keys in the segment.
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.location.tokens
    }
}

/// The query rows of an item and their running state in scratch.
struct QueryTile<'a, 'b> {
    ctx: &'a ItemContext<'a>,
    scratch: &'b mut [f32],
}

impl QueryTile<'_, '_> {
    /// Processes each KV tile of the item, all KV heads of a tile together: their rows are adjacent in memory.
    #[inline(always)]
    fn attend_kv_tiles<S: Simd>(&mut self, simd: S) {
        let ctx = self.ctx;
        let (kv, heads) = (&ctx.item.kv, ctx.item.kv_heads.len());
        let (begin, end) = (kv.start as usize, kv.end as usize);
        let mut next = ctx.locate(begin, end);
        self.prefetch_tokens(simd, &next, 0..next.tokens);
        for start in (begin..end).step_by(KV_TOKENS) {
            let now = next;
            next = ctx.locate(start + KV_TOKENS, end);
            let positions = match ctx.params.hooks.reads_positions {
                true => ctx.key_positions(start, now.tokens),
                false => [0.0; KV_TOKENS],
            };
            if ctx.params.per_key_mask {
                match self.compute_visible_masks(start..start + now.tokens, &positions) {
                    Visibility::Visible => {}
                    Visibility::Hidden => continue,
                    Visibility::HiddenFromHere => break,
                }
            }
            for head in 0..heads {
                let keys = KvTile { head, start, location: &now, positions: &positions, next: &next };
                self.load_page_scales(head, &now);
                match ctx.bf16_mma::<S>() {
                    Some(mma) => {
                        let nonfinite = self.load_bf16_tile(simd, mma, &keys);
                        self.attend_bf16(simd, mma, nonfinite, &keys);
                    }
                    None => {
                        self.load_f32_tile(simd, &keys);
                        self.apply_kv_hooks(simd, &keys);
                        self.attend_f32(simd, &keys);
                    }
                }
            }
        }
    }

    /// Prefetches part of the next KV tile. The work on one head issues eight parts: four while it loads keys, four during P·V.
    /// Parts are small, because the core stalls once its line-fill buffers are full. A part covers all heads of its tokens,
    /// because they are adjacent in memory.
    #[inline(always)]
    fn prefetch_next_tile<S: Simd>(&self, simd: S, keys: &KvTile<'_>, part: usize) {
        let (next, heads) = (keys.next, self.ctx.item.kv_heads.len());
        let share = |part: usize| next.tokens * part / (8 * heads);
        self.prefetch_tokens(simd, next, share(8 * keys.head + part)..share(8 * keys.head + part + 1));
    }

    /// Prefetches keys and values of `tokens`.
    #[inline(always)]
    fn prefetch_tokens<S: Simd>(&self, simd: S, location: &KvLocation, tokens: Range<usize>) {
        let (params, heads) = (self.ctx.params, self.ctx.item.kv_heads.len());
        let dim = params.plan.problem.head_dim();
        let width = if params.inputs.k_pe.is_some() { dim.vo } else { dim.qk };
        for token in tokens {
            for head in 0..heads {
                let (k, v) = self.ctx.heads_from(head);
                gather::prefetch(simd, k, location.k[token], width);
                gather::prefetch(simd, v, location.v[token], dim.vo);
            }
        }
    }

    /// Issues the share of strip `strip` of `strips` in the four prefetch parts of P·V.
    #[inline(always)]
    fn prefetch_during_strip<S: Simd>(&self, simd: S, keys: &KvTile<'_>, strip: usize, strips: usize) {
        for part in 4 + 4 * strip / strips..4 + 4 * (strip + 1) / strips {
            self.prefetch_next_tile(simd, keys, part);
        }
    }

    #[inline(always)]
    fn load_queries<S: Simd>(&mut self, simd: S) {
        let (ctx, dim) = (self.ctx, self.ctx.params.plan.problem.head_dim());
        let (q, q_pe) = (ctx.params.inputs.q, ctx.params.inputs.q_pe);
        for r in 0..ctx.rows {
            // rows of different tokens are on different pages, which hardware prefetchers do not cross
            let (token, head) = ctx.row((r + PREFETCH_ROWS).min(ctx.rows - 1));
            let offset = token * q.strides()[0] + head * q.strides()[1];
            gather::prefetch(simd, q.data(), offset, q.shape()[2]);
            let (token, head) = ctx.row(r);
            if ctx.bf16_mma::<S>().is_some() {
                let to = self.scratch[r * dim.qk / 2..(r + 1) * dim.qk / 2].as_mut_ptr();
                // SAFETY: a bf16 row fits into half of an f32 row, and `q` is bf16 by `for_call`.
                unsafe { bf16::copy_query(q, ctx.params.plan.problem.dtype_kv(), token, head, to.cast()) };
                continue;
            }
            let row = &mut self.scratch[r * dim.qk..(r + 1) * dim.qk];
            let width = q.shape()[2];
            for (view, to) in [(Some(q), 0), (q_pe, width)] {
                let Some(view) = view else { continue };
                let offset = token * view.strides()[0] + head * view.strides()[1];
                let part = &mut row[to..to + view.shape()[2]];
                // SAFETY: `part` has as many elements as a row of the view.
                unsafe { gather::widen(simd, view.data(), offset, part.as_mut_ptr(), part.len()) };
            }
            if ctx.params.hooks.query {
                ctx.params.variant.query(ctx.params.isa, ctx.row_at(r), row);
            }
        }
        self.scratch[ctx.layout.o..ctx.layout.o + ctx.rows * ctx.layout.vo].fill(0.0);
        let (max, sums) =
            self.scratch[ctx.layout.max..ctx.layout.visible].split_at_mut(ctx.layout.sums - ctx.layout.max);
        max.fill(f32::NEG_INFINITY);
        sums.fill(0.0);
    }

    /// Computes the visible mask of each row for a KV tile.
    fn compute_visible_masks(&mut self, tile: Range<usize>, positions: &[f32; KV_TOKENS]) -> Visibility {
        let (ctx, mut all_pass_problem_mask, mut any) = (self.ctx, true, 0);
        let (variant, hooks) = (ctx.params.variant, ctx.params.hooks);
        for r in 0..ctx.rows {
            let mut visible = ctx.visible(r, tile.clone());
            all_pass_problem_mask &= visible != 0;
            if hooks.mask && visible != 0 {
                visible &= variant.mask(ctx.params.isa, ctx.row_at(r), positions);
            }
            any |= visible;
            let to = &mut self.scratch[ctx.layout.visible + 2 * r..][..2];
            (to[0], to[1]) = (f32::from_bits(visible as u32), f32::from_bits((visible >> 32) as u32));
        }
        match any {
            // a monotone variant mask also hides all later tiles; a row that the problem's mask hid may have later keys
            0 if all_pass_problem_mask && hooks.monotone_mask => Visibility::HiddenFromHere,
            0 => Visibility::Hidden,
            _ => Visibility::Visible,
        }
    }

    /// Visible masks of `rows` for a KV tile; 0 in the remaining elements.
    #[inline(always)]
    fn visible<const N: usize>(&self, rows: Range<usize>, tile: Range<usize>) -> [u64; N] {
        let group = self.ctx.params.plan.problem.heads().group();
        let mut visible = [0; N];
        let first = rows.start;
        for r in 0..rows.len() {
            visible[r] = if self.ctx.params.per_key_mask {
                let bits = &self.scratch[self.ctx.layout.visible + 2 * (first + r)..][..2];
                u64::from(bits[0].to_bits()) | u64::from(bits[1].to_bits()) << 32
            } else if r > 0 && !(first + r).is_multiple_of(group) {
                visible[r - 1] // heads of a group share a mask
            } else {
                self.ctx.visible(first + r, tile.clone())
            };
        }
        visible
    }

    /// Loads the scale of each key and value of a tile, unless all are 1.
    #[inline(always)]
    fn load_page_scales(&mut self, head: usize, location: &KvLocation) {
        let (scales, layout) = (&self.ctx.params.inputs.scales, &self.ctx.layout);
        let kv_head = self.ctx.item.kv_heads.start as usize + head;
        let (k, v) = self.scratch[layout.scales..][..2 * KV_TOKENS].split_at_mut(KV_TOKENS);
        for (scale, to) in [(&scales.k, k), (&scales.v, v)] {
            if !scale.is_one() {
                let pages = location.page[..location.tokens].iter();
                to.iter_mut().zip(pages).for_each(|(to, &page)| *to = scale.factor(page as usize, kv_head));
            }
        }
    }

    /// Applies key scales and the logits hook to the rows of a strip.
    ///
    /// # Safety
    /// The width is as [`RowStrip`] requires.
    #[inline(always)]
    unsafe fn finish_logits<S: Simd>(&mut self, simd: S, strip: RowStrip, positions: &[f32; KV_TOKENS]) {
        let RowStrip { first, rows, width } = strip;
        let (ctx, params, layout) = (self.ctx, self.ctx.params, &self.ctx.layout);
        let scaled = !params.inputs.scales.k.is_one();
        if !scaled && !params.hooks.logits {
            return;
        }
        // SAFETY: scratch holds each part in the shape of `ScratchLayout`; parts do not overlap.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            for r in 0..rows {
                let (max, sums) = (base.add(layout.max), base.add(layout.sums));
                let row = SoftmaxRow { logits: base.add(layout.logits + r * KV_TOKENS), max, sums };
                if scaled {
                    row.multiply_each(simd, width, base.add(layout.scales));
                }
                if params.hooks.logits {
                    row.scale(simd, width, params.inputs.problem.scale());
                }
            }
            if params.hooks.logits {
                let mut at = [QueryRow::default(); STRIP];
                at[..rows].iter_mut().enumerate().for_each(|(r, at)| *at = ctx.row_at(first + r));
                let logits = base.add(layout.logits).cast::<[f32; KV_TOKENS]>();
                let logits = std::slice::from_raw_parts_mut(logits, rows);
                params.variant.logits(params.isa, &at[..rows], positions, logits);
            }
        }
    }

    /// Replaces the logits of row `at` of a strip by softmax weights. Returns the factor that rescales the accumulator to the new
    /// running maximum.
    ///
    /// # Safety
    /// The width is as [`RowStrip`] requires, and above every bit of `visible`.
    #[inline(always)]
    unsafe fn softmax_row<S: Simd>(&mut self, simd: S, strip: RowStrip, at: usize, visible: u64) -> f32 {
        let (r, width) = (strip.first + at, strip.width);
        let (params, layout, mut rescale_by) = (self.ctx.params, &self.ctx.layout, 1.0);
        // SAFETY: scratch holds each part in the shape of `ScratchLayout`; parts do not overlap.
        unsafe {
            let base = self.scratch.as_mut_ptr();
            let row = SoftmaxRow {
                logits: base.add(layout.logits + at * KV_TOKENS),
                max: base.add(layout.max + r),
                sums: base.add(layout.sums + r * ALIGN),
            };
            if params.hooks.softmax {
                row.mask_out(visible, width, f32::NEG_INFINITY);
                rescale_by = row.update(simd, width, self.ctx.scale());
            } else {
                row.mask_out(visible, width, 0.0);
            }
            if !params.inputs.scales.v.is_one() {
                row.multiply_each(simd, width, base.add(layout.scales + KV_TOKENS));
                // the scale of a hidden key may be NaN or infinite
                row.mask_out(visible, width, 0.0);
            }
        }
        rescale_by
    }

    /// Writes each row to the output, or its partial state to the workspace.
    #[inline(always)]
    fn store<S: Simd>(&mut self, simd: S) {
        let (ctx, layout) = (self.ctx, &self.ctx.layout);
        let (params, dim) = (ctx.params, ctx.params.plan.problem.head_dim().vo);
        let scale = ctx.scale();
        for r in 0..ctx.rows {
            if ctx.item.partial.is_none() {
                let (token, head) = ctx.row((r + PREFETCH_ROWS).min(ctx.rows - 1));
                params.o.prefetch(simd, token, head, dim);
            }
            let base = self.scratch.as_mut_ptr();
            // SAFETY: scratch holds one maximum and one register of sums per row.
            let (max, sum) = unsafe {
                let (max, sums) = (base.add(layout.max + r), base.add(layout.sums + r * ALIGN));
                SoftmaxRow { logits: base, max, sums }.state(simd)
            };
            let o = &mut self.scratch[layout.o + r * layout.vo..][..dim];
            // SAFETY: the schedule assigns each output row and head, and each partial row, to one item.
            unsafe {
                let Some(first) = ctx.item.partial else {
                    let (token, head) = ctx.row(r);
                    epilogue::finish_row(params, token, head, o, (max * scale, sum));
                    continue;
                };
                let row = first as usize + r;
                params.partial_o.part(row * dim, dim).copy_from_slice(o);
                let max = if sum == 0.0 { f32::NEG_INFINITY } else { max * scale };
                params.partial_stats.part(2 * row, 2).copy_from_slice(&[max, sum]);
            }
        }
    }
}
