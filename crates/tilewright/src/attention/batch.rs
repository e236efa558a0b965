//! A batch: the query rows and keys of each request in one step.
//!
//! ```text
//! qo_indptr   0   1        5   6      request 0 has 1 query row (decode), request 1 has 4 (prefill), request 2 has 1
//! ```

use super::mask::PackedMask;
use crate::{
    Result,
    kv::{BlockSparse, PageList, PageTable, VariableBlockSparse},
    tensor::{copy_i32, copy_i64, largest_i32},
};
use std::{ops::Range, sync::Arc};

/// Borrowed indices, `i32` or `i64`, or a shareable array. Every value is checked before use.
#[derive(Debug, Clone, Copy)]
pub enum Index<'a> {
    /// 32-bit, the format of the kernels.
    I32(&'a [i32]),
    /// 64-bit, the format of many frameworks.
    I64(&'a [i64]),
    /// 32-bit and shared: a plan keeps a reference instead of a copy.
    Shared(&'a Arc<Vec<i32>>),
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

impl<'a> From<&'a Arc<Vec<i32>>> for Index<'a> {
    fn from(shared: &'a Arc<Vec<i32>>) -> Self {
        Self::Shared(shared)
    }
}

impl Index<'_> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::I32(s) => s.len(),
            Self::I64(s) => s.len(),
            Self::Shared(s) => s.len(),
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
            Self::Shared(s) => i64::from(s[at]),
        }
    }

    /// The entries as `i32`.
    pub(crate) fn to_i32(self, operator: &'static str, name: &str) -> Result<Vec<i32>> {
        let mut entries = Vec::new();
        self.copy_i32(operator, name, &mut entries)?;
        Ok(entries)
    }

    /// Appends the entries to `to` and returns their maximum as `u32`, so that negative entries compare above
    /// `i32::MAX`.
    pub(crate) fn copy_i32(self, operator: &'static str, name: &str, to: &mut Vec<i32>) -> Result<u32> {
        let entries = match self {
            Self::I32(s) => return Ok(copy_i32(s, to)),
            Self::Shared(s) => return Ok(copy_i32(s, to)),
            Self::I64(s) => s,
        };
        let largest = copy_i64(entries, to);
        if let Ok(largest) = u32::try_from(largest)
            && i32::try_from(largest).is_ok()
        {
            return Ok(largest);
        }
        match entries.iter().find(|&&value| i32::try_from(value).is_err()) {
            Some(value) => {
                Err(crate::Error::new(operator, format!("{name} = {value} does not fit in 32 bits")))
            }
            None => Ok(u32::MAX),
        }
    }

    /// [`Index::copy_i32`] into an empty list; a shared array is referenced, not copied.
    pub(crate) fn copy_or_share_i32(
        self,
        operator: &'static str,
        name: &str,
        to: &mut PageList,
    ) -> Result<u32> {
        if let Self::Shared(shared) = self {
            to.share(shared);
            return Ok(largest_i32(shared));
        }
        self.copy_i32(operator, name, to.own())
    }

    /// Reads the entries as the `count + 1` bounds of `count` adjacent ranges, one per request.
    pub(crate) fn ranges(
        &self,
        operator: &'static str,
        name: &str,
        count: usize,
    ) -> Result<Vec<Range<usize>>> {
        self.ranges_of(operator, name, "request", count)
    }

    /// [`Index::ranges`], one per `owner`: a request, group, block row or segment.
    pub(crate) fn ranges_of(
        &self,
        operator: &'static str,
        name: &str,
        owner: &str,
        count: usize,
    ) -> Result<Vec<Range<usize>>> {
        self.check_ranges(operator, name, owner, count)?;
        Ok((0..count).map(|r| self.range(r)).collect())
    }

    /// Checks that the entries are the `count + 1` bounds of `count` adjacent ranges. Returns the end of the last one.
    pub(crate) fn check_ranges(
        &self,
        operator: &'static str,
        name: &str,
        owner: &str,
        count: usize,
    ) -> Result<usize> {
        crate::ensure!(
            self.len() == count + 1,
            operator,
            "{name} has {} entries, expected num_{}s + 1 = {}",
            self.len(),
            owner.replace(' ', "_"),
            count + 1
        );
        crate::ensure!(self.get(0) == 0, operator, "{name} starts at {}, expected 0", self.get(0));
        if !self.never_decreases() {
            let decreases = |r: &usize| self.get(*r) > self.get(*r + 1);
            let r = (0..count).find(decreases).unwrap_or(0);
            let (begin, end) = (self.get(r), self.get(r + 1));
            let text = format!("{owner} {r}: {name} decreases from {begin} to {end}");
            return Err(crate::Error::new(operator, text));
        }
        Ok(self.get(count) as usize)
    }

    /// Whether the entries never decrease. Without early exit, so that the loop vectorizes.
    fn never_decreases(&self) -> bool {
        fn is_sorted<T: PartialOrd>(entries: &[T]) -> bool {
            let pairs = entries.iter().zip(entries.iter().skip(1));
            pairs.fold(true, |sorted, (one, next)| sorted & (one <= next))
        }
        match self {
            Self::I32(s) => is_sorted(s),
            Self::I64(s) => is_sorted(s),
            Self::Shared(s) => is_sorted(s),
        }
    }

    /// Range `r` of bounds checked by [`Index::check_ranges`].
    pub(crate) fn range(&self, r: usize) -> Range<usize> {
        self.get(r) as usize..self.get(r + 1) as usize
    }
}

/// KV storage of a batch.
#[derive(Debug, Clone, Copy)]
pub enum KvTable<'a> {
    /// Pages of a pool.
    Paged(PageTable<'a>),
    /// Concatenated requests in one tensor: request `r` owns tokens `indptr[r]..indptr[r + 1]`.
    Ragged {
        /// `[num_requests + 1]`
        indptr: Index<'a>,
    },
    /// One request whose rows attend to some blocks of a tensor.
    Blocks(BlockSparse<'a>),
    /// As [`KvTable::Blocks`], with variable block sizes per KV head.
    VariableBlocks(VariableBlockSparse<'a>),
}

/// One cascade level: keys shared by adjacent requests.
#[derive(Debug, Clone, Copy)]
pub struct Level<'a> {
    /// `[num_groups + 1]`: group `g` is the requests of query rows `qo_indptr[g]..qo_indptr[g + 1]`.
    pub qo_indptr: Index<'a>,
    /// The keys of each group. All pages have the batch's page size and are full: `last_page_len` is the page size.
    pub table: PageTable<'a>,
}

/// The shard of one rank in context parallelism: a part of each request's keys.
#[derive(Debug, Clone, Copy)]
pub struct Shard<'a> {
    /// `[num_requests]`: the position of each request's first key on this rank.
    pub kv_offsets: Index<'a>,
    /// `[num_requests]`: keys of each request over all ranks. The last query row has the position of the last key.
    pub kv_lens: Index<'a>,
}

/// The requests of one step.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// `[num_requests + 1]`: request `r` owns query rows `qo_indptr[r]..qo_indptr[r + 1]`.
    pub(super) qo_indptr: Index<'a>,
    pub(super) kv: KvTable<'a>,
    pub(super) mask: Option<PackedMask<'a>>,
    pub(super) levels: Levels<'a>,
    pub(super) shard: Option<Shard<'a>>,
}

/// Source of cascade levels.
#[derive(Debug, Clone, Copy)]
pub(super) enum Levels<'a> {
    Explicit(&'a [Level<'a>]),
    Detected,
}

/// Block-sparse batches hold one request, whose bounds are in its blocks.
const NO_INDPTR: Index<'static> = Index::I32(&[]);

impl<'a> Batch<'a> {
    fn new(qo_indptr: Index<'a>, kv: KvTable<'a>) -> Self {
        Self { qo_indptr, kv, mask: None, levels: Levels::Explicit(&[]), shard: None }
    }

    /// Queries over a paged cache. `qo_indptr`: `[num_requests + 1]`, request `r` owns query rows
    /// `qo_indptr[r]..qo_indptr[r + 1]`.
    pub fn paged(qo_indptr: impl Into<Index<'a>>, table: PageTable<'a>) -> Self {
        Self::new(qo_indptr.into(), KvTable::Paged(table))
    }

    /// Queries over ragged keys and values.
    pub fn ragged(qo_indptr: impl Into<Index<'a>>, kv_indptr: impl Into<Index<'a>>) -> Self {
        Self::new(qo_indptr.into(), KvTable::Ragged { indptr: kv_indptr.into() })
    }

    /// One request whose block rows attend to some blocks of a ragged tensor.
    pub fn block_sparse(blocks: BlockSparse<'a>) -> Self {
        Self::new(NO_INDPTR, KvTable::Blocks(blocks))
    }

    /// One request with variable block sizes per KV head.
    pub fn variable_block_sparse(blocks: VariableBlockSparse<'a>) -> Self {
        Self::new(NO_INDPTR, KvTable::VariableBlocks(blocks))
    }

    /// Adds a packed mask: a key is visible if both this mask and the problem's show it.
    #[must_use]
    pub fn with_mask(mut self, mask: PackedMask<'a>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds levels of shared keys, outermost first, before the keys of the page table. A request's keys are those of
    /// its group in every level, then its own; positions count through all of them.
    #[must_use]
    pub fn with_levels(mut self, levels: &'a [Level<'a>]) -> Self {
        self.levels = Levels::Explicit(levels);
        self
    }

    /// Detects page prefixes shared by adjacent requests. A prefix becomes a level, read once for all its requests, if
    /// its estimated cost is lower; [`super::Plan::explain`] reports the decisions. Nested prefixes give nested levels.
    /// Results change only in rounding.
    #[must_use]
    pub fn with_shared_prefixes(mut self) -> Self {
        self.levels = Levels::Detected;
        self
    }

    /// Declares that the keys are a shard of longer requests, so that masks, windows and variants use true positions.
    /// Combine the states of all shards with [`super::merge_states`].
    #[must_use]
    pub fn with_shard(mut self, shard: Shard<'a>) -> Self {
        self.shard = Some(shard);
        self
    }

    pub(super) fn detects_levels(&self) -> bool {
        matches!(self.levels, Levels::Detected)
    }
}
