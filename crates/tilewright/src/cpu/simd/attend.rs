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
//!    that both products are one micro-kernel over lanes; each KV byte is read once for all heads of its group.
//! 2. Rows go six at a time through all three steps, so that S stays in registers and first-level cache.
//! 3. Keys that a row does not see are not multiplied by zero: they are not multiplied. NaN there cannot spread.
//! 4. KV tiles begin at multiples of 64 keys of the request, and each row's arithmetic is the same alone or among
//!    others: bits depend on a row's keys and on where splits fall, on nothing else.

use super::{
    Simd, Task, gather,
    shared::{Shared, SharedRows},
    softmax::{self, Running},
    tile::{self, Matrix},
};
use crate::{
    View,
    attention::{KvSource, Merge, Plan, Request, WorkItem, merge_weights},
    kv::layout::KvStrides,
};

/// Keys of one KV tile.
pub(crate) const KV_TOKENS: usize = 64;
/// Parts and row strides of scratch are multiples of the widest register, which is a cache line.
pub(crate) const ALIGN: usize = 16;

/// One attention call, as all workers see it.
pub(crate) struct Call<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) q: View<'a>,
    pub(crate) k: (View<'a>, KvStrides),
    pub(crate) v: (View<'a>, KvStrides),
    pub(crate) o: SharedRows<'a>,
    pub(crate) lse: Option<Shared<'a, f32>>,
    /// `[partial_rows, head_dim_vo]`
    pub(crate) partial_o: Shared<'a, f32>,
    /// `[partial_rows]`
    pub(crate) partial_lse: Shared<'a, f32>,
}

/// One worker's items; a [`Task`], so that it is compiled per instruction set.
pub(crate) struct Worker<'a> {
    pub(crate) call: &'a Call<'a>,
    pub(crate) items: &'a [WorkItem],
    pub(crate) scratch: &'a mut [f32],
}

/// Where each part of a worker's scratch begins, in f32 elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Row stride of O and V: head_dim_vo rounded up.
    vo: usize,
    /// Row stride of K: head_dim_qk rounded up.
    qk: usize,
    o: usize,
    logits: usize,
    keys: usize,
    keys_transposed: usize,
    values: usize,
    running: usize,
    /// Elements in all.
    pub(crate) len: usize,
}

impl Layout {
    /// For tiles of `rows` rows.
    pub(crate) fn new(rows: usize, (qk, vo): (usize, usize)) -> Self {
        let (qk_padded, vo_padded) = (qk.next_multiple_of(ALIGN), vo.next_multiple_of(ALIGN));
        let mut len = (rows * qk).next_multiple_of(ALIGN);
        let mut take = |count: usize| {
            let start = len;
            len += count.next_multiple_of(ALIGN);
            start
        };
        let o = take(rows * vo_padded);
        let logits = take(6 * KV_TOKENS);
        let keys = take(KV_TOKENS * qk_padded);
        let keys_transposed = take(qk_padded * KV_TOKENS);
        let values = take(KV_TOKENS * vo_padded);
        let running = take(2 * rows);
        Self { vo: vo_padded, qk: qk_padded, o, logits, keys, keys_transposed, values, running, len }
    }
}

impl Task for Worker<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let problem = &self.call.plan.problem;
        let (dim, group) = (problem.head_dim(), problem.heads().group());
        for item in self.items {
            let rows = item.qo.len() * group;
            let layout = Layout::new(rows, (dim.qk, dim.vo));
            let request = &self.call.plan.requests.requests[item.request as usize];
            let place = Place { call: self.call, item, request, layout, rows };
            let mut tile = Tile { place, scratch: self.scratch };
            tile.load_queries(simd);
            let kv = item.kv.start as usize..item.kv.end as usize;
            for start in kv.clone().step_by(KV_TOKENS) {
                let tokens = KV_TOKENS.min(kv.end - start);
                tile.load_keys_and_values(simd, start, tokens);
                tile.attend(simd, start, tokens);
            }
            tile.store();
        }
    }
}

/// Which rows a tile has, and where its keys are.
#[derive(Clone, Copy)]
struct Place<'a> {
    call: &'a Call<'a>,
    item: &'a WorkItem,
    request: &'a Request,
    layout: Layout,
    /// Query rows, ordered `[token, head of the group]`.
    rows: usize,
}

/// A tile of query rows on its way through the keys.
struct Tile<'a, 'b> {
    place: Place<'a>,
    scratch: &'b mut [f32],
}

impl Place<'_> {
    /// Token (of the batch) and query head of row `r`.
    #[inline(always)]
    fn row(&self, r: usize) -> (usize, usize) {
        let group = self.call.plan.problem.heads().group();
        (self.item.qo.start as usize + r / group, self.item.kv_head as usize * group + r % group)
    }

    /// The factor from `q · k` to logits in base 2.
    #[inline(always)]
    fn scale(&self) -> f32 {
        self.call.plan.problem.scale() * std::f32::consts::LOG2_E
    }

    /// How many of `tokens` keys from `start` on row `r` sees.
    #[inline(always)]
    fn visible(&self, r: usize, start: usize, tokens: usize) -> usize {
        let seen = self.request.visible(&self.call.plan.problem, self.row(r).0);
        seen.saturating_sub(start).min(tokens)
    }

    /// Offset of position `at` of the request in a tensor with `strides`.
    #[inline(always)]
    fn kv_offset(&self, strides: KvStrides, at: usize) -> usize {
        let head = self.item.kv_head as usize * strides.head;
        let start = self.request.kv_start;
        match &self.call.plan.requests.source {
            KvSource::Paged { indices, page_size, .. } => {
                let page = indices[start + at / page_size] as usize;
                page * strides.page + at % page_size * strides.token + head
            }
            KvSource::Ragged { .. } => (start + at) * strides.token + head,
        }
    }
}

impl Tile<'_, '_> {
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
        for r in 0..self.place.rows {
            self.set_running(r, Running::EMPTY);
        }
    }

    #[inline(always)]
    fn running(&self, r: usize) -> Running {
        let at = self.place.layout.running + 2 * r;
        Running { max: self.scratch[at], sum: self.scratch[at + 1] }
    }

    #[inline(always)]
    fn set_running(&mut self, r: usize, running: Running) {
        let at = self.place.layout.running + 2 * r;
        (self.scratch[at], self.scratch[at + 1]) = (running.max, running.sum);
    }

    /// Brings keys `start..start + tokens` (transposed) and their values into scratch, and asks for the next tile.
    #[inline(always)]
    fn load_keys_and_values<S: Simd>(&mut self, simd: S, start: usize, tokens: usize) {
        let (dim, layout) = (self.place.call.plan.problem.head_dim(), self.place.layout);
        let ((k, k_strides), (v, v_strides)) = (self.place.call.k, self.place.call.v);
        for token in 0..tokens {
            let (k_at, v_at) = (
                self.place.kv_offset(k_strides, start + token),
                self.place.kv_offset(v_strides, start + token),
            );
            // a position that exists: beyond the last one a page or an offset need not
            let next = (start + token + KV_TOKENS).min(self.place.request.kv_len - 1);
            gather::prefetch(simd, k.data(), self.place.kv_offset(k_strides, next), dim.qk);
            gather::prefetch(simd, v.data(), self.place.kv_offset(v_strides, next), dim.vo);
            let key = self.scratch[layout.keys + token * layout.qk..][..dim.qk].as_mut_ptr();
            let value = self.scratch[layout.values + token * layout.vo..][..dim.vo].as_mut_ptr();
            // SAFETY: `key` and `value` are slices of `dim.qk` and `dim.vo` elements.
            unsafe {
                gather::widen(simd, k.data(), k_at, key, dim.qk);
                gather::widen(simd, v.data(), v_at, value, dim.vo);
            }
        }
        let (keys, transposed) = self.scratch[layout.keys..layout.values].split_at_mut(KV_TOKENS * layout.qk);
        // SAFETY: `keys` holds [64, qk rounded up] and `transposed` [qk rounded up, 64] elements.
        unsafe {
            let from = Matrix { at: keys.as_ptr(), stride: layout.qk };
            let to = Matrix { at: transposed.as_mut_ptr(), stride: KV_TOKENS };
            gather::transpose(simd, (tokens, dim.qk), from, to);
        }
    }

    /// Adds `tokens` keys from `start` on to the state of every row.
    #[inline(always)]
    fn attend<S: Simd>(&mut self, simd: S, start: usize, tokens: usize) {
        let plan = self.place.call.plan;
        let (dim, layout) = (plan.problem.head_dim(), self.place.layout);
        let (scale, place) = (self.place.scale(), self.place);
        let visible = |row: usize| place.visible(row, start, tokens);
        for first in (0..self.place.rows).step_by(S::TILE_ROWS) {
            let rows = S::TILE_ROWS.min(self.place.rows - first);
            // later rows see at least as much as earlier ones
            let (least, most) = (visible(first), visible(first + rows - 1));
            if most == 0 {
                continue;
            }
            let width = most.next_multiple_of(S::LANES);
            let mut seen = [0; 6];
            (0..rows).for_each(|r| seen[r] = visible(first + r));

            let logits = self.scratch[layout.logits..layout.keys].as_mut_ptr();
            // SAFETY: scratch holds each matrix with the shape and stride named in `Layout`, rounded up to whole
            // registers, and none overlaps another.
            unsafe {
                let base = self.scratch.as_mut_ptr();
                let queries = Matrix { at: base.add(first * dim.qk).cast_const(), stride: dim.qk };
                let keys = Matrix { at: base.add(layout.keys_transposed).cast_const(), stride: KV_TOKENS };
                let logits = Matrix { at: logits, stride: KV_TOKENS };
                let o = Matrix { at: base.add(layout.o + first * layout.vo), stride: layout.vo };
                let values = Matrix { at: base.add(layout.values).cast_const(), stride: layout.vo };

                std::slice::from_raw_parts_mut(logits.at, rows * KV_TOKENS).fill(0.0);
                tile::multiply_add(simd, (rows, width, dim.qk), queries, keys, logits);
                let running = base.add(layout.running + 2 * first).cast::<Running>();
                for (r, &seen) in seen[..rows].iter().enumerate() {
                    let row = logits.at.add(r * KV_TOKENS);
                    for unseen in seen..width {
                        *row.add(unseen) = f32::NEG_INFINITY;
                    }
                    let factor = softmax::step(simd, row, width, scale, &mut *running.add(r));
                    rescale(simd, o.at.add(r * o.stride), dim.vo, factor);
                }
                weigh(simd, (&seen[..rows], least), dim.vo, (logits, values), o);
            }
        }
    }

    /// Writes every row's state, to the output or to the workspace.
    #[inline(always)]
    fn store(&mut self) {
        let dim = self.place.call.plan.problem.head_dim();
        let num_heads = self.place.call.plan.problem.heads().qo;
        let scale = self.place.scale();
        for r in 0..self.place.rows {
            let running = self.running(r);
            let (token, head) = self.place.row(r);
            let o = &mut self.scratch[self.place.layout.o + r * self.place.layout.vo..][..dim.vo];
            let normalizer = running.normalizer();
            o.iter_mut().for_each(|o| *o *= normalizer);
            // SAFETY: the schedule gives each output row and head, and each partial row, to one item.
            unsafe {
                if let Some(first) = self.place.item.partial {
                    let row = first as usize + r;
                    self.place.call.partial_o.part(row * dim.vo, dim.vo).copy_from_slice(o);
                    self.place.call.partial_lse.part(row, 1)[0] = running.lse(scale);
                } else {
                    self.place.call.o.store(token, head, o);
                    if let Some(lse) = &self.place.call.lse {
                        lse.part(token * num_heads + head, 1)[0] = running.lse(scale);
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
unsafe fn weigh<S: Simd>(
    simd: S,
    (seen, least): (&[usize], usize),
    width: usize,
    (weights, values): (Matrix<*mut f32>, Matrix<*const f32>),
    o: Matrix<*mut f32>,
) {
    let weights = Matrix { at: weights.at.cast_const(), stride: weights.stride };
    // SAFETY: the caller's promise; rows and keys stay below its shapes.
    unsafe {
        tile::multiply_add(simd, (seen.len(), width, least), weights, values, o);
        for (r, &seen) in seen.iter().enumerate().filter(|(_, seen)| **seen > least) {
            let weights = Matrix { at: weights.at.add(r * weights.stride + least), ..weights };
            let values = Matrix { at: values.at.add(least * values.stride), ..values };
            let o = Matrix { at: o.at.add(r * o.stride), ..o };
            tile::multiply_add(simd, (1, width, seen - least), weights, values, o);
        }
    }
}

/// Merges the partial states of one split unit into the output. `row` is scratch of head_dim_vo elements.
pub(crate) fn merge(call: &Call<'_>, merge: &Merge, row: &mut [f32]) {
    let (problem, schedule) = (&call.plan.problem, &call.plan.schedule);
    let (heads, dim) = (problem.heads(), problem.head_dim());
    let sources = &schedule.sources[merge.sources.start as usize..merge.sources.end as usize];
    let row = &mut row[..dim.vo];
    for r in 0..merge.qo.len() * heads.group() {
        let (token, head) = (
            merge.qo.start as usize + r / heads.group(),
            merge.kv_head as usize * heads.group() + r % heads.group(),
        );
        row.fill(0.0);
        let mut lse = f32::NEG_INFINITY;
        // SAFETY: all items are done, each partial row belongs to one merge, and the schedule gives each output row
        // and head to one merge.
        unsafe {
            for &source in sources {
                let at = source as usize + r;
                let (ours, theirs, merged) = merge_weights(lse, call.partial_lse.part(at, 1)[0]);
                for (o, partial) in row.iter_mut().zip(call.partial_o.part(at * dim.vo, dim.vo)) {
                    *o = *o * ours + *partial * theirs;
                }
                lse = merged;
            }
            call.o.store(token, head, row);
            if let Some(out) = &call.lse {
                out.part(token * heads.qo + head, 1)[0] = lse;
            }
        }
    }
}
