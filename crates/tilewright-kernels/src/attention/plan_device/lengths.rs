//! Lengths of the batch: validation, and costs of requests that are one query tile each.

use super::{MAX_REQUESTS, Params, Refusal, THREADS, scan::Scan, spans::Span};
use tilewright_ptx::{
    build::{Builder, Value},
    isa::warp::WarpReduction,
};

/// Flag beside [`LengthError`]s: a request is not one query tile, or costs [`MAX_TILE_COST`] or more.
const UNEVEN: u32 = 1 << 16;
/// Sums of [`MAX_REQUESTS`] costs below it stay far below 2^32.
const LITTLE: u64 = 1 << 20;

/// Validated lengths of a request.
#[derive(Clone, Copy)]
pub(super) struct Request<'k> {
    pub(super) qo_begin: Value<'k, u32>,
    pub(super) qo_end: Value<'k, u32>,
    pub(super) kv_start: Value<'k, u32>,
    pub(super) kv_len: Value<'k, u32>,
}

impl<'k> Request<'k> {
    /// Offset from row number to position.
    pub(super) fn offset(self) -> Value<'k, u32> {
        self.kv_len - self.qo_end
    }

    pub(super) fn load(p: &Params<'k>, r: Value<'k, u32>) -> Self {
        Stated::load(p, r).request(p)
    }

    pub(super) fn words(self) -> [Value<'k, u32>; 4] {
        [self.qo_begin, self.qo_end, self.kv_start, self.kv_len]
    }

    pub(super) fn of_words([qo_begin, qo_end, kv_start, kv_len]: [Value<'k, u32>; 4]) -> Self {
        Self { qo_begin, qo_end, kv_start, kv_len }
    }
}

/// Unchecked entries of a request in the batch arrays.
#[derive(Clone, Copy)]
struct Stated<'k> {
    rows: [Value<'k, u32>; 2],
    pages: [Value<'k, u32>; 2],
    last_page_len: Value<'k, u32>,
}

impl<'k> Stated<'k> {
    fn load(p: &Params<'k>, r: Value<'k, u32>) -> Self {
        let (qo, kv) = (p.qo_indptr.at(r), p.kv_indptr.at(r));
        let rows = [qo.load(), qo.plus(1).load()];
        let pages = [kv.load(), kv.plus(1).load()];
        Self { rows, pages, last_page_len: p.last_page_len.at(r).load() }
    }

    fn request(&self, p: &Params<'k>) -> Request<'k> {
        let [kv_start, page_end] = self.pages;
        let pages = page_end - kv_start;
        let kv_len = ((pages - 1) * p.page_size + self.last_page_len).unless(pages.eq(0), 0_u32);
        Request { qo_begin: self.rows[0], qo_end: self.rows[1], kv_start, kv_len }
    }

    /// The errors and their conditions. Wraparound is detected here or in a previous request.
    fn wrong(&self, p: &Params<'k>, r: Value<'k, u32>) -> [(Refusal, Value<'k, bool>); 3] {
        let Self { rows: [begin, row_end], pages: [first, page_end], last_page_len: last } = *self;
        let pages = page_end - first;
        let starts = |indptr: Value<'k, u32>| r.eq(0) & indptr.ne(0);
        let some = pages.ne(0);
        // a page count that wraps the number of keys exceeds the maximum
        let many = pages.gt(p.max_kv_pages) | self.request(p).kv_len.gt(p.max_kv_len);
        let not_of_a_page = (last - 1).ge(p.page_size);
        [
            (Refusal::Rows, row_end.gt(p.max_rows) | (row_end - begin).gt(p.max_qo_len) | starts(begin)),
            (Refusal::Pages, first.gt(page_end) | page_end.gt(p.max_pages) | starts(first)),
            (Refusal::Keys, (!some & last.ne(0)) | (some & (many | not_of_a_page))),
        ]
    }
}

/// The validated batch, one request per thread.
#[derive(Clone, Copy)]
pub(super) struct Lengths<'k> {
    pub(super) params: Params<'k>,
    /// Number of requests; 0 on an error.
    pub(super) count: Value<'k, u32>,
    /// Bits of [`LengthError`].
    flags: Value<'k, u32>,
    /// Whether each request is one query tile and all cost computations stay below 2^31; true on an error.
    pub(super) even: Value<'k, bool>,
    /// If so, the prefix sum of costs before this thread's request, per head, and the total.
    pub(super) before: Value<'k, u32>,
    pub(super) total: Value<'k, u32>,
    /// This thread's request, if it exists.
    pub(super) request: Request<'k>,
}

impl<'k> Lengths<'k> {
    /// Loads and validates the batch.
    pub(super) fn read(k: &'k Builder, params: Params<'k>) -> Self {
        let p = &params;
        let told = k.shared::<u32>("told", THREADS as usize / 32, 4);
        let (r, asked) = (k.thread(), p.num_requests.load());
        let limit = p.max_requests.min(MAX_REQUESTS);
        let bits = k.var("bits", asked.gt(limit).select(k.constant(Refusal::Requests as u32), 0_u32));
        let tell =
            |what: u32, holds: Value<'k, bool>| bits.set(bits.get() | holds.select(k.constant(what), 0_u32));
        let cost = k.var("request_cost", 0_u32);
        let own = ["qo_begin", "qo_end", "kv_start", "kv_len"].map(|name| k.var(name, 0_u32));
        k.when(asked.le(limit) & r.lt(asked), || {
            let stated = Stated::load(p, r);
            let request = stated.request(p);
            let span = Span::of(p, request, request.qo_begin);
            let of_span = span.cost(p);
            cost.set(of_span.low());
            own.into_iter().zip(request.words()).for_each(|(var, word)| var.set(word));
            let is_no_span = (request.qo_end - request.qo_begin - 1).ge(p.tile.by);
            tell(UNEVEN, is_no_span | of_span.ge(LITTLE));
            stated.wrong(p, r).into_iter().for_each(|(refusal, holds)| tell(refusal as u32, holds));
        });
        let of_warp = k.reduce_warp(WarpReduction::Or, bits.get());
        let here = (p.warp * 32).lt(asked.min(limit));
        let sums = Scan::declare(k, "request_sums", p).start(k, [cost.get()], here);
        k.when(p.lane.eq(31), || told.at(p.warp).store(of_warp));
        k.sync_threads();
        let [[before, total]] = sums.finish(k);
        let told = k.reduce_warp(WarpReduction::Or, told.at(p.lane).load());
        let flags = told & !UNEVEN;
        let wrong = flags.ne(0);
        let little = (total.to_u64() * p.kv_heads.by.to_u64()).lt(1 << 30);
        Self {
            params,
            count: asked.unless(wrong, 0_u32),
            flags,
            even: wrong | ((told & UNEVEN).eq(0) & little),
            before,
            total: total.unless(wrong, 0_u32),
            request: Request::of_words(own.map(|var| var.get())),
        }
    }

    /// Writes `requests` and `flags`.
    pub(super) fn write(&self, k: &'k Builder) {
        let (p, r) = (&self.params, k.thread());
        k.when(r.eq(0), || p.flags.store(self.flags));
        let of_runs = [self.request.qo_end, self.request.offset()];
        let of_runs = of_runs.map(|word| word.unless(r.ge(self.count), u32::MAX));
        k.when(r.lt(p.max_requests), || p.requests.at(r * 2).store_vector(of_runs));
    }
}
