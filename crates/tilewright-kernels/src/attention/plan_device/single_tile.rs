//! Batches of one query tile per request, such as decode batches: query tile `j` is that of request `j`.
//!
//! Costs have 32 bits and are known once the batch is read.

use super::{
    BatchLengths, BatchScratch, CostLayout, CostLocation, QueryTile, RequestLengths, THREADS, UnitCosts,
};
use tilewright_ptx::{Builder, Shared, Value};

/// A batch of one query tile per request.
#[derive(Clone, Copy)]
pub(super) struct SingleTileBatch<'k> {
    lengths: BatchLengths<'k>,
    /// `[THREADS + 1]`: prefix sums of request costs, per head; the last entry is the total.
    costs: Shared<'k, u32>,
    /// `[THREADS][4]`: the fields of each [`RequestLengths`].
    requests: Shared<'k, u32>,
}

impl<'k> SingleTileBatch<'k> {
    /// Writes costs and requests to shared memory. All threads take part; ends with a barrier.
    pub(super) fn measure(k: &'k Builder, lengths: BatchLengths<'k>, scratch: BatchScratch<'k>) -> Self {
        let (costs, requests) = (scratch.request_words, scratch.q_tile_words.cast::<u32>());
        for (r, request) in lengths.own(k) {
            k.when(r.lt(lengths.count), || requests.at(r * 4).store_vector(request.words()));
        }
        costs.at(k.thread()).store(lengths.before);
        k.when(k.thread().eq(0), || costs.plus(THREADS as usize).store(lengths.total));
        k.sync_threads();
        Self { lengths, costs, requests }
    }

    /// The prefix sums before and after a request.
    fn prefix_sums(&self, r: Value<'k, u32>) -> [Value<'k, u32>; 2] {
        let before = self.costs.at(r);
        [before.load(), before.plus(1).load()]
    }

    fn q_tile(&self, r: Value<'k, u32>) -> QueryTile<'k> {
        let request = RequestLengths::from_words(self.requests.at(r * 4).load_vector());
        QueryTile::of(&self.lengths.params, request, request.qo_begin)
    }

    /// The last request with a prefix sum of at most `cost`.
    fn request(&self, k: &'k Builder, cost: Value<'k, u32>) -> Value<'k, u32> {
        let r = k.var("request", 0_u32);
        // three probes per step, because each step has the latency of shared memory; costs beyond the last request exceed `cost`
        for step in [256_u32, 64, 16, 4, 1] {
            k.when(self.lengths.count.gt(step), || {
                let from = self.costs.at(r.get());
                let passed = [1, 2, 3].map(|i| {
                    let passed = from.plus(i * step as usize).load().le(cost);
                    passed.select(k.constant(step), 0_u32)
                });
                r.set(r.get() + passed[0] + passed[1] + passed[2]);
            });
        }
        r.get()
    }
}

impl<'k> CostLayout<'k> for SingleTileBatch<'k> {
    type Cost = u32;

    fn lengths(&self) -> &BatchLengths<'k> {
        &self.lengths
    }

    fn num_q_tiles(&self) -> Value<'k, u32> {
        self.lengths.count
    }

    fn total(&self) -> Value<'k, u32> {
        self.lengths.total * self.lengths.params.kv_heads.by
    }

    fn share(&self, _: &'k Builder) -> Value<'k, u32> {
        let workers = self.lengths.params.workers;
        workers.quotient(self.total() + workers.by - 1).max(1)
    }

    fn locate(&self, k: &'k Builder, at: Value<'k, u32>) -> CostLocation<'k, u32> {
        let heads = self.lengths.params.kv_heads;
        let r = self.request(k, heads.quotient(at));
        let q_tile = self.q_tile(r);
        let [before, with] = self.prefix_sums(r);
        let (within, head_cost) = (at - before * heads.by, with - before);
        let head = within / head_cost;
        CostLocation { r, head, q_tile, unit: r * heads.by + head, within: within - head * head_cost }
    }

    fn unit(&self, _: &'k Builder, unit: Value<'k, u32>) -> UnitCosts<'k, u32> {
        let (r, head) = self.lengths.params.kv_heads.divide(unit);
        let q_tile = self.q_tile(r);
        let [before, with] = self.prefix_sums(r);
        let head_cost = with - before;
        let before = before * self.lengths.params.kv_heads.by + head * head_cost;
        UnitCosts { r, head, q_tile, before, with: before + head_cost }
    }
}
