//! The planner: cuts a batch into work items that fill the device, and says how split rows are put together
//! again. Pure host code: no device, no clock, no randomness; equal batches give equal schedules.
//!
//! The simple algorithm:
//!
//! ```text
//! units  = for each request, each KV head, each tile of query rows: the keys that the tile sees
//! cost   = segment_overhead + KV tiles           (a segment is never free: see Tiling)
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
use std::ops::Range;

/// The most work items of a schedule: above it, the list of them is a burden of its own, and indices into it are far
/// from their 32 bits.
const MAX_ITEMS: usize = 1 << 24;

/// How a backend wants work to be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Rows of one tile: query tokens times the group. At least one token is taken in any case.
    pub q_rows: usize,
    /// Keys of one KV tile; items begin at multiples of it.
    pub kv_tokens: usize,
    /// What an item costs beside its KV tiles (loading Q, writing O), in KV tiles.
    pub segment_overhead: usize,
    /// Work items in flight at once: CTAs on a GPU, bins of work for the threads of a CPU.
    pub workers: usize,
    /// Scratch of all workers together, in f32 elements.
    pub scratch: usize,
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

/// One unit of device work: some query rows against a range of keys, for one KV head and its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkItem {
    /// The request whose keys are read.
    pub request: u32,
    /// The KV head; query heads `kv_head * group..(kv_head + 1) * group` belong to it.
    pub kv_head: u32,
    /// Query rows, counted over the whole batch.
    pub qo: Range<u32>,
    /// Keys, counted from the request's first, before the mask.
    pub kv: Range<u32>,
    /// The first of this item's partial rows (ordered `[qo, group]`), or `None` to write the output itself.
    pub partial: Option<u32>,
}

/// A split unit: the states to merge into output rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// The KV head.
    pub kv_head: u32,
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

/// A tile of query rows of one request and KV head with all the keys it sees, before any cut.
struct Unit {
    request: u32,
    kv_head: u32,
    qo: Range<u32>,
    kv_len: usize,
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
        let units = units(problem, requests, tiling);
        match split {
            Split::Balanced => Ok(balanced(problem, &units, tiling)),
            Split::Fixed { tokens } => {
                fixed(problem, &units, tiling, tokens.div_ceil(tiling.kv_tokens).max(1))
            }
            Split::Never => fixed(problem, &units, tiling, usize::MAX / 2),
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

fn units(problem: &Problem, requests: &Requests, tiling: &Tiling) -> Vec<Unit> {
    let tokens = tile_tokens(problem, tiling);
    let mut units = Vec::new();
    for (r, request) in requests.requests.iter().enumerate() {
        for kv_head in 0..problem.heads().kv {
            for begin in request.qo.clone().step_by(tokens) {
                let end = (begin + tokens).min(request.qo.end);
                units.push(Unit {
                    request: r as u32,
                    kv_head: kv_head as u32,
                    qo: begin as u32..end as u32,
                    kv_len: request.visible(problem, end - 1),
                });
            }
        }
    }
    units
}

/// Collects pieces in worker order.
struct Builder {
    schedule: Schedule,
    group: u32,
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
        Self { schedule, group: problem.heads().group() as u32, kv_tokens: tiling.kv_tokens }
    }

    /// Adds one unit's pieces: `(worker, tiles)` in order, covering all its tiles.
    fn push(&mut self, unit: &Unit, pieces: impl Iterator<Item = (usize, Range<usize>)> + Clone) {
        let split = pieces.clone().nth(1).is_some();
        let first_source = self.schedule.sources.len() as u32;
        for (worker, tiles) in pieces {
            let partial = split.then_some(self.schedule.partial_rows as u32);
            if let Some(first_row) = partial {
                self.schedule.sources.push(first_row);
                self.schedule.partial_rows += (unit.qo.len() as u32 * self.group) as usize;
            }
            self.advance_to(worker);
            let kv =
                tiles.start * self.kv_tokens..(tiles.end.saturating_mul(self.kv_tokens)).min(unit.kv_len);
            self.schedule.items.push(WorkItem {
                request: unit.request,
                kv_head: unit.kv_head,
                qo: unit.qo.clone(),
                kv: kv.start as u32..kv.end as u32,
                partial,
            });
        }
        if split {
            let sources = first_source..self.schedule.sources.len() as u32;
            self.schedule.merges.push(Merge { kv_head: unit.kv_head, qo: unit.qo.clone(), sources });
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
    let overhead = tiling.segment_overhead.max(1);
    let tiles_of = |unit: &Unit| unit.kv_len.div_ceil(tiling.kv_tokens);
    let total: usize = units.iter().map(|unit| overhead + tiles_of(unit)).sum();
    let quota = total.div_ceil(tiling.workers).max(1);

    let mut builder = Builder::new(problem, tiling, units.len() + tiling.workers);
    let mut begin = 0;
    for unit in units {
        let tiles = tiles_of(unit);
        // The tile at which the cost `at` of the whole batch falls inside this unit.
        let cut = |at: usize| match at.saturating_sub(begin + overhead).min(tiles) {
            tile if tile < overhead => 0,
            tile if tiles - tile < overhead => tiles,
            tile => tile,
        };
        let end = begin + overhead + tiles;
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
    let overhead = tiling.segment_overhead.max(1);
    let tiles_of = |unit: &Unit| unit.kv_len.div_ceil(tiling.kv_tokens);
    let pieces_of = |unit: &Unit| tiles_of(unit).div_ceil(piece).max(1);
    let cost = |unit: &Unit| overhead * pieces_of(unit) + tiles_of(unit);
    let quota = units.iter().map(cost).sum::<usize>().div_ceil(tiling.workers).max(1);
    check_items(units.iter().map(pieces_of).sum())?;
    let split = units.iter().filter(|unit| pieces_of(unit) > 1);
    let partial_rows: usize =
        split.map(|unit| pieces_of(unit) * unit.qo.len() * problem.heads().group()).sum();
    crate::ensure!(
        u32::try_from(partial_rows).is_ok(),
        "attention.plan",
        "{partial_rows} partial rows, the most is {}: longer pieces are needed",
        u32::MAX
    );

    let mut builder = Builder::new(problem, tiling, units.len());
    let mut begin = 0;
    for unit in units {
        let tiles = tiles_of(unit);
        let pieces = (0..pieces_of(unit)).map(|i| {
            let worker = (begin + i.saturating_mul(overhead + piece)) / quota;
            (worker, i * piece..(i + 1).saturating_mul(piece).min(tiles))
        });
        builder.push(unit, pieces);
        begin += cost(unit);
    }
    Ok(builder.finish(tiling.workers))
}
