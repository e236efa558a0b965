//! The batch, checked, and its tiles of query rows with the keys that they see and what they cost.

use super::{MAX_REQUESTS, MAX_SPANS, Params, Refusal, THREADS, scan::Scan};
use tilewright_ptx::{
    build::{Builder, Shared, Value},
    isa::warp::WarpReduction,
};

/// What a thread tells beside [`Refusal`]s: that its request has no span, or several.
const UNEVEN: u32 = 1 << 16;

/// What a request has. All of it is checked.
#[derive(Clone, Copy)]
pub(super) struct Request<'k> {
    pub(super) qo_begin: Value<'k, u32>,
    pub(super) qo_end: Value<'k, u32>,
    pub(super) kv_start: Value<'k, u32>,
    pub(super) kv_len: Value<'k, u32>,
}

impl<'k> Request<'k> {
    /// From the number of a row to its position.
    pub(super) fn offset(self) -> Value<'k, u32> {
        self.kv_len - self.qo_end
    }

    fn load(p: &Params<'k>, r: Value<'k, u32>) -> Self {
        let (kv_start, kv_end) = (p.kv_indptr.at(r).load(), p.kv_indptr.at(r).plus(1).load());
        let pages = kv_end - kv_start;
        let kv_len = ((pages - 1) * p.page_size + p.last_page_len.at(r).load()).unless(pages.eq(0), 0_u32);
        Self {
            qo_begin: p.qo_indptr.at(r).load(),
            qo_end: p.qo_indptr.at(r).plus(1).load(),
            kv_start,
            kv_len,
        }
    }
}

/// The requests, and the first span of each.
#[derive(Clone, Copy)]
pub(super) struct Lengths<'k> {
    pub(super) params: Params<'k>,
    /// How many; 0 where something is wrong.
    pub(super) count: Value<'k, u32>,
    pub(super) num_spans: Value<'k, u32>,
    /// Whether some request has no span, or several: otherwise span `j` is that of request `j`.
    pub(super) uneven: Value<'k, bool>,
    /// `[count + 1]`
    pub(super) first_span: Shared<'k, u32>,
}

impl<'k> Lengths<'k> {
    /// Reads and checks the batch, a thread each request; the first CTA writes `requests` and `flags`.
    pub(super) fn read(k: &'k Builder, params: Params<'k>) -> Self {
        let p = &params;
        let first_span = k.shared::<u32>("first_span", MAX_REQUESTS as usize + 1, 4);
        let told = k.shared::<u32>("told", THREADS as usize / 32, 4);
        let (r, asked) = (k.thread(), p.num_requests.load());
        let limit = p.max_requests.min(MAX_REQUESTS);
        let bits = k.var("bits", asked.gt(limit).select(k.constant(Refusal::Requests as u32), 0_u32));
        let tell =
            |what: u32, bad: Value<'k, bool>| bits.set(bits.get() | bad.select(k.constant(what), 0_u32));
        let (tiles, end, offset) = (k.var("tiles", 0_u32), k.var("end", u32::MAX), k.var("offset", u32::MAX));
        k.when(asked.le(limit) & r.lt(asked), || {
            let (begin, row_end) = (p.qo_indptr.at(r).load(), p.qo_indptr.at(r).plus(1).load());
            let (first, page_end) = (p.kv_indptr.at(r).load(), p.kv_indptr.at(r).plus(1).load());
            let (last, pages, rows) = (p.last_page_len.at(r).load(), page_end - first, row_end - begin);
            let starts = |indptr: Value<'k, u32>| r.eq(0) & indptr.ne(0);
            let most_rows = row_end.gt(p.max_rows) | rows.gt(p.max_qo_len);
            tell(Refusal::Rows as u32, begin.gt(row_end) | most_rows | starts(begin));
            tell(Refusal::Pages as u32, first.gt(page_end) | page_end.gt(p.max_pages) | starts(first));
            let none = pages.eq(0);
            let full = (pages - 1).to_u64() * p.page_size.to_u64() + last.to_u64();
            let fits = last.ge(1) & last.le(p.page_size) & full.le(p.max_kv_len.to_u64());
            tell(Refusal::Keys as u32, (none & last.ne(0)) | (!none & !fits));
            tiles.set(p.tile.quotient(rows + p.tile.by - 1));
            tell(UNEVEN, tiles.get().ne(1));
            end.set(row_end);
            offset.set(full.low().unless(none, 0_u32) - row_end);
        });
        let of_warp = k.reduce_warp(WarpReduction::Or, bits.get());
        let warp = k.warp_index();
        k.when(k.lane().eq(0), || told.at(warp).store(of_warp));
        let (first, num_spans) = Scan::declare(k, "span_sums").exclusive(k, tiles.get(), asked.min(limit));
        let told = k.reduce_warp(WarpReduction::Or, told.at(k.lane()).load());
        let (flags, uneven) = (told & !UNEVEN, (told & UNEVEN).ne(0));
        let wrong = flags.ne(0);
        let (count, num_spans) = (asked.unless(wrong, 0_u32), num_spans.unless(wrong, 0_u32));
        k.when(r.lt(count), || first_span.at(r).store(first));
        k.when(r.eq(0), || first_span.at(count).store(num_spans));
        k.when(k.cta().eq(0), || {
            k.when(r.eq(0), || p.flags.store(flags));
            k.when(r.lt(p.max_requests), || {
                let (end, offset) = (end.get().unless(wrong, u32::MAX), offset.get().unless(wrong, u32::MAX));
                p.requests.at(r * 2).store_vector([end, offset]);
            });
        });
        k.sync_threads();
        Self { params, count, num_spans, uneven, first_span }
    }

    /// The request for which `reached` holds last, of which `even` is the number where each has one span.
    pub(super) fn request(
        &self,
        k: &'k Builder,
        even: Value<'k, u32>,
        reached: impl Fn(Value<'k, u32>) -> Value<'k, bool>,
    ) -> Value<'k, u32> {
        let r = k.var("request", even);
        k.when(self.uneven, || r.set(Self::last(k, self.count, reached)));
        r.get()
    }

    /// The last of `0..count` for which `reached` holds: it holds for the first, and for none behind one where it does not.
    pub(super) fn last(
        k: &'k Builder,
        count: Value<'k, u32>,
        reached: impl Fn(Value<'k, u32>) -> Value<'k, bool>,
    ) -> Value<'k, u32> {
        let (low, high) = (k.var::<u32>("low", 0), k.var::<u32>("high", count));
        k.forever(|| {
            let (from, until) = (low.get(), high.get());
            k.leave_when((from + 1).ge(until));
            // three places at once, as each step waits for memory
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
}

/// A tile of query rows of a request, and the keys that it sees.
#[derive(Clone, Copy)]
pub(super) struct Span<'k> {
    pub(super) request: Request<'k>,
    pub(super) begin: Value<'k, u32>,
    pub(super) rows: Value<'k, u32>,
    pub(super) kv_end: Value<'k, u32>,
    pub(super) first_tile: Value<'k, u32>,
    pub(super) tiles: Value<'k, u32>,
}

/// All spans: what those before each cost.
#[derive(Clone, Copy)]
pub(super) struct Spans<'k> {
    pub(super) lengths: Lengths<'k>,
    /// `[num_spans + 1]`
    pub(super) costs: Shared<'k, u64>,
    /// What all cost, for one head.
    pub(super) total: Value<'k, u64>,
}

impl<'k> Spans<'k> {
    /// Adds up what spans cost, two of them a thread.
    pub(super) fn measure(k: &'k Builder, lengths: Lengths<'k>) -> Self {
        let costs = k.shared::<u64>("costs", MAX_SPANS as usize + 1, 8);
        let mut spans = Self { lengths, costs, total: k.constant(0) };
        let cost = |name: &str, j: Value<'k, u32>| {
            let cost = k.var(name, 0_u64);
            k.when(j.lt(lengths.num_spans), || {
                let span = spans.span(k, spans.request_of(k, j), j);
                cost.set(spans.cost_per_tile(span) * (lengths.params.overhead + span.tiles).to_u64());
            });
            cost.get()
        };
        let j = k.thread() * 2;
        let pair = [cost("cost", j), cost("next_cost", j + 1)];
        let used = (lengths.num_spans + 1) >> 1;
        let (before, total) = Scan::declare(k, "cost_sums").exclusive(k, pair[0] + pair[1], used);
        k.when(j.lt(lengths.num_spans), || costs.at(j).store(before));
        k.when((j + 1).lt(lengths.num_spans), || costs.at(j).plus(1).store(before + pair[0]));
        k.when(k.thread().eq(0), || costs.at(lengths.num_spans).store(total));
        k.sync_threads();
        spans.total = total;
        spans
    }

    /// The request of span `j`.
    pub(super) fn request_of(&self, k: &'k Builder, j: Value<'k, u32>) -> Value<'k, u32> {
        self.lengths.request(k, j, |r| self.lengths.first_span.at(r).load().le(j))
    }

    /// What a KV tile of a span costs, for one head.
    pub(super) fn cost_per_tile(&self, span: Span<'k>) -> Value<'k, u64> {
        (self.lengths.params.tile_load + span.rows).to_u64()
    }

    /// Span `j`, which is one of request `r`.
    pub(super) fn span(&self, k: &'k Builder, r: Value<'k, u32>, j: Value<'k, u32>) -> Span<'k> {
        let p = &self.lengths.params;
        let request = Request::load(p, r);
        let begin = request.qo_begin + (j - self.lengths.first_span.at(r).load()) * p.tile.by;
        let rows = p.tile.by.min(request.qo_end - begin);
        let signed = |value: Value<'k, u32>| value.reinterpret::<i32>();
        let (offset, kv_len) = (signed(request.offset()), signed(request.kv_len));
        let (first, last) = (signed(begin) + offset, signed(begin + rows) + offset - 1);
        let local = |at: Value<'k, i32>| at.max(0).min(kv_len).reinterpret::<u32>();
        let sees_until = |position: Value<'k, i32>| local(position + 1 + signed(p.right));
        // positions ascend, and with them what is seen
        let (start, kv_end) = (local(first - signed(p.left)).min(sees_until(first)), sees_until(last));
        let first_tile = p.kv_tokens.quotient(start);
        let until = p.kv_tokens.quotient(kv_end + p.kv_tokens.by - 1);
        let tiles = (until - first_tile).unless(start.ge(kv_end), k.constant(0_u32));
        Span { request, begin, rows, kv_end, first_tile, tiles }
    }

    /// The keys of KV tiles `from..to` of a span.
    pub(super) fn keys(
        &self,
        span: Span<'k>,
        (from, to): (Value<'k, u32>, Value<'k, u32>),
    ) -> (Value<'k, u32>, Value<'k, u32>) {
        let at = |tile: Value<'k, u32>| {
            ((span.first_tile + tile) * self.lengths.params.kv_tokens.by).min(span.kv_end)
        };
        (at(from), at(to))
    }
}
