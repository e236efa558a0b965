//! Lengths of the batch: validation, and costs of requests that are one query tile each.

use super::{LengthError, MAX_REQUESTS, PlanDeviceRegs, THREADS, query_tiles::QueryTile, scan::Scan};
use tilewright_ptx::{
    build::{Builder, Value},
    isa::warp::WarpReduction,
};

/// Flag beside [`LengthError`]s: a request is not one query tile, or costs [`MAX_TILE_COST`] or more.
const NOT_SINGLE_TILE: u32 = 1 << 16;
/// Flag: a request is not one query tile, or differs in rows or KV tiles from the first one of its warp.
const NOT_EQUAL: u32 = 1 << 17;
/// Words per warp in shared memory: its flags, rows and KV tiles of its first request, and 0.
const WARP_WORDS: usize = 4;
/// Sums of [`MAX_REQUESTS`] costs below it stay far below 2^32.
const MAX_TILE_COST: u64 = 1 << 20;

/// Validated lengths of a request.
#[derive(Clone, Copy)]
pub(super) struct RequestLengths<'k> {
    pub(super) qo_begin: Value<'k, u32>,
    pub(super) qo_end: Value<'k, u32>,
    pub(super) kv_start: Value<'k, u32>,
    pub(super) kv_len: Value<'k, u32>,
}

impl<'k> RequestLengths<'k> {
    /// Offset from row number to position.
    pub(super) fn offset(self) -> Value<'k, u32> {
        self.kv_len - self.qo_end
    }

    pub(super) fn load(p: &PlanDeviceRegs<'k>, r: Value<'k, u32>) -> Self {
        BatchEntry::load(p, r).request(p)
    }

    pub(super) fn words(self) -> [Value<'k, u32>; 4] {
        [self.qo_begin, self.qo_end, self.kv_start, self.kv_len]
    }

    pub(super) fn from_words([qo_begin, qo_end, kv_start, kv_len]: [Value<'k, u32>; 4]) -> Self {
        Self { qo_begin, qo_end, kv_start, kv_len }
    }
}

/// Unchecked entries of a request in the batch arrays.
#[derive(Clone, Copy)]
struct BatchEntry<'k> {
    rows: [Value<'k, u32>; 2],
    pages: [Value<'k, u32>; 2],
    last_page_len: Value<'k, u32>,
}

impl<'k> BatchEntry<'k> {
    fn load(p: &PlanDeviceRegs<'k>, r: Value<'k, u32>) -> Self {
        let (qo, kv) = (p.qo_indptr.at(r), p.kv_indptr.at(r));
        let rows = [qo.load(), qo.plus(1).load()];
        let pages = [kv.load(), kv.plus(1).load()];
        Self { rows, pages, last_page_len: p.last_page_len.at(r).load() }
    }

    fn request(&self, p: &PlanDeviceRegs<'k>) -> RequestLengths<'k> {
        let [kv_start, page_end] = self.pages;
        let pages = page_end - kv_start;
        let kv_len = ((pages - 1) * p.page_size + self.last_page_len).unless(pages.eq(0), 0_u32);
        RequestLengths { qo_begin: self.rows[0], qo_end: self.rows[1], kv_start, kv_len }
    }

    /// The errors and their conditions. Wraparound is detected here or in a previous request.
    fn errors(&self, p: &PlanDeviceRegs<'k>, r: Value<'k, u32>) -> [(LengthError, Value<'k, bool>); 3] {
        let Self { rows: [begin, row_end], pages: [first, page_end], last_page_len: last } = *self;
        let pages = page_end - first;
        let starts = |indptr: Value<'k, u32>| r.eq(0) & indptr.ne(0);
        let some = pages.ne(0);
        // a page count that wraps the number of keys exceeds the maximum
        let many = pages.gt(p.max_kv_pages) | self.request(p).kv_len.gt(p.max_kv_len);
        let not_of_a_page = (last - 1).ge(p.page_size);
        [
            (LengthError::Rows, row_end.gt(p.max_rows) | (row_end - begin).gt(p.max_qo_len) | starts(begin)),
            (LengthError::Pages, first.gt(page_end) | page_end.gt(p.max_pages) | starts(first)),
            (LengthError::Keys, (!some & last.ne(0)) | (some & (many | not_of_a_page))),
        ]
    }
}

/// The validated batch, one request per thread.
#[derive(Clone, Copy)]
pub(super) struct BatchLengths<'k> {
    pub(super) params: PlanDeviceRegs<'k>,
    /// Number of requests; 0 on an error.
    pub(super) count: Value<'k, u32>,
    /// Bits of [`LengthError`].
    flags: Value<'k, u32>,
    /// Whether each request is one query tile and all cost computations stay below 2^31; true on an error.
    pub(super) single_tile: Value<'k, bool>,
    /// The rows and KV tiles of a request if all requests are one query tile of equal ones, else 0.
    pub(super) of_all: [Value<'k, u32>; 2],
    /// If `single_tile`, the prefix sum of costs before this thread's request, per head, and the total.
    pub(super) before: Value<'k, u32>,
    pub(super) total: Value<'k, u32>,
    /// This thread's request, if it exists.
    pub(super) request: RequestLengths<'k>,
}

impl<'k> BatchLengths<'k> {
    /// Loads and validates the batch.
    pub(super) fn read(k: &'k Builder, params: PlanDeviceRegs<'k>) -> Self {
        let p = &params;
        let warp_words = k.shared::<u32>("told", THREADS as usize / 32 * WARP_WORDS, 16);
        let (r, count) = (k.thread(), p.num_requests.load());
        let limit = p.max_requests.min(MAX_REQUESTS);
        let bits = k.var("bits", count.gt(limit).select(k.constant(LengthError::Requests as u32), 0_u32));
        let set_flag =
            |flag: u32, holds: Value<'k, bool>| bits.set(bits.get() | holds.select(k.constant(flag), 0_u32));
        let cost = k.var("request_cost", 0_u32);
        let own = ["qo_begin", "qo_end", "kv_start", "kv_len"].map(|name| k.var(name, 0_u32));
        let unit = ["unit_rows", "unit_tiles"].map(|name| k.var(name, 0_u32));
        k.when(count.le(limit) & r.lt(count), || {
            let entry = BatchEntry::load(p, r);
            let request = entry.request(p);
            let q_tile = QueryTile::of(p, request, request.qo_begin);
            let tile_cost = q_tile.cost(p);
            cost.set(tile_cost.low());
            own.into_iter().zip(request.words()).for_each(|(var, word)| var.set(word));
            unit.into_iter().zip([q_tile.rows, q_tile.tiles]).for_each(|(var, word)| var.set(word));
            let is_not_single = (request.qo_end - request.qo_begin - 1).ge(p.tile.by);
            set_flag(NOT_SINGLE_TILE, is_not_single | tile_cost.ge(MAX_TILE_COST));
            set_flag(NOT_EQUAL, is_not_single);
            entry.errors(p, r).into_iter().for_each(|(error, holds)| set_flag(error as u32, holds));
        });
        let unit = unit.map(|var| var.get());
        let first = unit.map(|word| word.of_lane(0));
        let differs = r.lt(count) & (unit[0].ne(first[0]) | unit[1].ne(first[1]));
        set_flag(NOT_EQUAL, differs);
        let of_warp = k.reduce_warp(WarpReduction::Or, bits.get());
        let active = (p.warp * 32).lt(count.min(limit));
        let sums = Scan::declare(k, "request_sums", p).start(k, [cost.get()], active);
        let words = [of_warp, first[0], first[1], k.constant(0)];
        k.when(p.lane.eq(31), || warp_words.at(p.warp * WARP_WORDS as u32).store_vector(words));
        k.sync_threads();
        let [[before, total]] = sums.finish(k);
        let [of_warp, rows, tiles, _] = warp_words.at(p.lane * WARP_WORDS as u32).load_vector();
        let first = [rows, tiles].map(|word| word.of_lane(0));
        let differs = (p.lane * 32).lt(count) & (rows.ne(first[0]) | tiles.ne(first[1]));
        let of_warp = of_warp | differs.select(k.constant(NOT_EQUAL), 0_u32);
        let warp_flags = k.reduce_warp(WarpReduction::Or, of_warp);
        let flags = warp_flags & !(NOT_SINGLE_TILE | NOT_EQUAL);
        let are_equal = (warp_flags & NOT_EQUAL).eq(0);
        let is_invalid = flags.ne(0);
        let is_cheap = (total.to_u64() * p.kv_heads.by.to_u64()).lt(1 << 30);
        Self {
            params,
            count: count.unless(is_invalid, 0_u32),
            flags,
            single_tile: is_invalid | ((warp_flags & NOT_SINGLE_TILE).eq(0) & is_cheap),
            of_all: first.map(|word| word.unless(is_invalid | !are_equal, 0_u32)),
            before,
            total: total.unless(is_invalid, 0_u32),
            request: RequestLengths::from_words(own.map(|var| var.get())),
        }
    }

    /// Writes `requests` and `flags`.
    pub(super) fn write(&self, k: &'k Builder) {
        let (p, r) = (&self.params, k.thread());
        k.when(r.eq(0), || p.flags.store(self.flags));
        let row_ends = [self.request.qo_end, self.request.offset()];
        let row_ends = row_ends.map(|word| word.unless(r.ge(self.count), u32::MAX));
        k.when(r.lt(p.max_requests), || p.requests.at(r * 2).store_vector(row_ends));
    }
}
