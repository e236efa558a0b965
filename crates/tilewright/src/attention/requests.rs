//! A checked batch, in the form that schedules and kernels read: segments of keys, and what is known of each row.
//!
//! A segment is a run of keys that some query rows look at. Without cascade levels and block sparsity there is one for
//! each request; with levels, a row's keys are spread over several segments, whose results are merged.

use super::{
    mask::MaskBits,
    problem::{Mask, Problem},
};
use crate::kv::PageList;
use std::ops::Range;

/// A checked batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requests {
    /// In the order of their rows.
    pub requests: Vec<Request>,
    /// The outermost level first: of the segments of a row, an earlier one holds earlier keys.
    pub segments: Vec<Segment>,
    /// How keys become places in the cache.
    pub source: KvSource,
    /// The bits that segments speak of.
    pub mask: MaskBits,
}

/// Whose query rows are whose. Requests follow each other in the order of their rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// One past its last query row.
    pub end: usize,
    /// From the number of one of its rows to its position; the last row stands at the last key.
    pub offset: i64,
}

/// One query row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub request: u32,
    /// Its position in its request, `kv_len - qo_len + i`; below 0 where a request has fewer keys than rows.
    pub(crate) position: i32,
}

/// A run of keys and the rows that look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Query rows, counted over the whole batch.
    pub qo: Range<usize>,
    /// The KV heads that these keys are for.
    pub kv_heads: Range<usize>,
    /// The first entry of the page indices or, in a ragged tensor, the first token.
    pub kv_start: usize,
    /// Number of keys.
    pub kv_len: usize,
    /// The position of the first key in the requests of the rows.
    pub base: usize,
    /// The request of its rows, if it is one.
    pub request: Option<u32>,
    /// Whether its rows have other segments too.
    pub shared: bool,
    /// Bits that hide keys of this segment.
    pub mask: Option<SegmentMask>,
}

/// Bits for the last `columns` keys of a segment, row by row; keys before them are not hidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentMask {
    /// The bit of the segment's first row and the first of its last `columns` keys.
    pub first_bit: usize,
    /// For how many keys of the segment's end there are bits; also the bits from one row to the next.
    pub columns: usize,
}

/// How keys of a segment become places in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvSource {
    /// Key `j` is slot `j % page_size` of page `indices[kv_start + j / page_size]`.
    Paged {
        /// Pages of all requests.
        indices: PageList,
        /// Slots of a page.
        page_size: usize,
        /// The largest of `indices`, below 0 if there are none.
        max_page: i32,
    },
    /// Key `j` is token `kv_start + j`.
    Ragged {
        /// Tokens of all requests.
        tokens: usize,
    },
    /// Key `j` is token `indices[kv_start + j / block] * block + j % block`, which is its position, too.
    Blocks {
        /// Blocks of all segments.
        indices: Vec<i32>,
        /// Tokens of a block.
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
    /// Page indices, or blocks; none of a ragged tensor.
    pub fn indices(&self) -> &[i32] {
        match self {
            Self::Paged { indices, .. } => indices,
            Self::Blocks { indices, .. } => indices,
            Self::Ragged { .. } => &[],
        }
    }
}

impl Segment {
    /// The keys, counted from the segment's first, that a row at `position` sees, before any bits.
    pub(crate) fn visible(&self, mask: Mask, position: i32) -> Range<usize> {
        let Range { start, end } = mask.range(i64::from(position));
        let local = |at: i64| (at.saturating_sub(self.base as i64)).clamp(0, self.kv_len as i64) as usize;
        let (start, end) = (local(start), local(end));
        start.min(end)..end
    }
}

impl Requests {
    /// The keys of a segment that some row of `rows` may see.
    #[inline]
    pub(crate) fn visible(&self, problem: &Problem, segment: &Segment, rows: Range<usize>) -> Range<usize> {
        if self.scattered(problem) {
            return 0..segment.kv_len;
        }
        let seen = |row| segment.visible(problem.mask(), self.row(segment, row).position);
        if rows.is_empty() {
            return 0..0;
        }
        // positions ascend within a request, and with them what is seen
        if segment.request.is_some() {
            let last = seen(rows.end - 1);
            return if rows.len() == 1 { last } else { seen(rows.start).start..last.end };
        }
        let spans = rows.map(seen).filter(|span| !span.is_empty());
        spans.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// What is known of a row of a segment.
    #[inline(always)]
    pub(crate) fn row(&self, segment: &Segment, row: usize) -> Row {
        let request = segment.request.unwrap_or_else(|| self.request_of(row));
        let offset = self.requests[request as usize].offset;
        Row { request, position: (row as i64 + offset) as i32 }
    }

    /// The request that owns a query row.
    pub(crate) fn request_of(&self, row: usize) -> u32 {
        self.requests.partition_point(|request| request.end <= row) as u32
    }

    /// Whether the problem's mask has to be asked for each key alone: positions of sparse blocks have gaps.
    pub(crate) fn scattered(&self, problem: &Problem) -> bool {
        matches!(self.source, KvSource::Blocks { .. }) && problem.mask() != Mask::Full
    }

    /// The position, in its request, of key `at` of a segment.
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

    /// One past the last position of any key or row.
    pub(crate) fn longest(&self) -> usize {
        let keys = match self.source {
            KvSource::Blocks { tokens, .. } => tokens,
            _ => self.segments.iter().map(|segment| segment.base + segment.kv_len).max().unwrap_or(0),
        };
        let rows = self.requests.iter().map(|request| (request.end as i64 + request.offset).max(0) as usize);
        rows.fold(keys, usize::max)
    }

    /// The bits of which keys of the KV tile at `start` row `row` sees: bit `j` is key `start + j`, of `tokens`.
    pub(crate) fn seen(
        &self,
        mask: Mask,
        segment: &Segment,
        row: usize,
        (start, tokens): (usize, usize),
    ) -> u64 {
        let position = self.row(segment, row).position;
        let by_mask = if matches!(self.source, KvSource::Blocks { .. }) && mask != Mask::Full {
            let range = mask.range(i64::from(position));
            let seen = |at: &usize| range.contains(&(self.key_position(segment, start + at) as i64));
            (0..tokens).filter(seen).fold(0, |bits, at| bits | 1 << at)
        } else {
            let visible = segment.visible(mask, position);
            let local = |at: usize| at.saturating_sub(start).min(tokens);
            ones(local(visible.end)) & !ones(local(visible.start))
        };
        match segment.mask {
            Some(_) if by_mask != 0 => by_mask & self.mask.word(segment, row, (start, tokens)),
            _ => by_mask,
        }
    }
}

/// The lowest `count` bits.
pub(crate) fn ones(count: usize) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}
