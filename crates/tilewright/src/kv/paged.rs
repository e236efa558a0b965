//! The page table: which pages of the pool hold which request's tokens (CSR).
//!
//! ```text
//! indptr         0     2        5     request 0 owns indices[0..2], request 1 owns indices[2..5]
//! indices        7  3  0  4  1        page ids in the pool
//! last_page_len     1        2        tokens used in each request's last page, in 1..=page_size
//! ```
//!
//! A request without pages has no tokens, and its `last_page_len` is 0. Slots beyond `last_page_len` may hold
//! anything and are never read.

use crate::{Result, attention::Index};
use std::ops::Range;

/// Which pages hold which request's keys and values.
#[derive(Debug, Clone, Copy)]
pub struct PageTable<'a> {
    /// `[num_requests + 1]`, starts at 0, never decreases.
    pub indptr: Index<'a>,
    /// `[indptr[num_requests]]`, page ids.
    pub indices: Index<'a>,
    /// `[num_requests]`
    pub last_page_len: Index<'a>,
    /// Tokens a page holds, at least 1.
    pub page_size: usize,
}

impl<'a> PageTable<'a> {
    /// A page table from its three arrays, each `i32` or `i64`.
    pub fn new(
        indptr: impl Into<Index<'a>>,
        indices: impl Into<Index<'a>>,
        last_page_len: impl Into<Index<'a>>,
        page_size: usize,
    ) -> Self {
        Self {
            indptr: indptr.into(),
            indices: indices.into(),
            last_page_len: last_page_len.into(),
            page_size,
        }
    }

    /// Checks everything but the page ids' upper bound, which only the cache knows.
    pub(crate) fn resolve(&self, operator: &'static str) -> Result<Pages> {
        self.resolve_of(operator, "request")
    }

    /// [`PageTable::resolve`] of a table whose pages belong to an `owner` each: a request, or a group of a level.
    pub(crate) fn resolve_of(&self, operator: &'static str, owner: &str) -> Result<Pages> {
        crate::ensure!(self.page_size > 0, operator, "page_size = 0, expected at least 1");
        let num_requests = self.last_page_len.len();
        let ranges = self.indptr.ranges_of(operator, ("kv indptr", owner), num_requests)?;
        let owned = ranges.last().map_or(0, |r| r.end);
        crate::ensure!(
            owned == self.indices.len(),
            operator,
            "kv indptr ends at {owned}, but indices has {} pages",
            self.indices.len()
        );
        let indices = self.indices.to_i32(operator, "page")?;
        let max_page = indices.iter().copied().max().unwrap_or(-1);
        if let Some(at) = indices.iter().position(|&page| page < 0) {
            let request = ranges.iter().position(|r| r.contains(&at)).unwrap_or(0);
            let page = indices[at];
            return Err(crate::Error::new(operator, format!("{owner} {request}: page = {page} is negative")));
        }
        let kv_lens = ranges
            .iter()
            .enumerate()
            .map(|(r, pages)| self.kv_len(operator, (owner, r), pages))
            .collect::<Result<Vec<_>>>()?;
        Ok(Pages { ranges, kv_lens, indices, max_page })
    }

    fn kv_len(
        &self,
        operator: &'static str,
        (owner, r): (&str, usize),
        pages: &Range<usize>,
    ) -> Result<usize> {
        let (last, page_size) = (self.last_page_len.get(r), self.page_size);
        if pages.is_empty() {
            crate::ensure!(
                last == 0,
                operator,
                "{owner} {r}: last_page_len = {last}, expected 0 for a {owner} without pages"
            );
            return Ok(0);
        }
        let used = usize::try_from(last).ok().filter(|len| (1..=page_size).contains(len));
        let Some(used) = used else {
            let text = format!("{owner} {r}: last_page_len = {last} is not in 1..={page_size}");
            return Err(crate::Error::new(operator, text));
        };
        let len = (pages.len() - 1).checked_mul(page_size).and_then(|len| len.checked_add(used));
        len.ok_or_else(|| {
            let text = format!("{owner} {r}: {} pages of {page_size} tokens overflow", pages.len());
            crate::Error::new(operator, text)
        })
    }
}

/// A checked page table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pages {
    /// Per request, its part of `indices`.
    pub(crate) ranges: Vec<Range<usize>>,
    /// Per request, its number of cached tokens.
    pub(crate) kv_lens: Vec<usize>,
    /// Page ids, none negative.
    pub(crate) indices: Vec<i32>,
    /// The largest page id, -1 when there is none.
    pub(crate) max_page: i32,
}

/// The number of cached tokens of each request: `(pages - 1) * page_size + last_page_len`, 0 without pages.
///
/// # Errors
/// When the table is malformed, in the words of `attention.plan`.
pub fn get_seq_lens(table: &PageTable<'_>) -> Result<Vec<usize>> {
    Ok(table.resolve("kv.get_seq_lens")?.kv_lens)
}
