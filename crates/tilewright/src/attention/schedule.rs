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

use super::{
    problem::Problem,
    requests::{Requests, Segment},
};
use crate::{Dtype, Result};
use std::{fmt, ops::Range};

/// The most work items of a schedule: above it, the list of them is a burden of its own, and indices into it are far
/// from their 32 bits.
const MAX_ITEMS: usize = 1 << 24;

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
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// A tile of query rows of one segment and some KV heads with all the keys it sees, before any cut.
struct Unit {
    segment: u32,
    kv_heads: Range<u32>,
    qo: Range<u32>,
    kv: Range<usize>,
    /// Whether its rows have other segments too.
    shared: bool,
}

impl Unit {
    /// The KV tiles that hold its keys.
    fn span(&self, tiling: &Tiling) -> Range<usize> {
        self.kv.start / tiling.kv_tokens..self.kv.end.div_ceil(tiling.kv_tokens)
    }

    fn tiles(&self, tiling: &Tiling) -> usize {
        if self.kv.is_empty() { 0 } else { self.span(tiling).len() }
    }

    fn cost_per_tile(&self, tiling: &Tiling) -> usize {
        tiling.cost_per_tile(self.kv_heads.len(), self.qo.len())
    }
}

impl Schedule {
    /// Cuts `requests` for `problem` as `tiling` and `split` say.
    ///
    /// # Errors
    /// When there would be more than 16,777,216 items, or partial rows beyond 32 bits.
    pub(crate) fn new(problem: &Problem, requests: &Requests, tiling: &Tiling, split: Split) -> Result<Self> {
        let tokens = tile_tokens(problem, tiling);
        let tiles = |segment: &Segment| segment.qo.len().div_ceil(tokens) * segment.kv_heads.len();
        check_items(requests.segments.iter().map(tiles).sum())?;
        let units = units(problem, requests, tiling, split);
        let schedule = match split {
            Split::Balanced => balanced(problem, &units, tiling),
            Split::Fixed { tokens } => {
                fixed(problem, &units, tiling, tokens.div_ceil(tiling.kv_tokens).max(1))
            }
            Split::Never => fixed(problem, &units, tiling, NEVER),
        }?;
        crate::ensure!(
            u32::try_from(schedule.partial_rows).is_ok(),
            "attention.plan",
            "{} partial rows, the most is {}: longer pieces or fewer levels are needed",
            schedule.partial_rows,
            u32::MAX
        );
        Ok(schedule)
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

fn check_items(items: usize) -> Result<()> {
    crate::ensure!(
        items <= MAX_ITEMS,
        "attention.plan",
        "{items} work items, the most is {MAX_ITEMS}: fewer query rows or longer pieces are needed"
    );
    Ok(())
}

fn units(problem: &Problem, requests: &Requests, tiling: &Tiling, split: Split) -> Vec<Unit> {
    let (group, tile) = (problem.heads().group(), tile_tokens(problem, tiling));
    let tiles = |segment: &Segment| segment.qo.len().div_ceil(tile);
    // keys that are not divided leave only heads to keep all workers busy
    let most = match split {
        Split::Balanced => tiling.kv_heads,
        _ => {
            let one_head = requests.segments.iter().map(|s| s.kv_heads.len() * tiles(s)).sum::<usize>();
            tiling.kv_heads.min(one_head.div_ceil(tiling.workers))
        }
    };
    let mut units = Vec::with_capacity(requests.segments.iter().map(tiles).sum());
    for (number, segment) in requests.segments.iter().enumerate() {
        let rows = group * segment.qo.len().clamp(1, tile);
        let heads = (tiling.q_rows / rows).clamp(1, most.max(1));
        let begins = segment.qo.clone().step_by(tile);
        let spans: Vec<_> = begins
            .map(|begin| begin..(begin + tile).min(segment.qo.end))
            .map(|qo| (qo.start as u32..qo.end as u32, requests.visible(problem, number, qo)))
            .collect();
        for first in segment.kv_heads.clone().step_by(heads) {
            let kv_heads = first as u32..segment.kv_heads.end.min(first + heads) as u32;
            let unit = |(qo, kv): &(Range<u32>, Range<usize>)| Unit {
                segment: number as u32,
                kv_heads: kv_heads.clone(),
                qo: qo.clone(),
                kv: kv.clone(),
                shared: segment.shared,
            };
            units.extend(spans.iter().map(unit));
        }
    }
    units
}

/// The most states that merges of levels may name: each takes 4 bytes of the plan.
const MAX_SOURCES: usize = 1 << 26;
/// A piece, in KV tiles, that no request is longer than.
const NEVER: usize = 1 << 40;

/// Collects pieces in worker order.
struct Builder {
    schedule: Schedule,
    group: usize,
    kv_tokens: usize,
}

impl Builder {
    fn new(problem: &Problem, tiling: &Tiling, capacity: usize) -> Self {
        let schedule = Schedule {
            items: Vec::with_capacity(capacity),
            worker_indptr: vec![0],
            merges: Vec::new(),
            sources: Vec::new(),
            partial_rows: 0,
        };
        Self { schedule, group: problem.heads().group(), kv_tokens: tiling.kv_tokens }
    }

    /// Adds one unit's pieces: `(worker, tiles)` in order, covering all its tiles.
    fn push(&mut self, unit: &Unit, pieces: impl Iterator<Item = (usize, Range<usize>)> + Clone) {
        let split = pieces.clone().nth(1).is_some();
        let first_item = self.schedule.items.len() as u32;
        for (worker, tiles) in pieces {
            let partial = (split || unit.shared).then_some(self.schedule.partial_rows as u32);
            if partial.is_some() {
                self.schedule.partial_rows += unit.kv_heads.len() * unit.qo.len() * self.group;
            }
            self.advance_to(worker);
            let begin = (tiles.start * self.kv_tokens).min(unit.kv.end);
            let end = tiles.end.saturating_mul(self.kv_tokens).min(unit.kv.end);
            self.schedule.items.push(WorkItem {
                segment: unit.segment,
                kv_heads: unit.kv_heads.clone(),
                qo: unit.qo.clone(),
                kv: begin as u32..end as u32,
                partial,
            });
        }
        if split && !unit.shared {
            let first_source = self.schedule.sources.len() as u32;
            self.schedule.sources.extend(first_item..self.schedule.items.len() as u32);
            let sources = first_source..self.schedule.sources.len() as u32;
            let (kv_heads, qo) = (unit.kv_heads.clone(), unit.qo.clone());
            self.schedule.merges.push(Merge { kv_heads, qo, sources });
        }
    }

    fn advance_to(&mut self, worker: usize) {
        while self.schedule.worker_indptr.len() <= worker {
            self.schedule.worker_indptr.push(self.schedule.items.len() as u32);
        }
    }

    fn finish(mut self, workers: usize, units: &[Unit]) -> Result<Schedule> {
        self.advance_to(workers);
        if units.iter().any(|unit| unit.shared) {
            self.merge_levels(units)?;
        }
        Ok(self.schedule)
    }

    /// Merges rows whose keys lie in several segments. Units of different segments have other rows and heads, so merges are
    /// cut wherever any of them begins or ends.
    fn merge_levels(&mut self, units: &[Unit]) -> Result<()> {
        let shared: Vec<bool> = {
            let segments = units.iter().map(|unit| unit.segment as usize + 1).max().unwrap_or(0);
            let mut shared = vec![false; segments];
            units.iter().for_each(|unit| shared[unit.segment as usize] = unit.shared);
            shared
        };
        let items = &self.schedule.items;
        let mut starting: Vec<u32> = (0..items.len() as u32).collect();
        starting.retain(|&at| shared[items[at as usize].segment as usize]);
        let row_cuts = cuts(starting.iter().map(|&at| &items[at as usize].qo));
        starting.sort_by_key(|&at| items[at as usize].qo.start);
        let mut starting = starting.into_iter().peekable();
        let mut active: Vec<u32> = Vec::new();
        for rows in row_cuts.windows(2) {
            active.retain(|&at| items[at as usize].qo.end > rows[0]);
            while let Some(at) = starting.next_if(|&at| items[at as usize].qo.start == rows[0]) {
                active.push(at);
            }
            let sources = self.schedule.sources.len() + active.len();
            crate::ensure!(
                sources <= MAX_SOURCES,
                "attention.plan",
                "at least {sources} states to merge, the most is {MAX_SOURCES}: longer pieces are needed"
            );
            active.sort_unstable(); // earlier items hold earlier keys
            let head_cuts = cuts(active.iter().map(|&at| &items[at as usize].kv_heads));
            for heads in head_cuts.windows(2) {
                let first_source = self.schedule.sources.len() as u32;
                let of_heads = |at: &&u32| items[**at as usize].kv_heads.contains(&heads[0]);
                self.schedule.sources.extend(active.iter().filter(of_heads));
                let sources = first_source..self.schedule.sources.len() as u32;
                let (kv_heads, qo) = (heads[0]..heads[1], rows[0]..rows[1]);
                self.schedule.merges.push(Merge { kv_heads, qo, sources });
            }
        }
        Ok(())
    }
}

/// All bounds of `ranges`, ascending.
fn cuts<'a>(ranges: impl Iterator<Item = &'a Range<u32>>) -> Vec<u32> {
    let mut cuts: Vec<u32> = ranges.flat_map(|range| [range.start, range.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// Equal cost for every worker; units are cut where a worker's share ends.
fn balanced(problem: &Problem, units: &[Unit], tiling: &Tiling) -> Result<Schedule> {
    let overhead = tiling.segment_overhead;
    let cost = |unit: &Unit| unit.cost_per_tile(tiling) * (overhead + unit.tiles(tiling));
    let quota = units.iter().map(cost).sum::<usize>().div_ceil(tiling.workers).max(1);

    let mut builder = Builder::new(problem, tiling, units.len() + tiling.workers);
    let mut begin = 0;
    for unit in units {
        let (tile_cost, tiles) = (unit.cost_per_tile(tiling), unit.tiles(tiling));
        // The tile at which the cost `at` of the whole batch falls inside this unit.
        let cut = |at: usize| match (at.saturating_sub(begin) / tile_cost).saturating_sub(overhead).min(tiles)
        {
            tile if tile < overhead => 0,
            tile if tiles - tile < overhead => tiles,
            tile => tile,
        };
        let end = begin + cost(unit);
        let workers = begin / quota..end.div_ceil(quota);
        let last = workers.end - 1;
        let first = unit.span(tiling).start;
        let pieces =
            workers.map(|w| (w, cut(w * quota)..if w == last { tiles } else { cut((w + 1) * quota) }));
        if tiles == 0 {
            builder.push(unit, std::iter::once((begin / quota, first..first)));
        } else {
            let pieces = pieces.filter(|(_, tiles)| !tiles.is_empty());
            builder.push(unit, pieces.map(|(w, tiles)| (w, first + tiles.start..first + tiles.end)));
        }
        begin = end;
    }
    builder.finish(tiling.workers, units)
}

/// Pieces of `piece` KV tiles counted from each segment's first key; workers take whole pieces.
fn fixed(problem: &Problem, units: &[Unit], tiling: &Tiling, piece: usize) -> Result<Schedule> {
    let overhead = tiling.segment_overhead;
    let span = |unit: &Unit| {
        let tiles = unit.span(tiling);
        tiles.start / piece..tiles.end.div_ceil(piece).max(tiles.start / piece + 1)
    };
    let pieces_of = |unit: &Unit| if unit.kv.is_empty() { 1 } else { span(unit).len() };
    let cost = |unit: &Unit| unit.cost_per_tile(tiling) * (overhead * pieces_of(unit) + unit.tiles(tiling));
    let quota = units.iter().map(cost).sum::<usize>().div_ceil(tiling.workers).max(1);
    check_items(units.iter().map(pieces_of).sum())?;

    let mut builder = Builder::new(problem, tiling, units.len());
    let mut begin = 0;
    for unit in units {
        let (tile_cost, all) = (unit.cost_per_tile(tiling), unit.span(tiling));
        let first = all.start / piece;
        let pieces = (0..pieces_of(unit)).map(|i| {
            let worker = (begin + i.saturating_mul(tile_cost * (overhead + piece))) / quota;
            let tiles = (first + i).saturating_mul(piece)..(first + i + 1).saturating_mul(piece);
            (
                worker.min(tiling.workers - 1),
                tiles.start.max(all.start)..tiles.end.min(all.end).max(all.start),
            )
        });
        builder.push(unit, pieces);
        begin += cost(unit);
    }
    builder.finish(tiling.workers, units)
}
