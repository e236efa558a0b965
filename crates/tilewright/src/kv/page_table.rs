//! The page table: the pages of each request, in CSR format.
//!
//! ```text
//! indptr         0     2        5     request 0 owns indices[0..2], request 1 owns indices[2..5]
//! indices        7  3  0  4  1        page ids in the pool
//! last_page_len     1        2        tokens used in each request's last page, in 1..=page_size
//! ```
//!
//! A request without pages has no tokens, and its `last_page_len` is 0. Slots from `last_page_len` on may hold garbage
//! and are never read.

use super::{PageIndices, PageList};
use crate::{Result, attention::Index, tensor::DeviceAddress};
use std::ops::Range;

/// The pages of each request's keys and values.
#[derive(Debug, Clone, Copy)]
pub struct PageTable<'a> {
    /// `[num_requests + 1]`, starts at 0, never decreases.
    pub indptr: Index<'a>,
    /// `[indptr[num_requests]]`, page ids; on a device there may be more. A batch takes either, other functions those on
    /// the host.
    pub indices: PageIndices<'a>,
    /// `[num_requests]`
    pub last_page_len: Index<'a>,
    /// Tokens per page, at least 1.
    pub page_size: usize,
}

impl<'a> PageTable<'a> {
    /// Builds a page table from its three arrays, each `i32` or `i64`; `indices` may be on a device. A plan copies `indices`,
    /// unless they are an `&Arc<Vec<i32>>`, which it shares; the copy dominates planning time with very many pages. The next
    /// plan or replan drops the reference, so a caller can alternate two arrays without copies.
    pub fn new(
        indptr: impl Into<Index<'a>>,
        indices: impl Into<PageIndices<'a>>,
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

    /// Checks everything except the upper bound of page ids, which depends on the cache.
    pub(crate) fn resolve(&self, operator: &'static str) -> Result<CheckedPageTable> {
        let checked = self.resolve_of(operator, "request")?;
        checked.indices.check_on_host(operator, "")?;
        Ok(checked)
    }

    /// [`PageTable::resolve`] of a table with one page list per `owner`: a request, or a group of a level. Pages may be on a device.
    pub(crate) fn resolve_of(&self, operator: &'static str, owner: &str) -> Result<CheckedPageTable> {
        let num_requests = self.check_bounds(operator, owner)?;
        let mut indices = PageList::default();
        let max_page = self.collect_pages(operator, owner, &mut indices)?;
        let ranges = (0..num_requests).map(|r| self.indptr.range(r)).collect();
        let kv_lens =
            (0..num_requests).map(|r| self.kv_len(operator, owner, r)).collect::<Result<Vec<_>>>()?;
        Ok(CheckedPageTable { ranges, kv_lens, indices, max_page })
    }

    /// Checks everything except pages and `last_page_len`. Returns the number of owners.
    pub(crate) fn check_bounds(&self, operator: &'static str, owner: &str) -> Result<usize> {
        crate::ensure!(self.page_size > 0, operator, "page_size = 0, expected at least 1");
        let num_requests = self.last_page_len.len();
        let owned = self.indptr.check_ranges(operator, "kv indptr", owner, num_requests)?;
        let spare = matches!(self.indices, PageIndices::Device(_));
        crate::ensure!(
            owned == self.indices.len() || (spare && owned < self.indices.len()),
            operator,
            "kv indptr ends at {owned}, but indices has {} pages",
            self.indices.len()
        );
        Ok(num_requests)
    }

    /// Checks the pages and writes them to the empty list `to`, which copies or shares them. Returns the maximum page
    /// id, -1 if there is none or they are on a device.
    pub(crate) fn collect_pages(
        &self,
        operator: &'static str,
        owner: &str,
        to: &mut PageList,
    ) -> Result<i32> {
        let indices = match self.indices {
            PageIndices::Host(indices) => indices,
            PageIndices::Device(indices) => {
                let len = self.indptr.get(self.last_page_len.len()) as usize;
                indices.device().into_iter().for_each(|at| to.set_device(DeviceAddress { len, ..at }));
                return Ok(-1);
            }
        };
        let largest = indices.copy_or_share_i32(operator, "page", to)?;
        if self.indices.is_empty() {
            return Ok(-1);
        }
        i32::try_from(largest).map_err(|_| {
            let at = to.iter().position(|&page| page < 0).unwrap_or(0);
            let ranges = |r: &usize| self.indptr.range(*r).contains(&at);
            let request = (0..self.last_page_len.len()).find(ranges).unwrap_or(0);
            let page = to[at];
            crate::Error::new(operator, format!("{owner} {request}: page = {page} is negative"))
        })
    }

    /// Number of tokens of owner `r`.
    #[inline]
    pub(crate) fn kv_len(&self, operator: &'static str, owner: &str, r: usize) -> Result<usize> {
        self.kv_len_of(operator, owner, r, self.indptr.range(r).len())
    }

    /// [`PageTable::kv_len`] of an owner with `pages` pages.
    #[inline]
    pub(crate) fn kv_len_of(
        &self,
        operator: &'static str,
        owner: &str,
        r: usize,
        pages: usize,
    ) -> Result<usize> {
        let (last, page_size) = (self.last_page_len.get(r), self.page_size);
        // values below 1 wrap to above any page size
        let fits = pages > 0 && (last as u64).wrapping_sub(1) < page_size as u64;
        let before = pages.wrapping_sub(1).checked_mul(page_size).filter(|_| fits);
        match before.and_then(|before| before.checked_add(last as usize)) {
            Some(len) => Ok(len),
            None if pages == 0 && last == 0 => Ok(0),
            None => Err(self.malformed(operator, owner, r)),
        }
    }

    /// The error for owner `r`, whose length is invalid.
    #[cold]
    fn malformed(&self, operator: &'static str, owner: &str, r: usize) -> crate::Error {
        let (pages, last, page_size) =
            (self.indptr.range(r).len(), self.last_page_len.get(r), self.page_size);
        let text = if pages == 0 {
            format!("{owner} {r}: last_page_len = {last}, expected 0 for a {owner} without pages")
        } else if usize::try_from(last).is_ok_and(|last| (1..=page_size).contains(&last)) {
            format!("{owner} {r}: {pages} pages of {page_size} tokens overflow")
        } else {
            format!("{owner} {r}: last_page_len = {last} is not in 1..={page_size}")
        };
        crate::Error::new(operator, text)
    }
}

/// A validated page table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CheckedPageTable {
    /// Range in `indices` per request.
    pub(crate) ranges: Vec<Range<usize>>,
    /// Number of cached tokens per request.
    pub(crate) kv_lens: Vec<usize>,
    /// Page ids, on the host none negative.
    pub(crate) indices: PageList,
    /// The maximum page id, -1 if there is none on the host.
    pub(crate) max_page: i32,
}

/// The number of cached tokens of each request: `(pages - 1) * page_size + last_page_len`, 0 without pages.
///
/// # Errors
/// When the table is malformed, with the errors of `attention.plan`.
pub fn get_seq_lens(table: &PageTable<'_>) -> Result<Vec<usize>> {
    Ok(table.resolve("kv.get_seq_lens")?.kv_lens)
}
