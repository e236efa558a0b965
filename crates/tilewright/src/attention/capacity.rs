//! Fixed-capacity plans: batch limits, and the array sizes that suffice for every batch within them.
//!
//! A plan of fixed capacity is rewritten in place. Its arrays and workspace never move or grow, so captured CUDA graphs
//! stay valid. The bounds follow from the cutting of units; with `t` query tokens per tile and `w` workers:
//!
//! | | balanced | fixed split |
//! |---|---|---|
//! | items | units + w: each worker's quota ends inside at most one unit | units · pieces of the longest request |
//! | partial rows | 2 (w - 1) items of t tokens: each cut leaves at most two pieces | those of all items |
//!
//! Rows with levels have one more partial state per level.

use super::{
    plan::Plan,
    problem::Problem,
    requests::{KvSource, Requests},
    schedule::{Schedule, Split, Tiling, tile_tokens},
};
use crate::{Error, Result};

/// Batch limits of a plan of fixed capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Requests per batch.
    pub requests: usize,
    /// Query rows per batch. Tensors of a run may have exactly this many rows, independent of the batch.
    pub rows: usize,
    /// Query rows per request.
    pub qo_len: usize,
    /// Keys per request; in a cascade, per segment.
    pub kv_len: usize,
    /// Page indices, including those of levels; blocks of a block-sparse batch; unused for a ragged one.
    pub pages: usize,
    /// Cascade levels.
    pub levels: usize,
    /// Bytes of packed masks.
    pub mask_bytes: usize,
}

impl Capacity {
    /// Capacity without levels and masks. A single request may have all rows and all keys.
    pub fn new(requests: usize, rows: usize, pages: usize) -> Self {
        let kv_len = i32::MAX as usize;
        Self { requests, rows, qo_len: rows, kv_len, pages, levels: 0, mask_bytes: 0 }
    }

    /// Capacity of decode batches: one query row per request.
    pub fn decode(requests: usize, pages: usize) -> Self {
        Self { qo_len: 1, ..Self::new(requests, requests, pages) }
    }

    /// Limits the keys per request, which reduces the workspace for a fixed split.
    #[must_use]
    pub fn with_kv_len(self, kv_len: usize) -> Self {
        Self { kv_len, ..self }
    }

    /// Adds capacity for cascade levels, explicit or detected.
    #[must_use]
    pub fn with_levels(self, levels: usize) -> Self {
        Self { levels, ..self }
    }
}

/// Sizes of a plan's arrays: exact for one batch, or upper bounds for a capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArraySizes {
    /// Requests.
    pub requests: usize,
    /// Page indices, or blocks.
    pub pages: usize,
    /// Bytes of packed masks.
    pub mask_bytes: usize,
    /// Work items.
    pub items: usize,
    /// Merges.
    pub merges: usize,
    /// Sources of merges.
    pub sources: usize,
    /// Partial rows of the workspace.
    pub partial_rows: usize,
}

impl ArraySizes {
    /// The exact sizes of a plan.
    pub(super) fn of(plan: &Plan) -> Self {
        let (requests, schedule) = (&plan.requests, &plan.schedule);
        Self {
            requests: requests.requests.len(),
            pages: requests.source.num_indices(),
            mask_bytes: requests.mask.len(),
            items: schedule.items.len(),
            merges: schedule.merges.len(),
            sources: schedule.sources.len(),
            partial_rows: schedule.partial_rows,
        }
    }
}

/// A capacity resolved for one problem, device and KV storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FixedCapacity {
    pub(crate) capacity: Capacity,
    pub(crate) sizes: ArraySizes,
    kind: KvKind,
}

/// KV storage parameters that are launch arguments of a captured graph, so they must not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KvKind {
    Paged { page_size: usize },
    Ragged,
    Blocks { block: usize },
}

impl KvKind {
    fn of(source: &KvSource) -> Self {
        match *source {
            KvSource::Paged { page_size, .. } => Self::Paged { page_size },
            KvSource::Ragged { .. } => Self::Ragged,
            KvSource::Blocks { block, .. } => Self::Blocks { block },
        }
    }

    fn describe(self) -> String {
        match self {
            Self::Paged { page_size } => format!("keys in pages of {page_size}"),
            Self::Ragged => "ragged keys".to_owned(),
            Self::Blocks { block } => format!("sparse blocks of {block} keys"),
        }
    }
}

impl FixedCapacity {
    /// Upper bounds for batches with the KV storage of `requests`.
    pub(crate) fn new(
        capacity: Capacity,
        problem: &Problem,
        tiling: &Tiling,
        split: Split,
        requests: &Requests,
    ) -> Self {
        let kind = KvKind::of(&requests.source);
        let bounds = CapacityBounds::new(capacity, problem, tiling, kind);
        Self { capacity, sizes: bounds.array_sizes(split), kind }
    }

    /// Checks a batch before scheduling.
    pub(crate) fn check_batch(&self, operator: &'static str, batch: &Requests) -> Result<()> {
        let (capacity, kind) = (&self.capacity, KvKind::of(&batch.source));
        crate::ensure!(
            kind == self.kind,
            operator,
            "the batch has {}, the plan is for {}",
            kind.describe(),
            self.kind.describe()
        );
        let mut begin = 0;
        let qo_lens =
            batch.requests.iter().map(|request| request.end - std::mem::replace(&mut begin, request.end));
        let qo_len = qo_lens.max().unwrap_or(0);
        let kv_len = batch.segments.iter().map(|segment| segment.kv_len).max().unwrap_or(0);
        let shared = batch.segments.len().saturating_sub(batch.requests.len());
        let counts = [
            ("requests", batch.requests.len(), capacity.requests),
            ("query rows", batch.num_rows(), capacity.rows),
            ("query rows in one request", qo_len, capacity.qo_len),
            ("keys in one request", kv_len, capacity.kv_len),
            ("pages", batch.source.num_indices(), capacity.pages),
            ("bytes of masks", batch.mask.len(), capacity.mask_bytes),
        ];
        check(operator, &counts)?;
        let limit = capacity.levels.saturating_mul(capacity.requests);
        crate::ensure!(
            shared <= limit || kind.is_blocks(),
            operator,
            "the batch has {shared} shared segments, the capacity is {limit}: {} levels",
            capacity.levels
        );
        Ok(())
    }

    /// Checks a schedule; only detected levels and blocks can exceed the bounds.
    pub(crate) fn check_schedule(&self, operator: &'static str, schedule: &Schedule) -> Result<()> {
        let sizes = &self.sizes;
        let counts = [
            ("work items", schedule.items.len(), sizes.items),
            ("merges", schedule.merges.len(), sizes.merges),
            ("states to merge", schedule.sources.len(), sizes.sources),
            ("partial rows", schedule.partial_rows, sizes.partial_rows),
        ];
        check(operator, &counts)
    }
}

impl KvKind {
    fn is_blocks(self) -> bool {
        matches!(self, Self::Blocks { .. })
    }
}

/// Rejects the first count above its limit.
fn check(operator: &'static str, counts: &[(&str, usize, usize)]) -> Result<()> {
    match counts.iter().find(|(_, count, limit)| count > limit) {
        Some((what, count, limit)) => {
            Err(Error::new(operator, format!("the batch has {count} {what}, the capacity is {limit}")))
        }
        None => Ok(()),
    }
}

/// Derives array sizes from a capacity. Counts saturate; excessive sizes are rejected later.
struct CapacityBounds {
    capacity: Capacity,
    workers: usize,
    kv_tokens: usize,
    kv_heads: usize,
    group: usize,
    /// KV heads per item.
    item_heads: usize,
    /// Rows per item, query tokens times heads.
    item_rows: usize,
    /// Query tokens per tile.
    tile: usize,
    /// Maximum segments per level, and segments per row.
    segments: usize,
    depth: usize,
    /// Total keys of all segments.
    tokens: usize,
}

impl CapacityBounds {
    fn new(capacity: Capacity, problem: &Problem, tiling: &Tiling, kind: KvKind) -> Self {
        let Capacity { requests, rows, qo_len, kv_len, pages, levels, .. } = capacity;
        let (group, kv_heads) = (problem.heads().group(), problem.heads().kv);
        let depth = levels.saturating_add(1);
        // block rows and request groups may span all rows
        let segments = if kind.is_blocks() { rows } else { requests };
        let longest = if kind.is_blocks() || depth > 1 { rows } else { qo_len };
        let tile = tile_tokens(problem, tiling).min(longest.max(1));
        let item_heads = tiling.kv_heads.clamp(1, kv_heads);
        let max_tokens = segments.saturating_mul(depth).saturating_mul(kv_len);
        let tokens = match kind {
            KvKind::Paged { page_size: tokens } | KvKind::Blocks { block: tokens } => {
                pages.saturating_mul(tokens).min(max_tokens)
            }
            KvKind::Ragged => max_tokens,
        };
        Self {
            capacity: Capacity { qo_len: longest, ..capacity },
            workers: tiling.workers,
            kv_tokens: tiling.kv_tokens,
            kv_heads,
            group,
            item_heads,
            item_rows: tiling.q_rows.max(group * tile).min(item_heads * group * tile),
            tile,
            segments,
            depth,
            tokens,
        }
    }

    /// Query tiles of all segments.
    fn tiles(&self) -> usize {
        let rows = self.capacity.rows;
        rows.min((rows / self.tile).saturating_add(self.segments)).saturating_mul(self.depth)
    }

    /// Pieces of `tokens` keys of all tiles for one head; bounded by the longest request and by the total of keys.
    fn pieces(&self, tokens: usize) -> usize {
        let longest = self.capacity.kv_len.min(self.tokens).div_ceil(tokens).max(1);
        let total_pieces = (self.tokens / tokens).saturating_add(self.segments.saturating_mul(self.depth));
        let tiles = self.capacity.qo_len.div_ceil(self.tile);
        self.tiles().saturating_mul(longest).min(total_pieces.saturating_mul(tiles))
    }

    fn array_sizes(&self, split: Split) -> ArraySizes {
        let Capacity { requests, rows, kv_len, pages, mask_bytes, .. } = self.capacity;
        let units = self.tiles().saturating_mul(self.kv_heads);
        // items added by cuts, and rows and heads of each
        let (added, added_rows, added_heads) = match split {
            Split::Balanced => (self.workers.saturating_sub(1), self.item_rows, self.item_heads),
            Split::Fixed { tokens } if tokens < kv_len => {
                let tokens = tokens.div_ceil(self.kv_tokens).saturating_mul(self.kv_tokens).max(1);
                let pieces = self.pieces(tokens).saturating_mul(self.kv_heads);
                (pieces.saturating_sub(1), self.group * self.tile, 1)
            }
            Split::Fixed { .. } | Split::Never => (0, 0, 0),
        };
        let items = match split {
            Split::Balanced => units.saturating_add(added),
            _ => units.max(added.saturating_add(1)),
        };
        // a unit of p pieces has p - 1 added by cuts, so partial items are at most twice the cuts
        let cut = added.saturating_mul(2).min(items.saturating_mul(added.min(1)));
        let mut sizes = ArraySizes {
            requests,
            pages,
            mask_bytes,
            items,
            merges: added.min(units),
            sources: cut,
            partial_rows: cut.saturating_mul(added_rows),
        };
        if self.depth > 1 {
            // plus every row of every level; a merge may begin at every row
            let states = rows.saturating_mul(self.depth).saturating_mul(self.kv_heads);
            let rows_added = added.saturating_mul(added_rows);
            sizes.partial_rows = states.saturating_mul(self.group).saturating_add(rows_added);
            sizes.merges = rows.saturating_mul(self.kv_heads);
            sizes.sources = states.saturating_add(added.saturating_mul(self.tile * added_heads));
        }
        sizes
    }
}
