//! Work partitioning: cuts units into work items and assigns them to workers.
//!
//! A unit is a tile of query rows, one segment and some KV heads. All heads of a segment have the same query tiles,
//! which are computed once.
//!
//! 1. Compute the visible keys of each query tile, and with them the total cost of the batch.
//! 2. Concatenate all units along the cost axis and cut them at the workers' quotas.
//!
//! The quota is an equal share of the cost. If all units are equal, and that costs a worker less than a cut, it is a number of units,
//! without partial states, or an equal piece of a unit.

use super::{
    Schedule, ScheduleInputs, Split, WorkItem, check_items, tile_tokens,
    units::{RowTile, Scratch, SegmentUnits, Span, Unit, div_u32},
};
use crate::{Result, attention::Segment};
use std::ops::Range;

/// A piece length, in KV tiles, beyond every request.
const UNSPLIT: usize = 1 << 40;

/// Fills the empty `schedule`. Returns whether rows have several segments, whose states are still to be merged.
pub(super) fn cut(
    schedule: &mut Schedule,
    inputs: &ScheduleInputs<'_>,
    scratch: &mut Scratch,
) -> Result<bool> {
    let mut cutter = Cutter::new(schedule, inputs);
    let (mut query_tiles, mut units, mut shared) = (0, 0, false);
    for segment in inputs.requests.segments.iter().filter(|segment| !inputs.has_many_rows(segment)) {
        let tiles = cutter.num_tiles(segment);
        query_tiles += if tiles > 1 { tiles } else { 0 };
        units += tiles * segment.kv_heads.len();
        shared |= segment.shared;
    }
    check_items(inputs.operator, units)?;
    scratch.segment_units.clear();
    scratch.query_tiles.clear();
    scratch.segment_units.reserve(inputs.requests.segments.len());
    scratch.query_tiles.reserve(query_tiles);
    let (cost, mut pieces) = cutter.measure(scratch);
    // without a balanced KV split, heads are the only way to occupy all workers
    if inputs.split != Split::Balanced && cutter.max_heads > 1 {
        pieces = cutter.limit_heads(cost, scratch);
    }
    cutter.balance(cost, &scratch.segment_units);
    check_items(inputs.operator, pieces)?;
    // a balanced split adds at most one item per quota boundary
    let cuts = if cutter.piece.is_none() { inputs.tiling.workers - 1 } else { 0 };
    cutter.schedule.items.reserve(pieces + cuts);
    cutter.emit(scratch);
    Ok(shared)
}

/// Concatenates the units along the cost axis and cuts them.
struct Cutter<'a> {
    inputs: &'a ScheduleInputs<'a>,
    schedule: &'a mut Schedule,
    group: usize,
    /// Query tokens per tile.
    tile: usize,
    /// Maximum KV heads per item.
    max_heads: usize,
    /// KV tiles per piece, for a fixed split.
    piece: Option<usize>,
    /// Cost per worker.
    quota: usize,
    /// Workers per unit, which take equal pieces, if the batch is cut so.
    workers_per_unit: Option<usize>,
    /// Cost of all units so far, the worker at that cost, and the end of its quota.
    begin: usize,
    worker: usize,
    worker_end: usize,
}

impl<'a> Cutter<'a> {
    fn new(schedule: &'a mut Schedule, inputs: &'a ScheduleInputs<'a>) -> Self {
        let piece = match inputs.split {
            Split::Balanced => None,
            Split::Fixed { tokens } => Some(tokens.div_ceil(inputs.tiling.kv_tokens).clamp(1, UNSPLIT)),
            Split::Never => Some(UNSPLIT),
        };
        Self {
            inputs,
            schedule,
            group: inputs.problem.heads().group(),
            tile: tile_tokens(inputs.problem, inputs.tiling),
            max_heads: inputs.tiling.kv_heads.max(1),
            piece,
            quota: 0,
            workers_per_unit: None,
            begin: 0,
            worker: 0,
            worker_end: 0,
        }
    }

    /// Query tiles of a segment. Avoids the division in the common case of one tile.
    #[inline]
    fn num_tiles(&self, segment: &Segment) -> usize {
        let rows = segment.qo.len();
        if rows <= self.tile { usize::from(rows > 0) } else { rows.div_ceil(self.tile) }
    }

    /// KV heads per item of a segment.
    #[inline]
    fn heads(&self, segment: &Segment) -> usize {
        if self.max_heads == 1 {
            return 1;
        }
        let rows = self.group * segment.qo.len().clamp(1, self.tile);
        (self.inputs.tiling.q_rows / rows).clamp(1, self.max_heads)
    }

    /// Computes the tiles of all segments. Returns the total cost, and the number of units (of pieces for a fixed
    /// split).
    fn measure(&self, scratch: &mut Scratch) -> (usize, usize) {
        let (mut all, mut num_pieces) = (0, 0_usize);
        for (index, segment) in self.inputs.requests.segments.iter().enumerate() {
            if self.inputs.has_many_rows(segment) {
                continue;
            }
            let (mut cost, mut pieces, mut num_tiles, mut query_tile) = (0, 0, 0, RowTile::default());
            let (mut begin, last) = (segment.qo.start, segment.qo.end);
            while begin < last {
                let end = last.min(begin + self.tile);
                let tile_pieces;
                (query_tile, tile_pieces) = self.query_tile(segment, begin..end);
                let per_tile = self.inputs.tiling.cost_per_tile(1, end - begin);
                cost += per_tile
                    * (self.inputs.tiling.segment_overhead * tile_pieces + query_tile.kv_tiles.len());
                pieces += tile_pieces;
                num_tiles += 1;
                if num_tiles > 1 || end < last {
                    scratch.query_tiles.push(query_tile);
                }
                begin = end;
            }
            let (num_heads, heads) = (segment.kv_heads.len(), self.heads(segment));
            let groups = if heads == 1 { num_heads } else { num_heads.div_ceil(heads) };
            num_pieces = num_pieces.saturating_add(groups.saturating_mul(pieces));
            all += num_heads * cost;
            scratch.segment_units.push(SegmentUnits {
                segment: index as u32,
                kv_heads: Span::new(segment.kv_heads.start, segment.kv_heads.end),
                heads: heads as u32,
                num_tiles,
                shared: segment.shared,
                pieces: u32::try_from(pieces).unwrap_or(u32::MAX),
                cost,
                query_tile,
            });
        }
        (all, num_pieces)
    }

    /// Limits the heads of an item to its share of the cost of a batch, `all`. Returns the number of pieces.
    fn limit_heads(&self, all: usize, scratch: &mut Scratch) -> usize {
        let mut num_pieces = 0_usize;
        for units in &mut scratch.segment_units {
            let share = all.div_ceil(self.inputs.tiling.shares.max(1) * units.cost.max(1)).max(1);
            units.heads = units.heads.min(u32::try_from(share).unwrap_or(u32::MAX));
            let groups = units.kv_heads.len().div_ceil(units.heads as usize);
            num_pieces = num_pieces.saturating_add(groups.saturating_mul(units.pieces as usize));
        }
        num_pieces
    }

    /// Chooses the cost per worker of a batch of cost `all`, or equal pieces of its units.
    fn balance(&mut self, all: usize, segments: &[SegmentUnits]) {
        let tiling = self.inputs.tiling;
        let share = all.div_ceil(tiling.workers).max(1);
        self.quota = share;
        let (Some(first), None) = (segments.first(), self.piece) else { return };
        if !segments.iter().all(|segment| segment.num_tiles == 1 && segment.costs_as(first)) {
            return;
        }
        let rows = first.query_tile.qo.len();
        let of_tile = tiling.cost_per_tile(1, rows);
        let units = share.div_ceil(first.cost.max(1)) * first.cost;
        if units > share && units - share <= of_tile * tiling.cut_overhead {
            self.quota = units;
            return;
        }
        // each worker has one item instead of two, but units are still cut
        let (tiles, pieces) = (first.query_tile.kv_tiles.len(), first.cost / share);
        if pieces > 1 && tiles / pieces >= tiling.segment_overhead {
            let longest = of_tile * (tiling.segment_overhead + tiles.div_ceil(pieces));
            let saved = of_tile * tiling.cut_overhead.saturating_sub(tiling.segment_overhead);
            self.workers_per_unit = (longest <= share + saved).then_some(pieces);
        }
    }

    /// The query tile of some rows of a segment, and its number of pieces.
    #[inline]
    fn query_tile(&self, segment: &Segment, rows: Range<usize>) -> (RowTile, usize) {
        let ScheduleInputs { problem, requests, tiling, .. } = *self.inputs;
        let kv = requests.visible(problem, segment, rows.clone());
        let query_tile = RowTile::new(rows, kv, tiling.kv_tokens);
        (query_tile, self.piece.map_or(1, |piece| query_tile.pieces(piece).len()))
    }

    /// Emits the items of all units, ordered by segment, head and row.
    fn emit(&mut self, scratch: &Scratch) {
        (self.begin, self.worker, self.worker_end) = (0, 0, self.quota);
        let mut rest = &scratch.query_tiles[..];
        for units in &scratch.segment_units {
            let query_tiles = if units.num_tiles == 1 {
                std::slice::from_ref(&units.query_tile)
            } else {
                let query_tiles;
                (query_tiles, rest) = rest.split_at(units.num_tiles as usize);
                query_tiles
            };
            let Span { start: mut first, end } = units.kv_heads;
            while first < end && !query_tiles.is_empty() {
                let uncut = self.heads_within_quota(units, end - first);
                if uncut > 0 {
                    self.push_uncut(units, query_tiles, first..first + uncut);
                    self.begin += uncut as usize * units.cost;
                    self.advance_worker(self.begin);
                    first += uncut;
                }
                if first < end {
                    let heads = Span { start: first, end: end.min(first + units.heads) };
                    query_tiles.iter().for_each(|&query_tile| self.push_unit(units, query_tile, heads));
                    first = heads.end;
                }
            }
        }
    }

    /// The number of heads, at most `heads`, whose units fit in this worker's quota without a cut: all of them or a
    /// multiple of an item's heads.
    #[inline]
    fn heads_within_quota(&self, units: &SegmentUnits, heads: u32) -> u32 {
        if !units.uncut() {
            return 0;
        }
        if self.begin + heads as usize * units.cost <= self.worker_end {
            return heads;
        }
        let remaining = self.worker_end.saturating_sub(self.begin);
        let fit = div_u32(remaining, units.cost.max(1)) as u32;
        if units.heads == 1 { fit } else { fit - fit % units.heads }
    }

    /// Emits the uncut units of some heads.
    #[inline]
    fn push_uncut(&mut self, units: &SegmentUnits, query_tiles: &[RowTile], heads: Range<u32>) {
        self.schedule.advance_to(self.worker);
        let items = &mut self.schedule.items;
        let item = |kv_heads: Range<u32>, query_tile: &RowTile| WorkItem {
            segment: units.segment,
            kv_heads,
            qo: query_tile.qo.range(),
            kv: query_tile.kv.range(),
            partial: None,
        };
        if let ([query_tile], 1) = (query_tiles, units.heads) {
            return items.extend(heads.map(|head| item(head..head + 1, query_tile)));
        }
        for first in heads.clone().step_by(units.heads as usize) {
            let last = heads.end.min(first + units.heads);
            items.extend(query_tiles.iter().map(|query_tile| item(first..last, query_tile)));
        }
    }

    /// Emits one unit, cut if required.
    fn push_unit(&mut self, units: &SegmentUnits, query_tile: RowTile, kv_heads: Span) {
        let unit = Unit {
            segment: units.segment,
            kv_heads,
            shared: units.shared,
            query_tile,
            cost_per_tile: self.inputs.tiling.cost_per_tile(kv_heads.len(), query_tile.qo.len()),
        };
        match (self.piece, self.workers_per_unit) {
            (None, None) => self.push_balanced(unit),
            (None, Some(pieces)) => self.push_equal(unit, pieces),
            (Some(piece), _) => self.push_fixed(unit, piece),
        }
    }

    /// Cuts a unit at the workers' quotas.
    fn push_balanced(&mut self, unit: Unit) {
        let cost =
            unit.cost_per_tile * (self.inputs.tiling.segment_overhead + unit.query_tile.kv_tiles.len());
        let end = self.begin + cost;
        if end <= self.worker_end || unit.query_tile.kv_tiles.len() == 0 {
            self.push(&unit, self.worker, unit.query_tile.kv, unit.shared);
        } else {
            self.split_unit(&unit, end);
        }
        self.begin = end;
        self.advance_worker(end);
    }

    /// Cuts a unit into equal pieces, one per worker.
    fn push_equal(&mut self, unit: Unit, pieces: usize) {
        let tiles = unit.query_tile.kv_tiles.len();
        let begin = |piece: usize| piece * (tiles / pieces) + piece.min(tiles % pieces);
        let first_item = self.schedule.items.len() as u32;
        for piece in 0..pieces {
            self.push(&unit, self.worker, self.keys(&unit, begin(piece)..begin(piece + 1)), true);
            self.worker += 1;
        }
        self.merge(&unit, first_item);
    }

    /// Splits a unit: each worker takes the KV tiles in its quota.
    fn split_unit(&mut self, unit: &Unit, end: usize) {
        let (overhead, tiles) = (self.inputs.tiling.segment_overhead, unit.query_tile.kv_tiles.len());
        let (begin, cost) = (self.begin, unit.cost_per_tile);
        // The tile of this unit at cost `at` of the batch, snapped to the unit's ends within the overhead.
        let cut = |at: usize| match div_u32(at - begin, cost).saturating_sub(overhead).min(tiles) {
            tile if tile < overhead => 0,
            tile if tiles - tile < overhead => tiles,
            tile => tile,
        };
        let (mut from, mut worker, mut worker_end) = (0, self.worker, self.worker_end);
        let first_item = self.schedule.items.len() as u32;
        while from < tiles {
            let to = if worker_end >= end { tiles } else { cut(worker_end) };
            if to > from {
                let partial = from > 0 || to < tiles || unit.shared;
                self.push(unit, worker, self.keys(unit, from..to), partial);
            }
            (from, worker, worker_end) = (to.max(from), worker + 1, worker_end + self.quota);
        }
        self.merge(unit, first_item);
    }

    /// The keys of some KV tiles of a unit, relative to its first tile.
    #[inline]
    fn keys(&self, unit: &Unit, tiles: Range<usize>) -> Span {
        unit.query_tile.keys(tiles, self.inputs.tiling.kv_tokens)
    }

    /// Cuts a unit into pieces of `piece` KV tiles counted from the segment's first key; workers take full pieces.
    fn push_fixed(&mut self, unit: Unit, piece: usize) {
        let (first, tiles) = (unit.query_tile.kv_tiles.start as usize, unit.query_tile.kv_tiles.len());
        let (overhead, begin) = (self.inputs.tiling.segment_overhead, self.begin);
        let pieces = unit.query_tile.pieces(piece);
        let first_item = self.schedule.items.len() as u32;
        let partial = unit.shared || pieces.len() > 1;
        for (i, number) in pieces.clone().enumerate() {
            self.advance_worker(begin + i.saturating_mul(unit.cost_per_tile * (overhead + piece)));
            let (begin, end) = (number.saturating_mul(piece), (number + 1).saturating_mul(piece));
            let begin = begin.max(first) - first;
            let tiles = begin..(end.min(first + tiles) - first).max(begin);
            self.push(&unit, self.worker, self.keys(&unit, tiles), partial);
        }
        self.merge(&unit, first_item);
        self.begin += unit.cost_per_tile * (overhead * pieces.len() + tiles);
    }

    /// Advances to the worker whose quota contains the cost `at`.
    #[inline]
    fn advance_worker(&mut self, at: usize) {
        while at >= self.worker_end && self.worker + 1 < self.inputs.tiling.workers {
            self.worker += 1;
            self.worker_end += self.quota;
        }
    }

    /// Emits a piece.
    fn push(&mut self, unit: &Unit, worker: usize, kv: Span, partial: bool) {
        let schedule = &mut *self.schedule;
        let Unit { segment, kv_heads, query_tile: RowTile { qo, .. }, .. } = *unit;
        schedule.advance_to(worker);
        let (kv_heads, qo, kv) = (kv_heads.range(), qo.range(), kv.range());
        schedule.push(WorkItem { segment, kv_heads, qo, kv, partial: None }, partial.then_some(self.group));
    }

    /// Adds the merge of the pieces from `first_item` on, if there are several and their rows have no other keys.
    fn merge(&mut self, unit: &Unit, first_item: u32) {
        let Unit { kv_heads, query_tile: RowTile { qo, .. }, .. } = *unit;
        if !unit.shared {
            self.schedule.merge_since(first_item, kv_heads.range(), qo.range());
        }
    }
}
