//! General batches: requests without rows, or of several query tiles.
//!
//! Query tiles are found by binary search, and costs have 64 bits.

use super::{
    layout::{Cost, Layout, Place, Room, Unit},
    lengths::{Lengths, Request},
    scan::Scan,
    spans::Span,
};
use tilewright_ptx::build::{Builder, Shared, Value};

/// A general batch.
#[derive(Clone, Copy)]
pub(super) struct Uneven<'k> {
    lengths: Lengths<'k>,
    num_spans: Value<'k, u32>,
    /// `[count + 1]`: the first query tile of each request.
    first_span: Shared<'k, u32>,
    /// `[num_q_tiles + 1]`: prefix sums of query tile costs, per head.
    costs: Shared<'k, u64>,
    /// Total cost per head.
    of_head: Value<'k, u64>,
}

impl<'k> Uneven<'k> {
    /// Scans the query tiles, one request per thread, and their costs, two query tiles per thread. All threads take part; ends
    /// with a barrier.
    pub(super) fn measure(k: &'k Builder, lengths: Lengths<'k>, room: Room<'k>) -> Self {
        let (first_span, costs, p) = (room.of_requests, room.of_spans, &lengths.params);
        let (thread, count) = (k.thread(), lengths.count);
        let rows = lengths.request.qo_end - lengths.request.qo_begin;
        let own = p.tile.quotient(rows + p.tile.by - 1).unless(thread.ge(count), 0_u32);
        let here = (p.warp * 32).lt(count);
        let sums = Scan::declare(k, "span_sums", p).start(k, [own], here);
        k.sync_threads();
        let [[first, num_spans]] = sums.finish(k);
        k.when(thread.lt(count), || first_span.at(thread).store(first));
        k.when(thread.eq(0), || first_span.at(count).store(num_spans));
        k.sync_threads();
        let of_head = k.constant(0_u64);
        let spans = Self { lengths, num_spans, first_span, costs, of_head };
        let j = thread * 2;
        let pair = [("cost", j), ("next_cost", j + 1)].map(|(name, j)| {
            let cost = k.var(name, 0_u64);
            k.when(j.lt(num_spans), || {
                let r = Self::last(k, count, |r| first_span.at(r).load().le(j));
                cost.set(spans.span(r, j).cost(p));
            });
            cost.get()
        });
        let sums = Scan::declare(k, "cost_sums", p);
        let sums = sums.start(k, [pair[0] + pair[1]], (p.warp * 64).lt(num_spans));
        k.sync_threads();
        let [[before, of_head]] = sums.finish(k);
        k.when(j.lt(num_spans), || costs.at(j).store(before));
        k.when((j + 1).lt(num_spans), || costs.at(j).plus(1).store(before + pair[0]));
        k.when(thread.eq(0), || costs.at(num_spans).store(of_head));
        k.sync_threads();
        Self { of_head, ..spans }
    }

    /// The last of `0..count` for which `reached` holds; it must hold for a prefix that includes 0.
    fn last(
        k: &'k Builder,
        count: Value<'k, u32>,
        reached: impl Fn(Value<'k, u32>) -> Value<'k, bool>,
    ) -> Value<'k, u32> {
        let (low, high) = (k.var::<u32>("low", 0), k.var::<u32>("high", count));
        k.forever(|| {
            let (from, until) = (low.get(), high.get());
            k.leave_when((from + 1).ge(until));
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
    fn spans_of(&self, r: Value<'k, u32>) -> [Value<'k, u32>; 2] {
        let first = self.first_span.at(r);
        [first.load(), first.plus(1).load()]
    }

    /// Query tile `j`, which belongs to request `r`.
    fn span(&self, r: Value<'k, u32>, j: Value<'k, u32>) -> Span<'k> {
        let (p, request) = (&self.lengths.params, Request::load(&self.lengths.params, r));
        let begin = request.qo_begin + (j - self.first_span.at(r).load()) * p.tile.by;
        Span::of(p, request, begin)
    }

    fn heads(&self) -> Value<'k, u32> {
        self.lengths.params.kv_heads.by
    }
}

impl<'k> Layout<'k> for Uneven<'k> {
    type Cost = u64;

    fn lengths(&self) -> &Lengths<'k> {
        &self.lengths
    }

    fn num_spans(&self) -> Value<'k, u32> {
        self.num_spans
    }

    fn total(&self) -> Value<'k, u64> {
        self.of_head * self.heads().to_u64()
    }

    fn quota(&self, k: &'k Builder) -> Value<'k, u64> {
        let workers = self.lengths.params.workers.by.to_u64();
        Cost::quotient(k, self.total() + workers - 1, workers).max(1)
    }

    fn place(&self, k: &'k Builder, at: Value<'k, u64>) -> Place<'k, u64> {
        let heads = self.heads();
        let first_cost = |r: Value<'k, u32>| self.cost(self.first_span.at(r).load());
        let r = Self::last(k, self.lengths.count, |r| (first_cost(r) * heads.to_u64()).le(at));
        let [first, last] = self.spans_of(r);
        let before = self.cost(first);
        let of_head = self.cost(last) - before;
        let within = at - before * heads.to_u64();
        let head = u64::quotient(k, within, of_head).low();
        let within = within - head.to_u64() * of_head;
        let i = Self::last(k, last - first, |i| (self.cost(first + i) - before).le(within));
        let j = first + i;
        let unit = first * heads + head * (last - first) + i;
        Place { r, head, span: self.span(r, j), unit, within: within - (self.cost(j) - before) }
    }

    fn unit(&self, k: &'k Builder, unit: Value<'k, u32>) -> Unit<'k, u64> {
        let heads = self.heads();
        let r = Self::last(k, self.lengths.count, |r| (self.first_span.at(r).load() * heads).le(unit));
        let [first, last] = self.spans_of(r);
        let local = unit - first * heads;
        let head = local / (last - first);
        let j = first + (local - head * (last - first));
        let before = self.cost(first);
        let of_head = self.cost(last) - before;
        let of_unit = [self.cost(j), self.cost(j + 1)]
            .map(|cost| before * heads.to_u64() + head.to_u64() * of_head + (cost - before));
        Unit { r, head, span: self.span(r, j), before: of_unit[0], with: of_unit[1] }
    }
}
