//! What changes every step: which query rows and which keys belong to which request.
//!
//! ```text
//! qo_indptr   0   1        5   6      request 0 has 1 query row (decode), request 1 has 4 (prefill), request 2 has 1
//! ```

use super::mask::PackedMask;
use crate::{
    Result,
    cpu::simd::indices,
    kv::{BlockSparse, PageList, PageTable, VariableBlockSparse},
};
use std::{ops::Range, sync::Arc};

/// Borrowed indices, `i32` or `i64`, or an array of them that may be shared; every value is checked before it is used.
#[derive(Debug, Clone, Copy)]
pub enum Index<'a> {
    /// 32-bit, as kernels take them.
    I32(&'a [i32]),
    /// 64-bit, as many frameworks keep them.
    I64(&'a [i64]),
    /// 32-bit, and a plan that needs them shares them instead of making a copy.
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

    /// Adds the entries to `to`; the largest of them, as if none were negative: with a negative one it is above `i32::MAX`.
    pub(crate) fn copy_i32(self, operator: &'static str, name: &str, to: &mut Vec<i32>) -> Result<u32> {
        let wide = match self {
            Self::I32(s) => return Ok(indices::copy_i32(s, to)),
            Self::Shared(s) => return Ok(indices::copy_i32(s, to)),
            Self::I64(s) => s,
        };
        let largest = indices::copy_i64(wide, to);
        if let Ok(largest) = u32::try_from(largest)
            && i32::try_from(largest).is_ok()
        {
            return Ok(largest);
        }
        match wide.iter().find(|&&value| i32::try_from(value).is_err()) {
            Some(value) => {
                Err(crate::Error::new(operator, format!("{name} = {value} does not fit in 32 bits")))
            }
            None => Ok(u32::MAX),
        }
    }

    /// [`Index::copy_i32`] into a list that holds none yet, or shares these from now on.
    pub(crate) fn keep_i32(self, operator: &'static str, name: &str, to: &mut PageList) -> Result<u32> {
        if let Self::Shared(shared) = self {
            to.share(shared);
            return Ok(indices::largest_i32(shared));
        }
        self.copy_i32(operator, name, to.own())
    }

    /// Reads the entries as the `count + 1` bounds of `count` neighbouring ranges, one for each request.
    pub(crate) fn ranges(
        &self,
        operator: &'static str,
        name: &str,
        count: usize,
    ) -> Result<Vec<Range<usize>>> {
        self.ranges_of(operator, (name, "request"), count)
    }

    /// [`Index::ranges`], one for each `owner`: a request, group, block row or segment.
    pub(crate) fn ranges_of(
        &self,
        operator: &'static str,
        (name, owner): (&str, &str),
        count: usize,
    ) -> Result<Vec<Range<usize>>> {
        self.check_ranges(operator, (name, owner), count)?;
        Ok((0..count).map(|r| self.range(r)).collect())
    }

    /// Checks that the entries are the `count + 1` bounds of `count` neighbouring ranges; where the last of them ends.
    pub(crate) fn check_ranges(
        &self,
        operator: &'static str,
        (name, owner): (&str, &str),
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
        if !self.ascends() {
            let falls = |r: &usize| self.get(*r) > self.get(*r + 1);
            let r = (0..count).find(falls).unwrap_or(0);
            let (begin, end) = (self.get(r), self.get(r + 1));
            let text = format!("{owner} {r}: {name} decreases from {begin} to {end}");
            return Err(crate::Error::new(operator, text));
        }
        Ok(self.get(count) as usize)
    }

    /// Whether no entry is below the one before it. Looks at all of them, as that can be done several at once.
    fn ascends(&self) -> bool {
        fn all<T: PartialOrd>(entries: &[T]) -> bool {
            let pairs = entries.iter().zip(entries.iter().skip(1));
            pairs.fold(true, |ascends, (one, next)| ascends & (one <= next))
        }
        match self {
            Self::I32(s) => all(s),
            Self::I64(s) => all(s),
            Self::Shared(s) => all(s),
        }
    }

    /// Range `r` of bounds that [`Index::check_ranges`] has checked.
    pub(crate) fn range(&self, r: usize) -> Range<usize> {
        self.get(r) as usize..self.get(r + 1) as usize
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
    /// Blocks of a tensor, for one request whose rows look at some of them.
    Blocks(BlockSparse<'a>),
    /// As [`KvTable::Blocks`], with blocks of any size, other ones for every KV head.
    VariableBlocks(VariableBlockSparse<'a>),
}

/// Keys that several neighbouring requests share: one level of a cascade.
#[derive(Debug, Clone, Copy)]
pub struct Level<'a> {
    /// `[num_groups + 1]`: group `g` is the requests that own query rows `qo_indptr[g]..qo_indptr[g + 1]`.
    pub qo_indptr: Index<'a>,
    /// The keys of each group, in pages of the batch's size that are full: `last_page_len` is the page size.
    pub table: PageTable<'a>,
}

/// Which part of longer requests a batch holds: the shard of one rank in context parallelism.
#[derive(Debug, Clone, Copy)]
pub struct Shard<'a> {
    /// `[num_requests]`: the position, in its request, of each one's first key here.
    pub kv_offsets: Index<'a>,
    /// `[num_requests]`: the keys of each request on all ranks together; its last query row stands at the last of them.
    pub kv_lens: Index<'a>,
}

/// One step's requests.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// `[num_requests + 1]`: request `r` owns query rows `qo_indptr[r]..qo_indptr[r + 1]`.
    pub(super) qo_indptr: Index<'a>,
    pub(super) kv: KvTable<'a>,
    pub(super) mask: Option<PackedMask<'a>>,
    pub(super) levels: Levels<'a>,
    pub(super) shard: Option<Shard<'a>>,
}

/// Where the levels of a cascade come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Levels<'a> {
    Given(&'a [Level<'a>]),
    Found,
}

/// The bounds of the one request of a block-sparse batch are in its blocks.
const NO_INDPTR: Index<'static> = Index::I32(&[]);

impl<'a> Batch<'a> {
    fn new(qo_indptr: Index<'a>, kv: KvTable<'a>) -> Self {
        Self { qo_indptr, kv, mask: None, levels: Levels::Given(&[]), shard: None }
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

    /// One request whose blocks of rows look at some blocks of a ragged tensor.
    pub fn block_sparse(blocks: BlockSparse<'a>) -> Self {
        Self::new(NO_INDPTR, KvTable::Blocks(blocks))
    }

    /// One request with blocks of any size, other ones for every KV head.
    pub fn variable_block_sparse(blocks: VariableBlockSparse<'a>) -> Self {
        Self::new(NO_INDPTR, KvTable::VariableBlocks(blocks))
    }

    /// Hides keys by packed bits as well as by the problem's mask: a key is seen if both show it.
    #[must_use]
    pub fn with_mask(mut self, mask: PackedMask<'a>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Puts levels of shared keys, the outermost first, before the keys of the page table: a request's keys are those of
    /// its group in every level, then its own, and its positions count through all of them.
    #[must_use]
    pub fn with_levels(mut self, levels: &'a [Level<'a>]) -> Self {
        self.levels = Levels::Given(levels);
        self
    }

    /// Looks for pages that neighbouring requests have in common at their beginnings, and reads each run of them once for
    /// all its requests where that is estimated to be cheaper; [`super::Plan::explain`] tells what was decided.
    /// Nested prefixes give nested levels. Results do not change but in rounding.
    #[must_use]
    pub fn with_shared_prefixes(mut self) -> Self {
        self.levels = Levels::Found;
        self
    }

    /// Says that the keys here are only part of longer requests, so that causal masks, windows and variants know true
    /// positions; the states of all parts are then put together by [`super::merge_states`].
    #[must_use]
    pub fn with_shard(mut self, shard: Shard<'a>) -> Self {
        self.shard = Some(shard);
        self
    }

    pub(super) fn finds_levels(&self) -> bool {
        matches!(self.levels, Levels::Found)
    }
}
