//! General batches: requests without rows, or of several query tiles.
//!
//! Query tiles are found by binary search, and costs have 64 bits.

use super::{
    BatchLengths, BatchScratch, Cost, CostLayout, CostLocation, QueryTile, RequestLengths, Scan,
    TILES_PER_REQUEST, UnitCosts,
};
use tilewright_ptx::{Builder, Shared, Value};

/// A general batch.
#[derive(Clone, Copy)]
pub(super) struct MultiTileBatch<'k> {
    lengths: BatchLengths<'k>,
    num_q_tiles: Value<'k, u32>,
    /// `[count + 1]`: the first query tile of each request.
    first_q_tile: Shared<'k, u32>,
    /// `[num_q_tiles + 1]`: prefix sums of query tile costs, per head.
    costs: Shared<'k, u64>,
    /// Total cost per head.
    head_cost: Value<'k, u64>,
}

impl<'k> MultiTileBatch<'k> {
    /// Scans the query tiles of each thread's requests, and then the costs of equally many query tiles per thread. All threads take
    /// part; ends with a barrier.
    pub(super) fn measure(k: &'k Builder, lengths: BatchLengths<'k>, scratch: BatchScratch<'k>) -> Self {
        let (first_q_tile, costs, p) = (scratch.request_words, scratch.q_tile_words, &lengths.params);
        let (thread, count) = (k.thread(), lengths.count);
        let own = lengths.own(k).map(|(r, request)| {
            let rows = request.qo_end - request.qo_begin;
            (r, p.tile.quotient(rows + p.tile.by - 1).unless(r.ge(count), 0_u32))
        });
        let own: Vec<_> = own.collect();
        let sum = own.iter().map(|(_, tiles)| *tiles).reduce(|sum, tiles| sum + tiles);
        let active = (p.warp * (32 * p.per_thread)).lt(count);
        let sums = Scan::declare(k, "span_sums", p).start(k, [sum.unwrap_or(k.constant(0))], active);
        k.sync_threads();
        let [[mut first, num_q_tiles]] = sums.finish(k);
        for (r, tiles) in own {
            k.when(r.lt(count), || first_q_tile.at(r).store(first));
            first = first + tiles;
        }
        k.when(thread.eq(0), || first_q_tile.at(count).store(num_q_tiles));
        k.sync_threads();
        let head_cost = k.constant(0_u64);
        let batch = Self { lengths, num_q_tiles, first_q_tile, costs, head_cost };
        let per_thread = TILES_PER_REQUEST * p.per_thread;
        let q_tiles = (0..per_thread).map(|i| thread * per_thread + i);
        let own = q_tiles.map(|j| {
            let cost = k.var("cost", 0_u64);
            k.when(j.lt(num_q_tiles), || {
                let r = Self::last_where(k, count, |r| first_q_tile.at(r).load().le(j));
                cost.set(batch.q_tile(r, j).cost(p));
            });
            (j, cost.get())
        });
        let own: Vec<_> = own.collect();
        let sum = own.iter().map(|(_, cost)| *cost).reduce(|sum, cost| sum + cost);
        let active = (p.warp * (32 * per_thread)).lt(num_q_tiles);
        let sums = Scan::declare(k, "cost_sums", p);
        let sums = sums.start(k, [sum.unwrap_or(k.constant(0))], active);
        k.sync_threads();
        let [[mut before, head_cost]] = sums.finish(k);
        for (j, cost) in own {
            k.when(j.lt(num_q_tiles), || costs.at(j).store(before));
            before = before + cost;
        }
        k.when(thread.eq(0), || costs.at(num_q_tiles).store(head_cost));
        k.sync_threads();
        Self { head_cost, ..batch }
    }

    /// The last of `0..count` for which `reached` holds; it must hold for a prefix that includes 0.
    fn last_where(
        k: &'k Builder,
        count: Value<'k, u32>,
        reached: impl Fn(Value<'k, u32>) -> Value<'k, bool>,
    ) -> Value<'k, u32> {
        let (low, high) = (k.var::<u32>("low", 0), k.var::<u32>("high", count));
        k.loop_(|| {
            let (from, until) = (low.get(), high.get());
            k.break_if((from + 1).ge(until));
            // three probes per step, because each step has the latency of memory
            let quarter = (until - from + 3) >> 2;
            let passed = [1_u32, 2, 3].map(|i| {
                let at = from + quarter * i;
                let holds = at.lt(until) & reached(at.min(until - 1));
                holds.select(quarter, 0_u32)
            });
            let from = from + passed[0] + passed[1] + passed[2];
            low.set(from);
            high.set(until.min(from + quarter));
        });
        low.get()
    }

    fn cost(&self, j: Value<'k, u32>) -> Value<'k, u64> {
        self.costs.at(j).load()
    }

    /// The query tiles of a request: the first, and one past the last.
    fn q_tiles_of(&self, r: Value<'k, u32>) -> [Value<'k, u32>; 2] {
        let first = self.first_q_tile.at(r);
        [first.load(), first.plus(1).load()]
    }

    /// Query tile `j`, which belongs to request `r`.
    fn q_tile(&self, r: Value<'k, u32>, j: Value<'k, u32>) -> QueryTile<'k> {
        let (p, request) = (&self.lengths.params, RequestLengths::load(&self.lengths.params, r));
        let begin = request.qo_begin + (j - self.first_q_tile.at(r).load()) * p.tile.by;
        QueryTile::of(p, request, begin)
    }

    fn heads(&self) -> Value<'k, u32> {
        self.lengths.params.kv_heads.by
    }
}

impl<'k> CostLayout<'k> for MultiTileBatch<'k> {
    type Cost = u64;

    fn lengths(&self) -> &BatchLengths<'k> {
        &self.lengths
    }

    fn num_q_tiles(&self) -> Value<'k, u32> {
        self.num_q_tiles
    }

    fn total(&self) -> Value<'k, u64> {
        self.head_cost * self.heads().to_u64()
    }

    fn share(&self, k: &'k Builder) -> Value<'k, u64> {
        let workers = self.lengths.params.workers.by.to_u64();
        Cost::quotient(k, self.total() + workers - 1, workers).max(1)
    }

    fn locate(&self, k: &'k Builder, at: Value<'k, u64>) -> CostLocation<'k, u64> {
        let heads = self.heads();
        let first_cost = |r: Value<'k, u32>| self.cost(self.first_q_tile.at(r).load());
        let r = Self::last_where(k, self.lengths.count, |r| (first_cost(r) * heads.to_u64()).le(at));
        let [first, end] = self.q_tiles_of(r);
        let before = self.cost(first);
        let head_cost = self.cost(end) - before;
        let within = at - before * heads.to_u64();
        let head = u64::quotient(k, within, head_cost).low();
        let within = within - head.to_u64() * head_cost;
        let i = Self::last_where(k, end - first, |i| (self.cost(first + i) - before).le(within));
        let j = first + i;
        let unit = first * heads + head * (end - first) + i;
        CostLocation { r, head, q_tile: self.q_tile(r, j), unit, within: within - (self.cost(j) - before) }
    }

    fn unit(&self, k: &'k Builder, unit: Value<'k, u32>) -> UnitCosts<'k, u64> {
        let heads = self.heads();
        let r =
            Self::last_where(k, self.lengths.count, |r| (self.first_q_tile.at(r).load() * heads).le(unit));
        let [first, end] = self.q_tiles_of(r);
        let local = unit - first * heads;
        let head = local / (end - first);
        let j = first + (local - head * (end - first));
        let before = self.cost(first);
        let head_cost = self.cost(end) - before;
        let of_unit = [self.cost(j), self.cost(j + 1)]
            .map(|cost| before * heads.to_u64() + head.to_u64() * head_cost + (cost - before));
        UnitCosts { r, head, q_tile: self.q_tile(r, j), before: of_unit[0], with: of_unit[1] }
    }
}
