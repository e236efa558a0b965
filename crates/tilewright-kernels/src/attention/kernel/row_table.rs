//! Row table of a tile: positions and visible ranges of its rows.
//!
//! A row at position `p` sees positions `p - left ..= p + right`. If key positions have no gaps, these are keys `first..end` of
//! the segment. In block-sparse attention they remain positions, which are compared with those of single keys. KV tiles between
//! `unmasked_from` and `unmasked_to` are visible to all rows and need no mask.

use super::{
    CurrentItem, MmaCta, WARPS,
    visible::{to_i64, window},
};
use crate::attention::items::{RequestTable, WorkItemRegs};
use tilewright_ptx::{Shared, Value, WarpReduction};

/// The row table in shared memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowTable<'k> {
    positions: Shared<'k, i32>,
    first: Shared<'k, i32>,
    end: Shared<'k, i32>,
    limits: Shared<'k, i32>,
    /// `unmasked_from` and `unmasked_to`, of this warp.
    unmasked: Shared<'k, i32>,
}

impl<'k> RowTable<'k> {
    pub(crate) fn new(cta: &MmaCta<'k>) -> Self {
        let at = |number: usize| cta.at::<i32>(cta.layout.rows + number * 512);
        let unmasked = cta.at::<i32>(cta.layout.control + 32).at(cta.k.warp_index() << 1);
        Self { positions: at(0), first: at(1), end: at(2), limits: cta.at(cta.layout.control), unmasked }
    }

    /// Fills the table for the `count` rows from `begin` on, by all threads; valid after a barrier.
    pub(crate) fn fill(
        &self,
        cta: &MmaCta<'k>,
        current: &CurrentItem<'k>,
        begin: Value<'k, u32>,
        count: usize,
    ) {
        let (k, thread) = (cta.k, cta.k.thread());
        let item = current.load();
        let rows = item.qo_len * cta.params.group.by;
        let (row, exists) = (begin + thread, (begin + thread).lt(rows) & thread.lt(count as u32));
        let (first, end) = (k.var::<i32>("first", 0), k.var::<i32>("end", i32::MAX));
        k.when(exists, || {
            let position = row_position(cta, &item, row);
            self.positions.at(thread).store(position);
            let (from, to) = visible_range_at(cta, &item, position);
            first.set(from);
            end.set(to);
        });
        k.when(thread.lt(count as u32), || {
            self.first.at(thread).store(first.get());
            self.end.at(thread).store(end.get());
        });
        let last_first = k.reduce_warp(WarpReduction::MaxS32, first.get().reinterpret::<u32>());
        let first_end = k.reduce_warp(WarpReduction::MinS32, end.get().reinterpret::<u32>());
        k.when(k.lane().eq(0), || {
            self.limits.at(thread >> 5).store(last_first.reinterpret::<i32>());
            self.limits.at(thread >> 5).plus(WARPS).store(first_end.reinterpret::<i32>());
        });
    }

    /// Computes the key range that all rows see; each warp for itself.
    pub(crate) fn compute_unmasked_range(&self, cta: &MmaCta<'k>, current: &CurrentItem<'k>) {
        let item = current.load();
        let firsts = self.limits.load_vector::<4>();
        let ends = self.limits.plus(WARPS).load_vector::<4>();
        let from = firsts.into_iter().reduce(|a, b| a.max(b)).unwrap_or_else(|| cta.k.constant(0));
        let to = ends.into_iter().reduce(|a, b| a.min(b)).unwrap_or_else(|| cta.k.constant(0));
        let mask_begin = (item.kv_len - item.mask_columns).reinterpret::<i32>();
        let limit = mask_begin.unless(item.mask_columns.eq(0), i32::MAX);
        // block positions: all keys or none
        let all = from.le(0) & to.eq(i32::MAX);
        let end = item.kv_end.reinterpret::<i32>();
        let of_blocks = all.select::<i32>(end, 0);
        let to = cta.is_blocks().select::<i32>(of_blocks, to.min(end));
        cta.k.when(cta.k.lane().eq(0), || self.unmasked.store_vector([from, to.min(limit)]));
        cta.k.sync_warp();
    }

    /// The first and the end of the keys that all rows see, as computed by this warp.
    #[track_caller]
    pub(crate) fn unmasked_range(&self) -> [Value<'k, i32>; 2] {
        self.unmasked.load_vector()
    }

    /// Whether any row does not see all of the `count` keys from `first` on.
    #[track_caller]
    pub(crate) fn needs_mask(&self, first: Value<'k, u32>, count: usize) -> Value<'k, bool> {
        let [from, to] = self.unmasked_range();
        let first = first.reinterpret::<i32>();
        first.lt(from) | (first + count as i32).gt(to)
    }

    /// Keys (or positions) `first..end` that a row of the tile sees.
    #[track_caller]
    pub(crate) fn visible_range(&self, row: Value<'k, u32>) -> (Value<'k, i32>, Value<'k, i32>) {
        (self.first.at(row).load(), self.end.at(row).load())
    }
}

pub(crate) fn row_position<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    row: Value<'k, u32>,
) -> Value<'k, i32> {
    let token = cta.query_head(item, row).token;
    let offset = cta.k.var::<i32>("offset", item.offset);
    let requests = RequestTable { rows: cta.params.plan.requests, count: cta.params.plan.num_requests };
    requests.look_up(token, item.request, None, offset);
    token.reinterpret::<i32>() + offset.get()
}

/// The visible range of a row at a position.
pub(crate) fn visible_range_at<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    row_position: Value<'k, i32>,
) -> (Value<'k, i32>, Value<'k, i32>) {
    let blocks = cta.is_blocks();
    let base = to_i64(blocks.select::<u32>(0, item.base));
    let max_key = to_i64(blocks.select::<u32>(i32::MAX as u32, item.kv_end));
    window(&cta.params, row_position.to_i64() - base, |at| at.max(0).min(max_key))
}
