//! Batches of one query tile per request, such as decode batches: query tile `j` is that of request `j`.
//!
//! Costs have 32 bits and are known once the batch is read.

use super::{
    MAX_REQUESTS, THREADS,
    layout::{Layout, Place, Room, Unit},
    lengths::{Lengths, Request},
    spans::Span,
};
use tilewright_ptx::build::{Builder, Shared, Value};

/// A batch of one query tile per request.
#[derive(Clone, Copy)]
pub(super) struct Even<'k> {
    lengths: Lengths<'k>,
    /// `[MAX_REQUESTS + 1]`: prefix sums of request costs, per head; the last entry is the total.
    costs: Shared<'k, u32>,
    /// `[MAX_REQUESTS][4]`: the fields of each [`RequestLengths`].
    requests: Shared<'k, u32>,
}

impl<'k> Even<'k> {
    /// Writes costs and requests to shared memory. All threads take part; ends with a barrier.
    pub(super) fn measure(k: &'k Builder, lengths: Lengths<'k>, room: Room<'k>) -> Self {
        const { assert!(THREADS == MAX_REQUESTS, "a thread each") };
        let (costs, requests) = (room.of_requests, room.of_spans.cast::<u32>());
        k.when(k.thread().lt(lengths.count), || {
            requests.at(k.thread() * 4).store_vector(lengths.request.words());
        });
        costs.at(k.thread()).store(lengths.before);
        k.when(k.thread().eq(0), || costs.plus(MAX_REQUESTS as usize).store(lengths.total));
        k.sync_threads();
        Self { lengths, costs, requests }
    }

    /// The prefix sums before and after a request.
    fn around(&self, r: Value<'k, u32>) -> [Value<'k, u32>; 2] {
        let before = self.costs.at(r);
        [before.load(), before.plus(1).load()]
    }

    fn span(&self, r: Value<'k, u32>) -> Span<'k> {
        let request = Request::of_words(self.requests.at(r * 4).load_vector());
        Span::of(&self.lengths.params, request, request.qo_begin)
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

impl<'k> Layout<'k> for Even<'k> {
    type Cost = u32;

    fn lengths(&self) -> &Lengths<'k> {
        &self.lengths
    }

    fn num_spans(&self) -> Value<'k, u32> {
        self.lengths.count
    }

    fn total(&self) -> Value<'k, u32> {
        self.lengths.total * self.lengths.params.kv_heads.by
    }

    fn quota(&self, _: &'k Builder) -> Value<'k, u32> {
        let workers = self.lengths.params.workers;
        workers.quotient(self.total() + workers.by - 1).max(1)
    }

    fn place(&self, k: &'k Builder, at: Value<'k, u32>) -> Place<'k, u32> {
        let heads = self.lengths.params.kv_heads;
        let r = self.request(k, heads.quotient(at));
        let span = self.span(r);
        let [before, with] = self.around(r);
        let (within, of_head) = (at - before * heads.by, with - before);
        let head = within / of_head;
        Place { r, head, span, unit: r * heads.by + head, within: within - head * of_head }
    }

    fn unit(&self, _: &'k Builder, unit: Value<'k, u32>) -> Unit<'k, u32> {
        let (r, head) = self.lengths.params.kv_heads.divide(unit);
        let span = self.span(r);
        let [before, with] = self.around(r);
        let of_head = with - before;
        let before = before * self.lengths.params.kv_heads.by + head * of_head;
        Unit { r, head, span, before, with: before + of_head }
    }
}
