//! The planner: cuts a batch into work items that fill the device, and says how split rows are put together
//! again. Pure host code: no device, no clock, no randomness; equal batches give equal schedules.
//!
//! The simple algorithm:
//!
//! ```text
//! units  = for each request, each group of KV heads, each tile of query rows: the keys that the tile sees
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
//! 3. A unit that was cut writes partial states to the workspace; a [`Merge`] names them.

use super::{batch::Requests, problem::Problem};
use crate::Result;
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
    /// The request whose keys are read.
    pub request: u32,
    /// The KV heads; query heads `kv_head * group..(kv_head + 1) * group` belong to each.
    pub kv_heads: Range<u32>,
    /// Query rows, counted over the whole batch.
    pub qo: Range<u32>,
    /// Keys, counted from the request's first, before the mask.
    pub kv: Range<u32>,
    /// The first of this item's partial rows (ordered `[kv_heads, qo, group]`), or `None` to write the output itself.
    pub partial: Option<u32>,
}

/// A split unit: the states to merge into output rows.
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
    /// First partial rows of the states that merges name.
    pub sources: Vec<u32>,
    /// Partial rows that the workspace must hold.
    pub partial_rows: usize,
}

/// A tile of query rows of one request and some KV heads with all the keys it sees, before any cut.
struct Unit {
    request: u32,
    kv_heads: Range<u32>,
    qo: Range<u32>,
    kv_len: usize,
}

impl Unit {
    fn tiles(&self, tiling: &Tiling) -> usize {
        self.kv_len.div_ceil(tiling.kv_tokens)
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
        let tiles = requests.requests.iter().map(|request| request.qo.len().div_ceil(tokens));
        check_items(tiles.sum::<usize>() * problem.heads().kv)?;
        let units = units(problem, requests, tiling, split);
        match split {
            Split::Balanced => Ok(balanced(problem, &units, tiling)),
            Split::Fixed { tokens } => {
                fixed(problem, &units, tiling, tokens.div_ceil(tiling.kv_tokens).max(1))
            }
            Split::Never => fixed(problem, &units, tiling, NEVER),
        }
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
fn tile_tokens(problem: &Problem, tiling: &Tiling) -> usize {
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
    let (group, num_kv_heads) = (problem.heads().group(), problem.heads().kv);
    let tile = tile_tokens(problem, tiling);
    let tiles = requests.requests.iter().map(|request| request.qo.len().div_ceil(tile)).sum::<usize>();
    // keys that are not divided leave only heads to keep all workers busy
    let most = match split {
        Split::Balanced => tiling.kv_heads,
        _ => tiling.kv_heads.min((num_kv_heads * tiles).div_ceil(tiling.workers)),
    };
    let mut units = Vec::with_capacity(tiles);
    for (r, request) in requests.requests.iter().enumerate() {
        let rows = group * request.qo.len().clamp(1, tile);
        let heads = (tiling.q_rows / rows).clamp(1, most.max(1));
        for first in (0..num_kv_heads).step_by(heads) {
            let kv_heads = first as u32..num_kv_heads.min(first + heads) as u32;
            for begin in request.qo.clone().step_by(tile) {
                let end = (begin + tile).min(request.qo.end);
                units.push(Unit {
                    request: r as u32,
                    kv_heads: kv_heads.clone(),
                    qo: begin as u32..end as u32,
                    kv_len: request.visible(problem, end - 1),
                });
            }
        }
    }
    units
}

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
        let first_source = self.schedule.sources.len() as u32;
        for (worker, tiles) in pieces {
            let partial = split.then_some(self.schedule.partial_rows as u32);
            if let Some(first_row) = partial {
                self.schedule.sources.push(first_row);
                self.schedule.partial_rows += unit.kv_heads.len() * unit.qo.len() * self.group;
            }
            self.advance_to(worker);
            let kv =
                tiles.start * self.kv_tokens..(tiles.end.saturating_mul(self.kv_tokens)).min(unit.kv_len);
            self.schedule.items.push(WorkItem {
                request: unit.request,
                kv_heads: unit.kv_heads.clone(),
                qo: unit.qo.clone(),
                kv: kv.start as u32..kv.end as u32,
                partial,
            });
        }
        if split {
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

    fn finish(mut self, workers: usize) -> Schedule {
        self.advance_to(workers);
        self.schedule
    }
}

/// Equal cost for every worker; units are cut where a worker's share ends.
fn balanced(problem: &Problem, units: &[Unit], tiling: &Tiling) -> Schedule {
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
        let pieces =
            workers.map(|w| (w, cut(w * quota)..if w == last { tiles } else { cut((w + 1) * quota) }));
        if tiles == 0 {
            builder.push(unit, std::iter::once((begin / quota, 0..0)));
        } else {
            builder.push(unit, pieces.filter(|(_, tiles)| !tiles.is_empty()));
        }
        begin = end;
    }
    builder.finish(tiling.workers)
}

/// Pieces of `piece` KV tiles counted from each request's first key; workers take whole pieces.
fn fixed(problem: &Problem, units: &[Unit], tiling: &Tiling, piece: usize) -> Result<Schedule> {
    let overhead = tiling.segment_overhead;
    let pieces_of = |unit: &Unit| unit.tiles(tiling).div_ceil(piece).max(1);
    let cost = |unit: &Unit| unit.cost_per_tile(tiling) * (overhead * pieces_of(unit) + unit.tiles(tiling));
    let quota = units.iter().map(cost).sum::<usize>().div_ceil(tiling.workers).max(1);
    check_items(units.iter().map(pieces_of).sum())?;
    let split = units.iter().filter(|unit| pieces_of(unit) > 1);
    let partial_rows: usize = split
        .map(|unit| pieces_of(unit) * unit.kv_heads.len() * unit.qo.len() * problem.heads().group())
        .sum();
    crate::ensure!(
        u32::try_from(partial_rows).is_ok(),
        "attention.plan",
        "{partial_rows} partial rows, the most is {}: longer pieces are needed",
        u32::MAX
    );

    let mut builder = Builder::new(problem, tiling, units.len());
    let mut begin = 0;
    for unit in units {
        let (tile_cost, tiles) = (unit.cost_per_tile(tiling), unit.tiles(tiling));
        let pieces = (0..pieces_of(unit)).map(|i| {
            let worker = (begin + i.saturating_mul(tile_cost * (overhead + piece))) / quota;
            (worker, i * piece..(i + 1).saturating_mul(piece).min(tiles))
        });
        builder.push(unit, pieces);
        begin += cost(unit);
    }
    Ok(builder.finish(tiling.workers))
}
