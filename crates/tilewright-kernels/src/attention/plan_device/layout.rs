//! Cost axis of a batch: the units of a batch concatenated by cost, and the queries that cuts need.

use super::{THREADS, TILES_PER_REQUEST, lengths::BatchLengths, query_tiles::QueryTile};
use tilewright_ptx::{Arithmetic, Builder, Compare, Shared, Stored, Value};

/// A batch with known costs, of integer type [`Cost`](CostLayout::Cost).
pub(super) trait CostLayout<'k>: Copy {
    /// An integer type that holds the total cost and one share more.
    type Cost: Cost;
    /// The requests.
    fn lengths(&self) -> &BatchLengths<'k>;
    /// Query tiles of all requests.
    fn num_q_tiles(&self) -> Value<'k, u32>;
    /// Total cost of all units.
    fn total(&self) -> Value<'k, Self::Cost>;
    /// An equal share of the cost per worker, rounded up.
    fn share(&self, k: &'k Builder) -> Value<'k, Self::Cost>;
    /// The unit at cost `at`, which is below the total.
    fn locate(&self, k: &'k Builder, at: Value<'k, Self::Cost>) -> CostLocation<'k, Self::Cost>;
    /// The unit of an index.
    fn unit(&self, k: &'k Builder, unit: Value<'k, u32>) -> UnitCosts<'k, Self::Cost>;

    /// The quota: the share; or, if all units are equal and that costs less than the overhead of a cut, a number of units, or an equal
    /// piece of a unit.
    fn quota(&self, k: &'k Builder) -> Quota<'k, Self::Cost> {
        let lengths = self.lengths();
        let (p, [rows, tiles]) = (&lengths.params, lengths.of_all);
        let share = self.share(k);
        let (quota, pieces) = (k.var("quota", share), k.var("pieces", 1_u32));
        k.when(rows.ne(0), || {
            let per_tile = Self::Cost::of(p.tile_load + rows);
            let unit = per_tile * Self::Cost::of(p.overhead + tiles);
            let units = Self::Cost::quotient(k, share + unit - Self::Cost::of(k.constant(1)), unit) * unit;
            let of_cut = per_tile * Self::Cost::of(p.cut_overhead);
            let is_raised = units.gt(share) & !(units - share).gt(of_cut);
            quota.set(units.unless(!is_raised, share));
            let count = Self::Cost::low(Self::Cost::quotient(k, unit, share));
            let longest = per_tile * Self::Cost::of(p.overhead + (tiles + count.max(1) - 1) / count.max(1));
            let saved = per_tile * Self::Cost::of(p.cut_overhead.max(p.overhead) - p.overhead);
            let is_equal = !is_raised & count.gt(1) & !(tiles / count.max(1)).lt(p.overhead);
            k.when(is_equal & !longest.gt(share + saved), || {
                pieces.set(count);
                quota.set(unit);
            });
        });
        Quota { cost: quota.get(), pieces: pieces.get() }
    }
}

/// The work of a number of workers: one, or those that take equal pieces of a unit.
#[derive(Clone, Copy)]
pub(super) struct Quota<'k, T> {
    /// The cost of their work.
    pub(super) cost: Value<'k, T>,
    /// Equal pieces of each unit, one per worker, or 1.
    pub(super) pieces: Value<'k, u32>,
}

/// Shared memory of a batch, reused by both layouts.
#[derive(Clone, Copy)]
pub(super) struct BatchScratch<'k> {
    /// One word per request, and one more.
    pub(super) request_words: Shared<'k, u32>,
    /// One word per query tile, and one more; or four words of half the size per request.
    pub(super) q_tile_words: Shared<'k, u64>,
}

impl<'k> BatchScratch<'k> {
    pub(super) fn declare(k: &'k Builder, per_thread: u32) -> Self {
        const { assert!(8 * TILES_PER_REQUEST >= 16, "four words per request") };
        let requests = (per_thread * THREADS) as usize;
        let q_tile_words = k.shared("of_spans", TILES_PER_REQUEST as usize * requests + 1, 16);
        Self { request_words: k.shared("of_requests", requests + 1, 4), q_tile_words }
    }
}

/// The unit at a cost.
#[derive(Clone, Copy)]
pub(super) struct CostLocation<'k, T> {
    pub(super) r: Value<'k, u32>,
    pub(super) head: Value<'k, u32>,
    pub(super) q_tile: QueryTile<'k>,
    pub(super) unit: Value<'k, u32>,
    /// The cost within the unit.
    pub(super) within: Value<'k, T>,
}

/// A unit, and the prefix sums of costs before and after it.
#[derive(Clone, Copy)]
pub(super) struct UnitCosts<'k, T> {
    pub(super) r: Value<'k, u32>,
    pub(super) head: Value<'k, u32>,
    pub(super) q_tile: QueryTile<'k>,
    pub(super) before: Value<'k, T>,
    pub(super) with: Value<'k, T>,
}

/// An integer type of costs.
pub(super) trait Cost: Arithmetic + Compare + Stored {
    /// Converts from 32 bits.
    fn of(value: Value<'_, u32>) -> Value<'_, Self>;
    /// The low 32 bits.
    fn low(value: Value<'_, Self>) -> Value<'_, u32>;
    /// Rounded down.
    fn quotient<'k>(k: &'k Builder, a: Value<'k, Self>, by: Value<'k, Self>) -> Value<'k, Self>;
}

impl Cost for u32 {
    fn of(value: Value<'_, u32>) -> Value<'_, Self> {
        value
    }

    fn low(value: Value<'_, Self>) -> Value<'_, u32> {
        value
    }

    fn quotient<'k>(_: &'k Builder, a: Value<'k, Self>, by: Value<'k, Self>) -> Value<'k, Self> {
        a / by
    }
}

impl Cost for u64 {
    fn of(value: Value<'_, u32>) -> Value<'_, Self> {
        value.to_u64()
    }

    fn low(value: Value<'_, Self>) -> Value<'_, u32> {
        value.low()
    }

    /// Most values fit into 32 bits, whose division is several times faster.
    fn quotient<'k>(k: &'k Builder, a: Value<'k, Self>, by: Value<'k, Self>) -> Value<'k, Self> {
        let quotient = k.var("quotient", 0_u64);
        let narrow = (a.high() | by.high()).eq(0);
        k.when_else(narrow, || quotient.set((a.low() / by.low()).to_u64()), || quotient.set(a / by));
        quotient.get()
    }
}
