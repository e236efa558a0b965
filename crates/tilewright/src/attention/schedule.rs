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
//! 2. In a batch of equal units, the quota is raised to a number of units if that costs a worker less than a cut. Units of
//!    several quotas are cut into equal pieces, one per worker, on the same condition.
//! 3. With [`Split::Fixed`] units are cut at multiples of a length instead, and with [`Split::Never`] not at all:
//!    then a request's arithmetic does not depend on its neighbours, bit for bit.
//! 4. Units of segments of many rows are [runs](Schedule::runs) if the device has a kernel for them ([`ManyRows`]).
//! 5. A unit that was cut, or whose rows have keys in other segments too (cascade levels), writes partial states to the
//!    workspace; a [`Merge`] names them.

mod cut;
mod levels;
mod runs;
mod units;

pub(super) use runs::workers_of;
pub(crate) use units::Scratch;

use super::{
    capacity::ArraySizes,
    problem::Problem,
    requests::{Requests, Segment},
};
use crate::{Dtype, Result};
use std::{fmt, ops::Range};

/// Maximum number of work items of a schedule: bounds the size of the item list and keeps indices well within 32 bits.
pub(super) const MAX_ITEMS: usize = 1 << 24;

/// The work granularity and cost model of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Maximum rows of one item, query tokens times query heads. An item has at least one token of one KV head.
    pub q_rows: usize,
    /// Maximum KV heads of one item. The CPU fills the row limit with heads, because the heads of a token are adjacent
    /// in memory; a CTA takes one.
    pub kv_heads: usize,
    /// Keys per KV tile; items begin at multiples of it.
    pub kv_tokens: usize,
    /// Fixed cost of an item (loading Q, writing O) in KV tiles, at least 1: an empty segment still costs work.
    pub segment_overhead: usize,
    /// Cost of a cut for the workers on its sides (partial states and their merge), in KV tiles.
    pub cut_overhead: usize,
    /// Cost of loading a KV tile of one head, in query tokens. It dominates with one token and is negligible with many.
    pub tile_load: usize,
    /// Work items in flight at once: CTAs on a GPU, bins of items for CPU threads.
    pub workers: usize,
    /// Equal shares of the cost of a fixed split: an item of several KV heads costs at most one, rounded up to whole heads, so that
    /// heads occupy all threads.
    pub shares: usize,
    /// Scratch of all workers, in f32 elements.
    pub scratch: usize,
    /// Dtype to which softmax weights may be rounded before `P · V` (see `Attention::weights_dtype`); their sums stay
    /// f32. Matrix units take operands no wider than the values.
    pub weights: Dtype,
    /// A separate kernel for segments of many query rows. Plans of fixed capacity do not use it.
    pub many_rows: Option<ManyRows>,
}

/// The work granularity of a kernel for segments of many query rows, whose items are [`Schedule::runs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ManyRows {
    /// Minimum rows of a segment, query tokens times query heads of a group.
    pub min_rows: usize,
    /// Maximum rows of one item, at least those of a token; an item has one KV head.
    pub q_rows: usize,
    /// Keys per KV tile.
    pub kv_tokens: usize,
    /// Items in flight at once.
    pub workers: usize,
    /// Keys of one KV head whose keys and values stay in the device's cache together.
    pub resident_keys: usize,
    /// Minimum KV tiles per run, on average, from which two workers execute each run of twice the rows together, in batches without
    /// other items. They read keys and values from the device's cache once. `usize::MAX` if the device cannot.
    pub pair_tiles: usize,
    /// Cost of a level of shared keys, whose launch precedes that of the other keys, in KV tiles of one row per worker of these.
    pub level_overhead: usize,
}

impl ManyRows {
    /// Whether a segment of `rows` query tokens has many rows.
    pub(crate) fn contains(&self, group: usize, rows: usize) -> bool {
        rows.saturating_mul(group) >= self.min_rows
    }
}

impl Tiling {
    /// The cost of an item, in query tokens times KV tiles.
    pub fn cost(&self, kv_heads: usize, qo_len: usize, kv_len: usize) -> usize {
        self.cost_per_tile(kv_heads, qo_len) * (self.segment_overhead + kv_len.div_ceil(self.kv_tokens))
    }

    /// The formula of [`Tiling::cost`], for people.
    pub fn cost_formula(&self) -> String {
        let Self { kv_tokens, segment_overhead, tile_load, .. } = self;
        format!(
            "cost: (KV tiles of {kv_tokens} keys + {segment_overhead}) × (query rows + {tile_load}) × KV heads"
        )
    }

    pub(super) fn cost_per_tile(&self, kv_heads: usize, qo_len: usize) -> usize {
        kv_heads * (self.tile_load + qo_len)
    }
}

/// The KV split policy: whether and where the keys of a row may be divided among workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Split {
    /// At any KV tile, to balance the workers.
    #[default]
    Balanced,
    /// At multiples of `tokens`, rounded up to full KV tiles: batch invariant.
    Fixed {
        /// Keys per piece.
        tokens: usize,
    },
    /// No split: batch invariant.
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

/// One work item: a tile of query rows against a range of keys, for some KV heads and their query heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkItem {
    /// The segment of the keys. Cascade levels (outermost first) come before the requests; in block-sparse attention,
    /// segments are block rows.
    pub segment: u32,
    /// KV heads; each has query heads `kv_head * group..(kv_head + 1) * group`.
    pub kv_heads: Range<u32>,
    /// Query rows, as indices in the batch.
    pub qo: Range<u32>,
    /// Keys, relative to the segment's first, before the mask.
    pub kv: Range<u32>,
    /// First partial row of this item (order `[kv_heads, qo, group]`); `None` if it writes the output directly.
    pub partial: Option<u32>,
}

impl WorkItem {
    /// The partial row of a query row and head, if the item writes partial states.
    pub fn partial_row(&self, kv_head: u32, row: u32, group: usize, in_group: usize) -> Option<usize> {
        let head = (kv_head - self.kv_heads.start) as usize;
        let row = head * self.qo.len() + (row - self.qo.start) as usize;
        Some(self.partial? as usize + row * group + in_group)
    }
}

/// A merge of partial states into output rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// The KV heads.
    pub kv_heads: Range<u32>,
    /// Query rows, as indices in the batch.
    pub qo: Range<u32>,
    /// Range in [`Schedule::sources`].
    pub sources: Range<u32>,
}

/// The work of one step, grouped by worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Schedule {
    /// All items, in worker order; then [`Schedule::runs`].
    pub items: Vec<WorkItem>,
    /// `[workers + 1]`: worker `w` executes `items[worker_indptr[w]..worker_indptr[w + 1]]`.
    pub worker_indptr: Vec<u32>,
    /// Merges to perform after their source items.
    pub merges: Vec<Merge>,
    /// Source items of merges, ordered by key.
    pub sources: Vec<u32>,
    /// Partial rows in the workspace.
    pub partial_rows: usize,
    /// Whether two workers execute each run together: [`ManyRows::pair_tiles`].
    pub has_paired_runs: bool,
}

/// Inputs of a schedule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScheduleInputs<'a> {
    pub(crate) operator: &'static str,
    pub(crate) problem: &'a Problem,
    pub(crate) requests: &'a Requests,
    pub(crate) tiling: &'a Tiling,
    pub(crate) split: Split,
}

impl ScheduleInputs<'_> {
    /// Whether the units of a segment are runs.
    fn has_many_rows(&self, segment: &Segment) -> bool {
        let many = &self.tiling.many_rows;
        many.is_some_and(|many| many.contains(self.problem.heads().group(), segment.qo.len()))
    }
}

impl Schedule {
    /// Rewrites the schedule for `inputs`, reusing its memory.
    ///
    /// # Errors
    /// When there are more than 16,777,216 items, or partial rows exceed 32 bits.
    pub(crate) fn rewrite(&mut self, inputs: &ScheduleInputs<'_>, scratch: &mut Scratch) -> Result<()> {
        self.clear();
        let mut has_levels = cut::cut(self, inputs, scratch)?;
        self.close(inputs.tiling.workers);
        if let Some(many) = &inputs.tiling.many_rows {
            has_levels |= runs::append(self, inputs, many)?;
        }
        if has_levels {
            levels::merge(inputs.operator, self, &inputs.requests.segments)?;
        }
        crate::ensure!(
            u32::try_from(self.partial_rows).is_ok(),
            inputs.operator,
            "{} partial rows, the most is {}: longer pieces or fewer levels are needed",
            self.partial_rows,
            u32::MAX
        );
        Ok(())
    }

    /// Reserves memory for every schedule within a capacity.
    pub(crate) fn reserve(&mut self, workers: usize, sizes: &ArraySizes) {
        self.items.reserve(sizes.items);
        self.worker_indptr.reserve(workers + 1);
        self.merges.reserve(sizes.merges);
        self.sources.reserve(sizes.sources);
    }

    /// Clears the schedule; keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.items.clear();
        self.worker_indptr.clear();
        self.worker_indptr.push(0);
        self.merges.clear();
        self.sources.clear();
        self.partial_rows = 0;
        self.has_paired_runs = false;
    }

    /// Assigns all further items to `worker` or a later one.
    #[inline]
    fn advance_to(&mut self, worker: usize) {
        while self.worker_indptr.len() <= worker {
            self.worker_indptr.push(self.items.len() as u32);
        }
    }

    /// Adds an item. With `partial_rows_per_token`, it writes partial states.
    #[inline]
    fn push(&mut self, mut item: WorkItem, partial_rows_per_token: Option<usize>) {
        if let Some(per_token) = partial_rows_per_token {
            item.partial = Some(self.partial_rows as u32);
            self.partial_rows += item.kv_heads.len() * item.qo.len() * per_token;
        }
        self.items.push(item);
    }

    /// Adds the merge of the items from `first_item` on, if there are several.
    fn merge_since(&mut self, first_item: u32, kv_heads: Range<u32>, qo: Range<u32>) {
        let end = self.items.len() as u32;
        if end - first_item > 1 {
            let first_source = self.sources.len() as u32;
            self.sources.extend(first_item..end);
            self.merges.push(Merge { kv_heads, qo, sources: first_source..self.sources.len() as u32 });
        }
    }

    /// Ends the item ranges of all workers.
    pub(super) fn close(&mut self, workers: usize) {
        self.advance_to(workers);
    }

    /// Items of worker `w`.
    pub fn worker(&self, w: usize) -> &[WorkItem] {
        &self.items[self.worker_indptr[w] as usize..self.worker_indptr[w + 1] as usize]
    }

    /// Items of segments of many rows, in the order in which idle CTAs draw them.
    pub fn runs(&self) -> &[WorkItem] {
        &self.items[self.worker_indptr[self.num_workers()] as usize..]
    }

    /// The items of the workers, without the runs.
    pub fn items_of_workers(&self) -> &[WorkItem] {
        &self.items[..self.worker_indptr[self.num_workers()] as usize]
    }

    /// The sources that arrive at a merge, of which the last one performs it. None does if rows have both runs and other items: a
    /// launch after both performs the merge.
    pub fn arrivals(&self, merge: &Merge) -> &[u32] {
        let sources = &self.sources[merge.sources.start as usize..merge.sources.end as usize];
        // sources are in the order of items, and runs are the last items
        match sources.partition_point(|&item| item < self.worker_indptr[self.num_workers()]) {
            others if 0 < others && others < sources.len() => &[],
            _ => sources,
        }
    }

    /// Number of workers.
    pub fn num_workers(&self) -> usize {
        self.worker_indptr.len() - 1
    }
}

/// Query tokens per tile.
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
