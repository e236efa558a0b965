//! Units of the schedule: query tiles with their visible keys, and those of all segments.

use std::ops::Range;

/// A range of rows, keys or heads; unlike [`Range`] it can be copied.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Span {
    pub(super) start: u32,
    pub(super) end: u32,
}

impl Span {
    #[inline]
    pub(super) fn new(start: usize, end: usize) -> Self {
        Self { start: start as u32, end: end as u32 }
    }

    #[inline]
    pub(super) fn len(self) -> usize {
        (self.end - self.start) as usize
    }

    #[inline]
    pub(super) fn range(self) -> Range<u32> {
        self.start..self.end
    }
}

/// Memory of the first pass, reused by the second and by later plans; not part of a plan's value.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scratch {
    pub(super) segment_units: Vec<SegmentUnits>,
    /// Tiles of segments with more than one.
    pub(super) query_tiles: Vec<RowTile>,
}

impl Scratch {
    /// Reserves memory.
    pub(crate) fn reserve(&mut self, segments: usize, tiles: usize) {
        self.segment_units.reserve(segments);
        self.query_tiles.reserve(tiles);
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
pub(super) struct RowTile {
    pub(super) qo: Span,
    /// Full KV tiles, except at the end of the keys.
    pub(super) kv: Span,
    pub(super) kv_tiles: Span,
}

/// All units of one segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentUnits {
    pub(super) segment: u32,
    pub(super) kv_heads: Span,
    /// KV heads per item.
    pub(super) heads: u32,
    pub(super) num_tiles: u32,
    /// Whether its rows also have other segments.
    pub(super) shared: bool,
    /// Pieces of all tiles for one head.
    pub(super) pieces: u32,
    /// Cost of all tiles for one head.
    pub(super) cost: usize,
    /// The tile of a segment with a single one, the common case; others are in [`Scratch`].
    pub(super) query_tile: RowTile,
}

impl SegmentUnits {
    /// Whether its units are split only at a worker's quota, and write the output directly if they are not.
    #[inline]
    pub(super) fn uncut(&self) -> bool {
        !self.shared && self.pieces == self.num_tiles
    }

    /// Whether the units of two segments of one query tile each have equal rows and KV tiles, and items of one KV head.
    pub(super) fn costs_as(&self, other: &Self) -> bool {
        let key = |of: &Self| (of.heads, of.query_tile.qo.len(), of.query_tile.kv_tiles.len());
        key(self) == key(other) && self.heads == 1
    }
}

/// A query tile with some of its segment's KV heads, before any cut.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub(super) segment: u32,
    pub(super) kv_heads: Span,
    /// Whether its rows also have other segments.
    pub(super) shared: bool,
    pub(super) query_tile: RowTile,
    pub(super) cost_per_tile: usize,
}

impl RowTile {
    #[inline]
    pub(super) fn new(rows: Range<usize>, kv: Range<usize>, kv_tokens: usize) -> Self {
        let first = if kv.start == 0 { 0 } else { div_u32(kv.start, kv_tokens) };
        let end = if kv.is_empty() { first } else { div_u32(kv.end + kv_tokens - 1, kv_tokens) };
        let start = (first * kv_tokens).min(kv.end);
        Self {
            qo: Span::new(rows.start, rows.end),
            kv: Span::new(start, if kv.is_empty() { start } else { kv.end }),
            kv_tiles: Span::new(first, end),
        }
    }

    /// The keys of some KV tiles, counted from the first of this tile.
    #[inline]
    pub(super) fn keys(&self, tiles: Range<usize>, kv_tokens: usize) -> Span {
        let at = |tile: usize| (self.kv_tiles.start as usize + tile).saturating_mul(kv_tokens);
        let limit = self.kv.end as usize;
        Span::new(at(tiles.start).min(limit), at(tiles.end).min(limit))
    }

    /// The pieces of `piece` KV tiles, counted from the segment's first key, that contain its keys; one if it has none.
    pub(super) fn pieces(&self, piece: usize) -> Range<usize> {
        let (first, tiles) = (self.kv_tiles.start as usize, self.kv_tiles.len());
        if first == 0 && tiles <= piece {
            return 0..1;
        }
        let begin = first / piece;
        begin..(first + tiles).div_ceil(piece).max(begin + 1)
    }
}

/// Division in 32 bits where both operands fit, as token counts do: several times faster than in 64 bits.
#[inline]
pub(super) fn div_u32(number: usize, by: usize) -> usize {
    match (u32::try_from(number), u32::try_from(by)) {
        (Ok(number), Ok(by)) => (number / by) as usize,
        _ => number / by,
    }
}
