//! What changes every step: which query rows and which keys belong to which request.
//!
//! ```text
//! qo_indptr   0   1        5   6      request 0 has 1 query row (decode), request 1 has 4 (prefill), request 2 has 1
//! ```

use super::problem::{Mask, Problem};
use crate::{Result, kv::PageTable};
use std::ops::Range;

/// Borrowed indices, `i32` or `i64`; every value is checked before it is used.
#[derive(Debug, Clone, Copy)]
pub enum Index<'a> {
    /// 32-bit, as kernels take them.
    I32(&'a [i32]),
    /// 64-bit, as many frameworks keep them.
    I64(&'a [i64]),
}

macro_rules! index_from {
    ($($T:ty, $Variant:ident);+) => {$(
        impl<'a> From<&'a [$T]> for Index<'a> {
            fn from(slice: &'a [$T]) -> Self { Self::$Variant(slice) }
        }
        impl<'a> From<&'a Vec<$T>> for Index<'a> {
            fn from(vec: &'a Vec<$T>) -> Self { Self::$Variant(vec) }
        }
        impl<'a, const N: usize> From<&'a [$T; N]> for Index<'a> {
            fn from(array: &'a [$T; N]) -> Self { Self::$Variant(array) }
        }
    )+};
}
index_from!(i32, I32; i64, I64);

impl Index<'_> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::I32(s) => s.len(),
            Self::I64(s) => s.len(),
        }
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entry `at`.
    pub(crate) fn get(&self, at: usize) -> i64 {
        match self {
            Self::I32(s) => i64::from(s[at]),
            Self::I64(s) => s[at],
        }
    }

    /// The entries as `i32`.
    pub(crate) fn to_i32(self, operator: &'static str, name: &str) -> Result<Vec<i32>> {
        match self {
            Self::I32(s) => Ok(s.to_vec()),
            Self::I64(s) => s
                .iter()
                .map(|&value| {
                    let error =
                        || crate::Error::new(operator, format!("{name} = {value} does not fit in 32 bits"));
                    i32::try_from(value).map_err(|_| error())
                })
                .collect(),
        }
    }

    /// Reads the entries as the `count + 1` bounds of `count` neighbouring ranges.
    pub(crate) fn ranges(
        &self,
        operator: &'static str,
        name: &str,
        count: usize,
    ) -> Result<Vec<Range<usize>>> {
        crate::ensure!(
            self.len() == count + 1,
            operator,
            "{name} has {} entries, expected num_requests + 1 = {}",
            self.len(),
            count + 1
        );
        crate::ensure!(self.get(0) == 0, operator, "{name} starts at {}, expected 0", self.get(0));
        let range = |r: usize| {
            let (begin, end) = (self.get(r), self.get(r + 1));
            crate::ensure!(begin <= end, operator, "request {r}: {name} decreases from {begin} to {end}");
            Ok(begin as usize..end as usize)
        };
        (0..count).map(range).collect()
    }
}

/// Where the keys and values of a batch are.
#[derive(Debug, Clone, Copy)]
pub enum KvTable<'a> {
    /// In pages of a pool.
    Paged(PageTable<'a>),
    /// One request after the other in a tensor: request `r` owns tokens `indptr[r]..indptr[r + 1]`.
    Ragged {
        /// `[num_requests + 1]`
        indptr: Index<'a>,
    },
}

/// One step's requests.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// `[num_requests + 1]`: request `r` owns query rows `qo_indptr[r]..qo_indptr[r + 1]`.
    pub qo_indptr: Index<'a>,
    /// Where its keys are.
    pub kv: KvTable<'a>,
}

impl<'a> Batch<'a> {
    /// Queries over a paged cache.
    pub fn paged(qo_indptr: impl Into<Index<'a>>, table: PageTable<'a>) -> Self {
        Self { qo_indptr: qo_indptr.into(), kv: KvTable::Paged(table) }
    }

    /// Queries over ragged keys and values.
    pub fn ragged(qo_indptr: impl Into<Index<'a>>, kv_indptr: impl Into<Index<'a>>) -> Self {
        Self { qo_indptr: qo_indptr.into(), kv: KvTable::Ragged { indptr: kv_indptr.into() } }
    }

    /// Checks everything about the batch and puts it into the form that schedules and kernels read.
    pub(crate) fn resolve(&self, operator: &'static str) -> Result<Requests> {
        let count = self.qo_indptr.len().saturating_sub(1);
        let qo = self.qo_indptr.ranges(operator, "qo_indptr", count)?;
        let (kv, source) = match self.kv {
            KvTable::Paged(table) => {
                let pages = table.resolve(operator)?;
                let kv = pages.ranges.iter().map(|r| r.start).zip(pages.kv_lens).collect::<Vec<_>>();
                let (indices, page_size) = (pages.indices, table.page_size);
                (kv, KvSource::Paged { indices, page_size, max_page: pages.max_page })
            }
            KvTable::Ragged { indptr } => {
                let tokens = indptr.ranges(operator, "kv_indptr", count)?;
                let total = tokens.last().map_or(0, |r| r.end);
                (tokens.iter().map(|r| (r.start, r.len())).collect(), KvSource::Ragged { tokens: total })
            }
        };
        crate::ensure!(
            kv.len() == count,
            operator,
            "the page table has {} requests, qo_indptr has {count}",
            kv.len()
        );
        let total = qo.last().map_or(0, |r| r.end);
        let longest = kv.iter().map(|&(_, len)| len).max().unwrap_or(0);
        crate::ensure!(
            total.max(longest) <= i32::MAX as usize,
            operator,
            "{total} query rows and a longest request of {longest} tokens, the most is {}",
            i32::MAX
        );
        let requests = qo.into_iter().zip(kv);
        let requests = requests.map(|(qo, (kv_start, kv_len))| Request { qo, kv_start, kv_len }).collect();
        Ok(Requests { requests, source })
    }
}

/// A checked batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Requests {
    pub(crate) requests: Vec<Request>,
    pub(crate) source: KvSource,
}

/// One request of a checked batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// Its query rows.
    pub(crate) qo: Range<usize>,
    /// Its first entry of the page indices (paged) or its first token (ragged).
    pub(crate) kv_start: usize,
    /// Its number of keys.
    pub(crate) kv_len: usize,
}

/// How positions of a request become places in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KvSource {
    Paged { indices: Vec<i32>, page_size: usize, max_page: i32 },
    Ragged { tokens: usize },
}

impl Request {
    /// How many keys, counted from the first, query row `row` (of the whole batch) sees.
    pub(crate) fn visible(&self, problem: &Problem, row: usize) -> usize {
        match problem.mask() {
            Mask::Full => self.kv_len,
            Mask::Causal => (self.kv_len + row + 1).saturating_sub(self.qo.end),
        }
    }
}

impl Requests {
    /// Total query rows.
    pub(crate) fn num_rows(&self) -> usize {
        self.requests.last().map_or(0, |r| r.qo.end)
    }
}
