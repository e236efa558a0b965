//! A validated batch, the input of schedules and kernels: segments of keys, and the request and position of each row.
//!
//! A segment is a range of keys that some query rows attend to. There is one per request, unless cascade levels or
//! block sparsity spread a row's keys over several segments, whose results are merged.

use super::{
    mask::{Mask, MaskBits},
    problem::Problem,
};
use crate::{
    Result,
    kv::{DevicePart, PageList},
};
use std::ops::Range;

/// A validated batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requests {
    /// In row order.
    pub requests: Vec<Request>,
    /// Outermost level first: among the segments of a row, earlier ones hold earlier keys.
    pub segments: Vec<Segment>,
    /// Mapping of keys to cache locations.
    pub source: KvSource,
    /// Mask bits of all segments.
    pub mask: MaskBits,
}

/// The query rows of a request. Requests are in row order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// End of its query rows.
    pub end: usize,
    /// Position minus row index; the last row has the position of the last key.
    pub offset: i64,
}

/// Request and position of a query row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowPosition {
    pub request: u32,
    /// Position in the request, `kv_len - qo_len + i`; negative if the request has fewer keys than rows.
    pub(crate) position: i32,
}

/// A range of keys and the rows that attend to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Query rows, as indices in the batch.
    pub qo: Range<usize>,
    /// KV heads of these keys.
    pub kv_heads: Range<usize>,
    /// The first entry of the page indices or, in a ragged tensor, the first token.
    pub kv_start: usize,
    /// Number of keys.
    pub kv_len: usize,
    /// Position of the first key in the rows' requests.
    pub base: usize,
    /// The request of its rows, if there is only one.
    pub request: Option<u32>,
    /// Whether its rows also have other segments.
    pub shared: bool,
    /// Mask bits of this segment.
    pub mask: Option<SegmentMask>,
}

/// Mask bits of the last `columns` keys of a segment, row-major; earlier keys are unmasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentMask {
    /// Bit index of the segment's first row and first masked key.
    pub first_bit: usize,
    /// Number of trailing keys with bits; also the row stride in bits.
    pub columns: usize,
}

/// Mapping of a segment's keys to cache locations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvSource {
    /// Key `j` is slot `j % page_size` of page `indices[kv_start + j / page_size]`.
    Paged {
        /// Page ids of all requests.
        indices: PageList,
        /// Slots per page.
        page_size: usize,
        /// Maximum of `indices` on the host, negative if there are none.
        max_page: i32,
    },
    /// Key `j` is token `kv_start + j`.
    Ragged {
        /// Tokens of all requests.
        tokens: usize,
    },
    /// Key `j` is token `indices[kv_start + j / block] * block + j % block`, which is also its position.
    Blocks {
        /// Blocks of all segments.
        indices: Vec<i32>,
        /// Tokens per block.
        block: usize,
        /// Tokens of the tensor.
        tokens: usize,
    },
}

impl Default for KvSource {
    fn default() -> Self {
        Self::Ragged { tokens: 0 }
    }
}

impl KvSource {
    /// Number of page or block indices.
    pub(crate) fn num_indices(&self) -> usize {
        match self {
            Self::Paged { indices, .. } => indices.num_indices(),
            _ => self.indices().len(),
        }
    }

    /// The page indices on a device.
    pub fn device_indices(&self) -> &[DevicePart] {
        if let Self::Paged { indices, .. } = self { indices.device() } else { &[] }
    }

    /// Page or block `entry`; `None` if it is on a device or the keys are ragged.
    pub(crate) fn on_host(&self, entry: usize) -> Option<i32> {
        match self {
            Self::Paged { indices, .. } => indices.on_host(entry),
            _ => self.indices().get(entry).copied(),
        }
    }

    /// Rejects page indices on a device.
    pub(crate) fn check_on_host(&self, operator: &'static str, reason: &str) -> Result<()> {
        if let Self::Paged { indices, .. } = self { indices.check_on_host(operator, reason) } else { Ok(()) }
    }

    /// Page or block indices on the host, with zeros in the place of those on a device before them; empty for a ragged tensor.
    pub fn indices(&self) -> &[i32] {
        match self {
            Self::Paged { indices, .. } => indices,
            Self::Blocks { indices, .. } => indices,
            Self::Ragged { .. } => &[],
        }
    }
}

impl Segment {
    /// The keys, relative to the segment's first, visible to a row at `position`, without mask bits.
    pub(crate) fn visible(&self, mask: Mask, position: i32) -> Range<usize> {
        let Range { start, end } = mask.range(i64::from(position));
        let local = |at: i64| (at.saturating_sub(self.base as i64)).clamp(0, self.kv_len as i64) as usize;
        let (start, end) = (local(start), local(end));
        start.min(end)..end
    }
}

impl Requests {
    /// The range of a segment's keys that covers the visible keys of all `rows`.
    #[inline]
    pub(crate) fn visible(&self, problem: &Problem, segment: &Segment, rows: Range<usize>) -> Range<usize> {
        if self.has_position_gaps(problem) {
            return 0..segment.kv_len;
        }
        let visible = |row| segment.visible(problem.mask(), self.row(segment, row).position);
        if rows.is_empty() {
            return 0..0;
        }
        // positions ascend within a request, and so do the ranges of visible keys
        if segment.request.is_some() {
            let last = visible(rows.end - 1);
            return if rows.len() == 1 { last } else { visible(rows.start).start..last.end };
        }
        let spans = rows.map(visible).filter(|span| !span.is_empty());
        spans.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// Request and position of a row of a segment.
    #[inline(always)]
    pub(crate) fn row(&self, segment: &Segment, row: usize) -> RowPosition {
        let request = segment.request.unwrap_or_else(|| self.request_of(row));
        let offset = self.requests[request as usize].offset;
        RowPosition { request, position: (row as i64 + offset) as i32 }
    }

    /// The request that owns a query row.
    pub(crate) fn request_of(&self, row: usize) -> u32 {
        self.requests.partition_point(|request| request.end <= row) as u32
    }

    /// Whether the problem's mask must be tested per key, because positions of sparse blocks have gaps.
    pub(crate) fn has_position_gaps(&self, problem: &Problem) -> bool {
        matches!(self.source, KvSource::Blocks { .. }) && problem.mask() != Mask::Full
    }

    /// Position of key `at` of a segment in its request.
    pub(crate) fn key_position(&self, segment: &Segment, at: usize) -> usize {
        match &self.source {
            KvSource::Blocks { indices, block, .. } => {
                indices[segment.kv_start + at / block] as usize * block + at % block
            }
            _ => segment.base + at,
        }
    }
}

impl Requests {
    /// Total query rows.
    pub(crate) fn num_rows(&self) -> usize {
        self.requests.last().map_or(0, |request| request.end)
    }

    /// One past the maximum position of all keys and rows.
    pub(crate) fn longest(&self) -> usize {
        let keys = match self.source {
            KvSource::Blocks { tokens, .. } => tokens,
            _ => self.segments.iter().map(|segment| segment.base + segment.kv_len).max().unwrap_or(0),
        };
        let rows = self.requests.iter().map(|request| (request.end as i64 + request.offset).max(0) as usize);
        rows.fold(keys, usize::max)
    }

    /// Visible keys of a KV tile for row `row`: bit `j` is key `tile.start + j`.
    pub(crate) fn visible_bits(&self, mask: Mask, segment: &Segment, row: usize, tile: Range<usize>) -> u64 {
        let (start, tokens) = (tile.start, tile.len());
        let position = self.row(segment, row).position;
        let by_mask = if matches!(self.source, KvSource::Blocks { .. }) && mask != Mask::Full {
            let range = mask.range(i64::from(position));
            let visible = |at: &usize| range.contains(&(self.key_position(segment, start + at) as i64));
            (0..tokens).filter(visible).fold(0, |bits, at| bits | 1 << at)
        } else {
            let visible = segment.visible(mask, position);
            let local = |at: usize| at.saturating_sub(start).min(tokens);
            ones(local(visible.end)) & !ones(local(visible.start))
        };
        match segment.mask {
            Some(_) if by_mask != 0 => by_mask & self.mask.word(segment, row, tile),
            _ => by_mask,
        }
    }
}

/// The lowest `count` bits.
pub(crate) fn ones(count: usize) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}
