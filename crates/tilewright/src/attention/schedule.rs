//! The planner: cuts a batch into work items that fill the device, and says how split rows are put together
//! again. Pure host code: no device, no clock, no randomness; equal batches give equal schedules.
//!
//! The simple algorithm:
//!
//! ```text
//! units  = for each segment, each group of KV heads, each tile of query rows: the keys that the tile sees
//! cost   = heads * (tile_load + query tokens) * (segment_overhead + KV tiles)         (see Tiling)
//! quota  = total cost / workers
//! worker w takes the costs  w * quota .. (w + 1) * quota  of all units laid end to end
//! ```
//!
//! How the real code departs from it:
//!
//! 1. A cut inside a unit falls on a KV tile, and not so near to an end that the piece would cost less than its
//!    own overhead; each cut depends only on the prefix sum of costs, so every piece is found on its own.
//! 2. With [`Split::Fixed`] units are cut at multiples of a length instead, and with [`Split::Never`] not at all:
//!    then a request's arithmetic does not depend on its neighbours, bit for bit.
//! 3. A unit that was cut, or whose rows have keys in other segments too (cascade levels), writes partial states to the
//!    workspace; a [`Merge`] names them.

mod cut;
mod levels;

pub(crate) use cut::Scratch;

use super::{capacity::Room, problem::Problem, requests::Requests};
use crate::{Dtype, Result};
use std::{fmt, ops::Range};

/// The most work items of a schedule: above it, the list of them is a burden of its own, and indices into it are far
/// from their 32 bits.
pub(super) const MAX_ITEMS: usize = 1 << 24;

/// How a backend wants work to be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Rows of one item: query tokens times query heads. At least one token of one KV head is taken in any case.
    pub q_rows: usize,
    /// The most KV heads of one item. A CPU takes as many as it has rows for, since the heads of a token lie side by
    /// side in memory; a CTA takes one.
    pub kv_heads: usize,
    /// Keys of one KV tile; items begin at multiples of it.
    pub kv_tokens: usize,
    /// What an item costs beside its KV tiles (loading Q, writing O), in KV tiles, at least 1: a segment is never
    /// free.
    pub segment_overhead: usize,
    /// What bringing a KV tile of one head to the arithmetic costs, in query tokens: with one token that is most of
    /// it, with many next to nothing.
    pub tile_load: usize,
    /// Work items in flight at once: CTAs on a GPU, bins of work for the threads of a CPU.
    pub workers: usize,
    /// Scratch of all workers together, in f32 elements.
    pub scratch: usize,
    /// What softmax weights may be rounded to before they weigh values (see `Attention::weights_dtype`); their sums are not
    /// rounded. Matrix units multiply nothing wider than the values.
    pub weights: Dtype,
}

impl Tiling {
    /// What an item with so many KV heads, query tokens and keys costs, in query tokens times KV tiles.
    pub fn cost(&self, kv_heads: usize, qo_len: usize, kv_len: usize) -> usize {
        self.cost_per_tile(kv_heads, qo_len) * (self.segment_overhead + kv_len.div_ceil(self.kv_tokens))
    }

    fn cost_per_tile(&self, kv_heads: usize, qo_len: usize) -> usize {
        kv_heads * (self.tile_load + qo_len)
    }
}

/// Whether and where the keys of a row may be divided among workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Split {
    /// Wherever it balances the workers.
    #[default]
    Balanced,
    /// At multiples of `tokens` (rounded up to whole KV tiles): batch invariant.
    Fixed {
        /// Keys of a piece.
        tokens: usize,
    },
    /// Nowhere: batch invariant.
    Never,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Balanced => f.write_str("balanced"),
            Self::Fixed { tokens } => write!(f, "every {tokens} keys"),
            Self::Never => f.write_str("never"),
        }
    }
}

/// One unit of device work: some query rows against a range of keys, for some KV heads and their groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkItem {
    /// The segment whose keys are read. Segments are the requests, after those of cascade levels (the outermost first);
    /// in block-sparse attention, the blocks of rows.
    pub segment: u32,
    /// The KV heads; query heads `kv_head * group..(kv_head + 1) * group` belong to each.
    pub kv_heads: Range<u32>,
    /// Query rows, counted over the whole batch.
    pub qo: Range<u32>,
    /// Keys, counted from the segment's first, before the mask.
    pub kv: Range<u32>,
    /// The first of this item's partial rows (ordered `[kv_heads, qo, group]`), or `None` to write the output itself.
    pub partial: Option<u32>,
}

impl WorkItem {
    /// The partial row of a query row and head, if the item writes any.
    pub fn partial_row(&self, kv_head: u32, row: u32, group: usize, in_group: usize) -> Option<usize> {
        let head = (kv_head - self.kv_heads.start) as usize;
        let row = head * self.qo.len() + (row - self.qo.start) as usize;
        Some(self.partial? as usize + row * group + in_group)
    }
}

/// The states to merge into some output rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// The KV heads.
    pub kv_heads: Range<u32>,
    /// Query rows, counted over the whole batch.
    pub qo: Range<u32>,
    /// Which of [`Schedule::sources`].
    pub sources: Range<u32>,
}

/// The work of one step, worker by worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Schedule {
    /// All items, in worker order.
    pub items: Vec<WorkItem>,
    /// `[workers + 1]`: worker `w` executes `items[worker_indptr[w]..worker_indptr[w + 1]]`.
    pub worker_indptr: Vec<u32>,
    /// What to merge when all items are done.
    pub merges: Vec<Merge>,
    /// The items whose partial states merges name, those of earlier keys first.
    pub sources: Vec<u32>,
    /// Partial rows that the workspace must hold.
    pub partial_rows: usize,
}

/// What is to be cut, for whom, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) operator: &'static str,
    pub(crate) problem: &'a Problem,
    pub(crate) requests: &'a Requests,
    pub(crate) tiling: &'a Tiling,
    pub(crate) split: Split,
}

impl Schedule {
    /// Cuts `requests` for `problem` as `tiling` and `split` say. What the schedule held goes, its memory serves again.
    ///
    /// # Errors
    /// When there would be more than 16,777,216 items, or partial rows beyond 32 bits.
    pub(crate) fn rewrite(&mut self, asked: &Asked<'_>, scratch: &mut Scratch) -> Result<()> {
        self.clear();
        let has_levels = cut::cut(self, asked, scratch)?;
        self.close(asked.tiling.workers);
        if has_levels {
            levels::merge(asked.operator, self, &asked.requests.segments)?;
        }
        crate::ensure!(
            u32::try_from(self.partial_rows).is_ok(),
            asked.operator,
            "{} partial rows, the most is {}: longer pieces or fewer levels are needed",
            self.partial_rows,
            u32::MAX
        );
        Ok(())
    }

    /// Makes room, so that no schedule of a capacity allocates.
    pub(crate) fn reserve(&mut self, workers: usize, room: &Room) {
        self.items.reserve(room.items);
        self.worker_indptr.reserve(workers + 1);
        self.merges.reserve(room.merges);
        self.sources.reserve(room.sources);
    }

    /// Forgets everything but its memory.
    pub(crate) fn clear(&mut self) {
        self.items.clear();
        self.worker_indptr.clear();
        self.worker_indptr.push(0);
        self.merges.clear();
        self.sources.clear();
        self.partial_rows = 0;
    }

    /// Lets the items from here on belong to `worker`, unless they already belong to a later one.
    #[inline]
    fn advance_to(&mut self, worker: usize) {
        while self.worker_indptr.len() <= worker {
            self.worker_indptr.push(self.items.len() as u32);
        }
    }

    /// Ends the last of `workers`.
    pub(super) fn close(&mut self, workers: usize) {
        self.advance_to(workers);
    }

    /// The items of worker `w`.
    pub fn worker(&self, w: usize) -> &[WorkItem] {
        &self.items[self.worker_indptr[w] as usize..self.worker_indptr[w + 1] as usize]
    }

    /// Number of workers.
    pub fn num_workers(&self) -> usize {
        self.worker_indptr.len() - 1
    }
}

/// Query tokens of one tile.
pub(super) fn tile_tokens(problem: &Problem, tiling: &Tiling) -> usize {
    (tiling.q_rows / problem.heads().group()).max(1)
}

fn check_items(operator: &'static str, items: usize) -> Result<()> {
    crate::ensure!(
        items <= MAX_ITEMS,
        operator,
        "{items} work items, the most is {MAX_ITEMS}: fewer query rows or longer pieces are needed"
    );
    Ok(())
}
