//! Batch validation: converts a [`Batch`] to checked [`Requests`].

use super::{
    batch::{Batch, KvTable, Levels, Shard},
    mask::{MaskBits, PackedMask},
    problem::Problem,
    requests::{KvSource, Request, Requests, Segment, SegmentMask},
};
use crate::{Result, kv::PageList};
use std::ops::Range;

impl Batch<'_> {
    /// Validates the batch and writes the form that schedules and kernels read into `to`, whose memory is reused.
    pub(super) fn resolve(&self, operator: &'static str, problem: &Problem, to: &mut Requests) -> Result<()> {
        *to = match &self.kv {
            KvTable::Blocks(blocks) => blocks.resolve(operator, problem),
            KvTable::VariableBlocks(blocks) => blocks.resolve(operator, problem),
            KvTable::Paged(_) | KvTable::Ragged { .. } => {
                return self.resolve_requests(operator, problem, to);
            }
        }?;
        let unsupported = [
            ("packed mask", self.mask.is_some()),
            ("levels", !matches!(self.levels, Levels::Explicit([]))),
            ("shard", self.shard.is_some()),
        ];
        for (what, is_set) in unsupported {
            crate::ensure!(!is_set, operator, "a block-sparse batch takes no {what}");
        }
        Ok(())
    }

    fn resolve_requests(&self, operator: &'static str, problem: &Problem, to: &mut Requests) -> Result<()> {
        let count = self.qo_indptr.len().saturating_sub(1);
        let rows = self.qo_indptr.check_ranges(operator, "qo_indptr", "request", count)?;
        let longest = self.resolve_keys(operator, problem.heads().kv, count, to)?;
        crate::ensure!(
            !self.detects_levels() || matches!(to.source, KvSource::Paged { .. }),
            operator,
            "shared prefixes are found by their pages, but the keys are ragged"
        );
        if self.detects_levels() {
            to.source.check_on_host(operator, ", where shared prefixes are found")?;
        }
        check_counts(operator, rows, longest)?;
        if let Some(mask) = &self.mask {
            to.apply_mask(operator, mask)?;
        }
        if let Some(shard) = &self.shard {
            crate::ensure!(
                matches!(self.levels, Levels::Explicit([])),
                operator,
                "a batch with a shard takes no levels"
            );
            return to.apply_shard(operator, shard);
        }
        if let Levels::Explicit(levels) = self.levels
            && !levels.is_empty()
        {
            let kv_lens = to.add_levels(operator, levels)?;
            to.set_rows(operator, &kv_lens)?;
        }
        Ok(())
    }

    /// Adds one segment per request, without levels. Returns the maximum number of keys of a request.
    fn resolve_keys(
        &self,
        operator: &'static str,
        kv_heads: usize,
        count: usize,
        to: &mut Requests,
    ) -> Result<usize> {
        let mut indices = to.clear();
        let mut longest = 0;
        match self.kv {
            KvTable::Paged(table) => {
                let table_requests = table.check_bounds(operator, "request")?;
                let max_page = table.collect_pages(operator, "request", &mut indices)?;
                to.source = KvSource::Paged { indices, page_size: table.page_size, max_page };
                crate::ensure!(
                    table_requests == count,
                    operator,
                    "the page table has {table_requests} requests, qo_indptr has {count}"
                );
                to.reserve(count);
                let (mut row, mut page) = (0, 0); // indptr arrays start at 0
                for r in 0..count {
                    let (row_end, page_end) =
                        (self.qo_indptr.get(r + 1) as usize, table.indptr.get(r + 1) as usize);
                    let kv_len = table.kv_len_of(operator, "request", r, page_end - page)?;
                    longest = longest.max(kv_len);
                    to.push(row..row_end, kv_heads, page, kv_len);
                    (row, page) = (row_end, page_end);
                }
            }
            KvTable::Ragged { indptr } => {
                let tokens = indptr.check_ranges(operator, "kv_indptr", "request", count)?;
                to.source = KvSource::Ragged { tokens };
                to.reserve(count);
                for r in 0..count {
                    let kv = indptr.range(r);
                    longest = longest.max(kv.len());
                    to.push(self.qo_indptr.range(r), kv_heads, kv.start, kv.len());
                }
            }
            KvTable::Blocks(_) | KvTable::VariableBlocks(_) => unreachable!("blocks resolve themselves"),
        }
        Ok(longest)
    }
}

/// Limits positions to 32 bits, so that products of rows and keys fit in 64.
fn check_counts(operator: &'static str, total: usize, longest: usize) -> Result<()> {
    crate::ensure!(
        total.max(longest) <= i32::MAX as usize,
        operator,
        "{total} query rows and a longest request of {longest} tokens, the most is {}",
        i32::MAX
    );
    Ok(())
}

impl Requests {
    /// Clears all requests and returns the empty page list for reuse.
    pub(super) fn clear(&mut self) -> PageList {
        self.requests.clear();
        self.segments.clear();
        self.mask = MaskBits::default();
        match std::mem::take(&mut self.source) {
            KvSource::Paged { mut indices, .. } => {
                indices.clear();
                indices
            }
            KvSource::Blocks { .. } | KvSource::Ragged { .. } => PageList::default(),
        }
    }

    pub(super) fn reserve(&mut self, count: usize) {
        self.requests.reserve(count);
        self.segments.reserve(count);
    }

    /// Adds the next request and its segment.
    #[inline]
    fn push(&mut self, qo: Range<usize>, kv_heads: usize, kv_start: usize, kv_len: usize) {
        let request = Some(self.requests.len() as u32);
        // overflowing counts are rejected after all requests are read
        self.requests.push(Request { end: qo.end, offset: (kv_len as i64).wrapping_sub(qo.end as i64) });
        self.segments.push(Segment {
            qo,
            kv_heads: 0..kv_heads,
            kv_start,
            kv_len,
            base: 0,
            request,
            shared: false,
            mask: None,
        });
    }

    /// Aligns the last query row of each request with the last of its `kv_lens` keys.
    fn set_rows(&mut self, operator: &'static str, kv_lens: &[usize]) -> Result<()> {
        let own = &self.segments[self.segments.len() - kv_lens.len()..];
        let total = own.last().map_or(0, |own| own.qo.end);
        check_counts(operator, total, kv_lens.iter().copied().max().unwrap_or(0))?;
        for ((request, own), &kv_len) in self.requests.iter_mut().zip(own).zip(kv_lens) {
            request.offset = kv_len as i64 - own.qo.end as i64;
        }
        Ok(())
    }

    fn apply_shard(&mut self, operator: &'static str, shard: &Shard<'_>) -> Result<()> {
        let count = self.segments.len();
        for (name, index) in [("kv_offsets", shard.kv_offsets), ("kv_lens", shard.kv_lens)] {
            crate::ensure!(
                index.len() == count,
                operator,
                "{name} has {} entries, expected num_requests = {count}",
                index.len()
            );
        }
        let mut ends = Vec::with_capacity(count);
        for (r, own) in self.segments.iter_mut().enumerate() {
            let (offset, kv_len) = (shard.kv_offsets.get(r), shard.kv_lens.get(r));
            let fits = offset >= 0
                && kv_len >= 0
                && offset.checked_add(own.kv_len as i64).is_some_and(|end| end <= kv_len);
            crate::ensure!(
                fits,
                operator,
                "request {r}: kv_offset = {offset} and {} keys here do not lie in 0..{kv_len}",
                own.kv_len
            );
            own.base = offset as usize;
            ends.push(kv_len as usize);
        }
        self.set_rows(operator, &ends)
    }

    fn apply_mask(&mut self, operator: &'static str, mask: &PackedMask<'_>) -> Result<()> {
        let columns = mask.columns(operator, &self.segments)?;
        let mut bits = 0;
        for (segment, columns) in self.segments.iter_mut().zip(columns) {
            segment.mask = Some(SegmentMask { first_bit: bits, columns });
            bits = (bits + segment.qo.len() * columns).next_multiple_of(8);
        }
        self.mask = MaskBits::new(operator, mask, bits / 8)?;
        Ok(())
    }
}
