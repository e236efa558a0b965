//! Work partitioning: cuts units into work items and assigns them to workers.
//!
//! A unit is a tile of query rows, one segment and some KV heads. All heads of a segment have the same query tiles,
//! which are computed once.
//!
//! 1. Compute the visible keys of each query tile, and with them the total cost of the batch.
//! 2. Concatenate all units along the cost axis and cut them at the workers' quotas.

use super::{Asked, Schedule, Split, WorkItem, check_items, tile_tokens};
use crate::{
    Result,
    attention::{Merge, Segment},
};
use std::ops::Range;

/// A piece length, in KV tiles, beyond every request.
const NEVER: usize = 1 << 40;

/// Memory of the first pass, reused by the second and by later plans; not part of a plan's value.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scratch {
    runs: Vec<Run>,
    /// Tiles of segments with more than one.
    spans: Vec<Span>,
}

impl Scratch {
    /// Reserves memory.
    pub(crate) fn reserve(&mut self, segments: usize, tiles: usize) {
        self.runs.reserve(segments);
        self.spans.reserve(tiles);
    }
}

impl PartialEq for Scratch {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Scratch {}

/// A tile of query rows of one segment, and its visible keys.
#[derive(Debug, Clone, Copy, Default)]
struct Span {
    qo: (u32, u32),
    /// Full KV tiles, except at the end of the keys.
    kv: (u32, u32),
    /// First KV tile and number of KV tiles.
    tiles: (u32, u32),
}

/// All units of one segment.
#[derive(Debug, Clone, Copy)]
struct Run {
    segment: u32,
    kv_heads: (u32, u32),
    /// KV heads per item.
    heads: u32,
    num_spans: u32,
    /// Whether its rows also have other segments.
    shared: bool,
    /// Whether its units are split only at a worker's quota, and write the output directly if they are not.
    whole: bool,
    /// Cost of all tiles for one head.
    cost: usize,
    /// The tile of a segment with a single one, the common case; others are in [`Scratch`].
    span: Span,
}

/// A query tile with some of its segment's KV heads, before any cut.
#[derive(Clone, Copy)]
struct Unit {
    segment: u32,
    kv_heads: (u32, u32),
    /// Whether its rows also have other segments.
    shared: bool,
    span: Span,
    cost_per_tile: usize,
}

/// Fills the empty `schedule`. Returns whether rows have several segments, whose states are still to be merged.
pub(super) fn cut(schedule: &mut Schedule, asked: &Asked<'_>, scratch: &mut Scratch) -> Result<bool> {
    let mut cutter = Cutter::new(schedule, asked);
    let (mut spans, mut units, mut shared) = (0, 0, false);
    for segment in &asked.requests.segments {
        let tiles = cutter.num_tiles(segment);
        spans += if tiles > 1 { tiles } else { 0 };
        units += tiles * segment.kv_heads.len();
        shared |= segment.shared;
    }
    check_items(asked.operator, units)?;
    // without a balanced KV split, heads are the only way to occupy all workers
    if asked.split != Split::Balanced {
        cutter.most_heads = cutter.most_heads.min(units.div_ceil(asked.tiling.workers)).max(1);
    }
    scratch.runs.clear();
    scratch.spans.clear();
    scratch.runs.reserve(asked.requests.segments.len());
    scratch.spans.reserve(spans);
    let (cost, pieces) = cutter.measure(scratch);
    cutter.quota = cost.div_ceil(asked.tiling.workers).max(1);
    check_items(asked.operator, pieces)?;
    // a balanced split adds at most one item per quota boundary
    let cuts = if cutter.piece.is_none() { asked.tiling.workers - 1 } else { 0 };
    cutter.schedule.items.reserve(pieces + cuts);
    cutter.lay(scratch);
    Ok(shared)
}

impl Span {
    #[inline]
    fn new((begin, end): (usize, usize), kv: Range<usize>, kv_tokens: usize) -> Self {
        let first = if kv.start == 0 { 0 } else { divide(kv.start, kv_tokens) };
        let tiles = if kv.is_empty() { 0 } else { divide(kv.end + kv_tokens - 1, kv_tokens) - first };
        let start = (first * kv_tokens).min(kv.end);
        Self {
            qo: (begin as u32, end as u32),
            kv: (start as u32, if kv.is_empty() { start as u32 } else { kv.end as u32 }),
            tiles: (first as u32, tiles as u32),
        }
    }

    /// The pieces of `piece` KV tiles, counted from the segment's first key, that contain its keys; one if it has none.
    fn pieces(&self, piece: usize) -> Range<usize> {
        let (first, tiles) = (self.tiles.0 as usize, self.tiles.1 as usize);
        if first == 0 && tiles <= piece {
            return 0..1;
        }
        let begin = first / piece;
        begin..(first + tiles).div_ceil(piece).max(begin + 1)
    }
}

/// Concatenates the units along the cost axis and cuts them.
struct Cutter<'a> {
    asked: &'a Asked<'a>,
    schedule: &'a mut Schedule,
    group: usize,
    /// Query tokens per tile.
    tile: usize,
    /// Maximum KV heads per item.
    most_heads: usize,
    /// KV tiles per piece, for a fixed split.
    piece: Option<usize>,
    /// Cost per worker.
    quota: usize,
    /// Cost of all units so far, the worker at that cost, and the end of its quota.
    begin: usize,
    worker: usize,
    worker_end: usize,
}

impl<'a> Cutter<'a> {
    fn new(schedule: &'a mut Schedule, asked: &'a Asked<'a>) -> Self {
        let piece = match asked.split {
            Split::Balanced => None,
            Split::Fixed { tokens } => Some(tokens.div_ceil(asked.tiling.kv_tokens).max(1)),
            Split::Never => Some(NEVER),
        };
        Self {
            asked,
            schedule,
            group: asked.problem.heads().group(),
            tile: tile_tokens(asked.problem, asked.tiling),
            most_heads: asked.tiling.kv_heads.max(1),
            piece,
            quota: 0,
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
        if self.most_heads == 1 {
            return 1;
        }
        let rows = self.group * segment.qo.len().clamp(1, self.tile);
        (self.asked.tiling.q_rows / rows).clamp(1, self.most_heads)
    }

    /// Computes the tiles of all segments. Returns the total cost, and the number of units (of pieces for a fixed
    /// split).
    fn measure(&self, scratch: &mut Scratch) -> (usize, usize) {
        let (mut all, mut num_pieces) = (0, 0_usize);
        for (number, segment) in self.asked.requests.segments.iter().enumerate() {
            let (mut cost, mut pieces, mut num_spans, mut span) = (0, 0, 0, Span::default());
            let (mut begin, last) = (segment.qo.start, segment.qo.end);
            while begin < last {
                let end = last.min(begin + self.tile);
                let of_span;
                (span, of_span) = self.span(segment, begin..end);
                let per_tile = self.asked.tiling.cost_per_tile(1, end - begin);
                cost += per_tile * (self.asked.tiling.segment_overhead * of_span + span.tiles.1 as usize);
                pieces += of_span;
                num_spans += 1;
                if num_spans > 1 || end < last {
                    scratch.spans.push(span);
                }
                begin = end;
            }
            let (num_heads, heads) = (segment.kv_heads.len(), self.heads(segment));
            let groups = if heads == 1 { num_heads } else { num_heads.div_ceil(heads) };
            num_pieces = num_pieces.saturating_add(groups.saturating_mul(pieces));
            all += num_heads * cost;
            scratch.runs.push(Run {
                segment: number as u32,
                kv_heads: (segment.kv_heads.start as u32, segment.kv_heads.end as u32),
                heads: heads as u32,
                num_spans,
                shared: segment.shared,
                whole: !segment.shared && pieces == num_spans as usize,
                cost,
                span,
            });
        }
        (all, num_pieces)
    }

    /// The query tile of some rows of a segment, and its number of pieces.
    #[inline]
    fn span(&self, segment: &Segment, rows: Range<usize>) -> (Span, usize) {
        let Asked { problem, requests, tiling, .. } = *self.asked;
        let kv = requests.visible(problem, segment, rows.clone());
        let span = Span::new((rows.start, rows.end), kv, tiling.kv_tokens);
        (span, self.piece.map_or(1, |piece| span.pieces(piece).len()))
    }

    /// Emits the items of all units, ordered by segment, head and row.
    fn lay(&mut self, scratch: &Scratch) {
        (self.begin, self.worker, self.worker_end) = (0, 0, self.quota);
        let mut rest = &scratch.spans[..];
        for run in &scratch.runs {
            let spans = if run.num_spans == 1 {
                std::slice::from_ref(&run.span)
            } else {
                let spans;
                (spans, rest) = rest.split_at(run.num_spans as usize);
                spans
            };
            let (mut first, end) = run.kv_heads;
            while first < end && !spans.is_empty() {
                let whole = self.whole_heads(run, end - first);
                if whole > 0 {
                    self.push_whole(run, spans, first..first + whole);
                    self.begin += whole as usize * run.cost;
                    self.find_worker(self.begin);
                    first += whole;
                }
                if first < end {
                    let next = end.min(first + run.heads);
                    spans.iter().for_each(|&span| self.push_unit(run, span, (first, next)));
                    first = next;
                }
            }
        }
    }

    /// The number of heads, at most `heads`, whose units fit in this worker's quota without a cut: all of them or a
    /// multiple of an item's heads.
    #[inline]
    fn whole_heads(&self, run: &Run, heads: u32) -> u32 {
        if !run.whole {
            return 0;
        }
        if self.begin + heads as usize * run.cost <= self.worker_end {
            return heads;
        }
        let room = self.worker_end.saturating_sub(self.begin);
        let fit = divide(room, run.cost.max(1)) as u32;
        if run.heads == 1 { fit } else { fit - fit % run.heads }
    }

    /// Emits the uncut units of some heads.
    #[inline]
    fn push_whole(&mut self, run: &Run, spans: &[Span], heads: Range<u32>) {
        self.schedule.advance_to(self.worker);
        let items = &mut self.schedule.items;
        let item = |kv_heads: Range<u32>, span: &Span| WorkItem {
            segment: run.segment,
            kv_heads,
            qo: span.qo.0..span.qo.1,
            kv: span.kv.0..span.kv.1,
            partial: None,
        };
        if let ([span], 1) = (spans, run.heads) {
            return items.extend(heads.map(|head| item(head..head + 1, span)));
        }
        for first in heads.clone().step_by(run.heads as usize) {
            let last = heads.end.min(first + run.heads);
            items.extend(spans.iter().map(|span| item(first..last, span)));
        }
    }

    /// Emits one unit, cut if required.
    fn push_unit(&mut self, run: &Run, span: Span, kv_heads: (u32, u32)) {
        let rows = (span.qo.1 - span.qo.0) as usize;
        let unit = Unit {
            segment: run.segment,
            kv_heads,
            shared: run.shared,
            span,
            cost_per_tile: self.asked.tiling.cost_per_tile((kv_heads.1 - kv_heads.0) as usize, rows),
        };
        match self.piece {
            None => self.balanced(unit),
            Some(piece) => self.fixed(unit, piece),
        }
    }

    /// Cuts a unit at the workers' quotas.
    fn balanced(&mut self, unit: Unit) {
        let cost = unit.cost_per_tile * (self.asked.tiling.segment_overhead + unit.span.tiles.1 as usize);
        let end = self.begin + cost;
        if end <= self.worker_end || unit.span.tiles.1 == 0 {
            self.push(&unit, self.worker, unit.span.kv, unit.shared);
        } else {
            self.divide(&unit, end);
        }
        self.begin = end;
        self.find_worker(end);
    }

    /// Splits a unit: each worker takes the KV tiles in its quota.
    fn divide(&mut self, unit: &Unit, end: usize) {
        let (overhead, tiles) = (self.asked.tiling.segment_overhead, unit.span.tiles.1 as usize);
        let begin = self.begin;
        // The tile of this unit at cost `at` of the batch, snapped to the unit's ends within the overhead.
        let cut = |at: usize| match ((at - begin) / unit.cost_per_tile).saturating_sub(overhead).min(tiles) {
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
    fn keys(&self, unit: &Unit, tiles: Range<usize>) -> (u32, u32) {
        let at =
            |tile: usize| (unit.span.tiles.0 as usize + tile).saturating_mul(self.asked.tiling.kv_tokens);
        let (end, limit) = (at(tiles.end), unit.span.kv.1 as usize);
        (at(tiles.start).min(limit) as u32, end.min(limit) as u32)
    }

    /// Cuts a unit into pieces of `piece` KV tiles counted from the segment's first key; workers take full pieces.
    fn fixed(&mut self, unit: Unit, piece: usize) {
        let (first, tiles) = (unit.span.tiles.0 as usize, unit.span.tiles.1 as usize);
        let (overhead, begin) = (self.asked.tiling.segment_overhead, self.begin);
        let pieces = unit.span.pieces(piece);
        let first_item = self.schedule.items.len() as u32;
        let partial = unit.shared || pieces.len() > 1;
        for (i, number) in pieces.clone().enumerate() {
            self.find_worker(begin + i.saturating_mul(unit.cost_per_tile * (overhead + piece)));
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
    fn find_worker(&mut self, at: usize) {
        while at >= self.worker_end && self.worker + 1 < self.asked.tiling.workers {
            self.worker += 1;
            self.worker_end += self.quota;
        }
    }

    /// Emits a piece.
    fn push(&mut self, unit: &Unit, worker: usize, kv: (u32, u32), partial: bool) {
        let schedule = &mut *self.schedule;
        let Unit { segment, kv_heads, span: Span { qo, .. }, .. } = *unit;
        let mut first_row = None;
        if partial {
            first_row = Some(schedule.partial_rows as u32);
            schedule.partial_rows += ((kv_heads.1 - kv_heads.0) * (qo.1 - qo.0)) as usize * self.group;
        }
        schedule.advance_to(worker);
        let (kv_heads, qo, kv) = (kv_heads.0..kv_heads.1, qo.0..qo.1, kv.0..kv.1);
        schedule.items.push(WorkItem { segment, kv_heads, qo, kv, partial: first_row });
    }

    /// Adds the merge of the pieces from `first_item` on, if there are several and their rows have no other keys.
    fn merge(&mut self, unit: &Unit, first_item: u32) {
        let (schedule, Unit { kv_heads, span: Span { qo, .. }, .. }) = (&mut *self.schedule, *unit);
        let end = schedule.items.len() as u32;
        if end - first_item > 1 && !unit.shared {
            let first_source = schedule.sources.len() as u32;
            schedule.sources.extend(first_item..end);
            let sources = first_source..schedule.sources.len() as u32;
            schedule.merges.push(Merge { kv_heads: kv_heads.0..kv_heads.1, qo: qo.0..qo.1, sources });
        }
    }
}

/// Division in 32 bits where both operands fit, as token counts do: several times faster than in 64 bits.
#[inline]
fn divide(number: usize, by: usize) -> usize {
    match (u32::try_from(number), u32::try_from(by)) {
        (Ok(number), Ok(by)) => (number / by) as usize,
        _ => number / by,
    }
}
