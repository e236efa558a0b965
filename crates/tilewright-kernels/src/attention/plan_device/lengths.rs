//! Lengths of the batch: validation, and costs of requests that are one query tile each.

use super::{KvLengthRegs, LengthError, MAX_PER_THREAD, PlanDeviceRegs, QueryTile, Scan, THREADS};
use tilewright_ptx::{Builder, Value, Var, WarpReduction};

/// Flag beside [`LengthError`]s: a request is not one query tile, or costs [`MAX_TILE_COST`] or more.
const NOT_SINGLE_TILE: u32 = 1 << 16;
/// Flag: a request is not one query tile, or differs in rows or KV tiles from the first one of its warp.
const NOT_EQUAL: u32 = 1 << 17;
/// Words per warp in shared memory: its flags, rows and KV tiles of its first request, and 0.
const WARP_WORDS: usize = 4;
/// Sums of one cost below it per thread stay far below 2^32.
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
    keys: KeyEntry<'k>,
}

/// The keys of a request.
#[derive(Clone, Copy)]
enum KeyEntry<'k> {
    Pages { bounds: [Value<'k, u32>; 2], last_page_len: Value<'k, u32> },
    BlockTable { kv_start: Value<'k, u32>, kv_len: Value<'k, u32> },
}

impl<'k> BatchEntry<'k> {
    fn load(p: &PlanDeviceRegs<'k>, r: Value<'k, u32>) -> Self {
        let qo = p.qo_indptr.at(r);
        let rows = [qo.load(), qo.plus(1).load()];
        let keys = match p.keys {
            KvLengthRegs::Pages { kv_indptr, last_page_len } => {
                let kv = kv_indptr.at(r);
                let bounds = [kv.load(), kv.plus(1).load()];
                KeyEntry::Pages { bounds, last_page_len: last_page_len.at(r).load() }
            }
            KvLengthRegs::BlockTable { seq_lens, columns } => {
                KeyEntry::BlockTable { kv_start: r * columns, kv_len: seq_lens.at(r).load() }
            }
        };
        Self { rows, keys }
    }

    fn request(&self, p: &PlanDeviceRegs<'k>) -> RequestLengths<'k> {
        let (kv_start, kv_len) = match self.keys {
            KeyEntry::Pages { bounds: [kv_start, page_end], last_page_len } => {
                let pages = page_end - kv_start;
                (kv_start, ((pages - 1) * p.page_size + last_page_len).unless(pages.eq(0), 0_u32))
            }
            KeyEntry::BlockTable { kv_start, kv_len } => (kv_start, kv_len),
        };
        RequestLengths { qo_begin: self.rows[0], qo_end: self.rows[1], kv_start, kv_len }
    }

    /// The errors and their conditions. Wraparound is detected here or in a previous request.
    fn errors(&self, p: &PlanDeviceRegs<'k>, r: Value<'k, u32>) -> Vec<(LengthError, Value<'k, bool>)> {
        let [begin, row_end] = self.rows;
        let starts = r.eq(0) & begin.ne(0);
        let rows = (LengthError::Rows, row_end.gt(p.max_rows) | (row_end - begin).gt(p.max_qo_len) | starts);
        let many = self.request(p).kv_len.gt(p.max_kv_len);
        match self.keys {
            KeyEntry::Pages { bounds: [first, page_end], last_page_len: last } => {
                let pages = page_end - first;
                // a page count that wraps the number of keys exceeds the maximum
                let many = pages.gt(p.max_kv_pages) | many;
                let not_of_a_page = (last - 1).ge(p.page_size);
                vec![
                    rows,
                    (LengthError::Pages, first.gt(page_end) | page_end.gt(p.max_pages)),
                    (LengthError::Keys, pages.ne(0) & (many | not_of_a_page)),
                ]
            }
            KeyEntry::BlockTable { .. } => vec![rows, (LengthError::Keys, many)],
        }
    }
}

/// The validated batch.
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
    /// This thread's requests, if they exist; [`BatchLengths::own`] has as many as the kernel has per thread.
    requests: [RequestLengths<'k>; MAX_PER_THREAD as usize],
}

impl<'k> BatchLengths<'k> {
    /// Loads and validates the batch.
    pub(super) fn read(k: &'k Builder, params: PlanDeviceRegs<'k>) -> Self {
        let p = &params;
        let warp_words = k.shared::<u32>("warp_words", THREADS as usize / 32 * WARP_WORDS, 16);
        let count = p.num_requests.load();
        let limit = p.max_requests.min(p.per_thread * THREADS);
        let bits = k.var("bits", count.gt(limit).select(k.constant(LengthError::Requests as u32), 0_u32));
        let own: Vec<OwnRequest<'k>> = Self::numbers(k, p)
            .map(|r| {
                let own = OwnRequest::declare(k);
                k.when(count.le(limit) & r.lt(count), || own.read(k, p, r, bits));
                own
            })
            .collect();
        let first = own[0].unit.map(|word| word.get().of_lane(0));
        for (own, r) in own.iter().zip(Self::numbers(k, p)) {
            let [rows, tiles] = own.unit.map(|word| word.get());
            set_flag(k, bits, NOT_EQUAL, r.lt(count) & (rows.ne(first[0]) | tiles.ne(first[1])));
        }
        let of_warp = k.reduce_warp(WarpReduction::Or, bits.get());
        let warp_requests = 32 * p.per_thread;
        let active = (p.warp * warp_requests).lt(count.min(limit));
        let cost = own.iter().map(|own| own.cost.get()).reduce(|sum, cost| sum + cost);
        let cost = cost.unwrap_or(k.constant(0));
        let sums = Scan::declare(k, "request_sums", p).start(k, [cost], active);
        let words = [of_warp, first[0], first[1], k.constant(0)];
        k.when(p.lane.eq(31), || warp_words.at(p.warp * WARP_WORDS as u32).store_vector(words));
        k.sync_threads();
        let [[before, total]] = sums.finish(k);
        let [of_warp, rows, tiles, _] = warp_words.at(p.lane * WARP_WORDS as u32).load_vector();
        let first = [rows, tiles].map(|word| word.of_lane(0));
        let differs = (p.lane * warp_requests).lt(count) & (rows.ne(first[0]) | tiles.ne(first[1]));
        let of_warp = of_warp | differs.select(k.constant(NOT_EQUAL), 0_u32);
        let warp_flags = k.reduce_warp(WarpReduction::Or, of_warp);
        let flags = warp_flags & !(NOT_SINGLE_TILE | NOT_EQUAL);
        let are_equal = (warp_flags & NOT_EQUAL).eq(0);
        let is_invalid = flags.ne(0);
        let is_cheap = (total.to_u64() * p.kv_heads.by.to_u64()).lt(1 << 30);
        let requests: Vec<_> =
            own.iter().map(|own| RequestLengths::from_words(own.words.map(|word| word.get()))).collect();
        Self {
            params,
            count: count.unless(is_invalid, 0_u32),
            flags,
            single_tile: is_invalid | ((warp_flags & NOT_SINGLE_TILE).eq(0) & is_cheap),
            of_all: first.map(|word| word.unless(is_invalid | !are_equal, 0_u32)),
            before,
            total: total.unless(is_invalid, 0_u32),
            requests: std::array::from_fn(|i| requests[i.min(requests.len() - 1)]),
        }
    }

    /// The numbers of this thread's requests.
    fn numbers(k: &'k Builder, p: &PlanDeviceRegs<'k>) -> impl Iterator<Item = Value<'k, u32>> {
        let first = k.thread() * p.per_thread;
        (0..p.per_thread).map(move |i| first + i)
    }

    /// This thread's requests with their numbers. Those from [`BatchLengths::count`] on do not exist.
    pub(super) fn own(&self, k: &'k Builder) -> impl Iterator<Item = (Value<'k, u32>, RequestLengths<'k>)> {
        Self::numbers(k, &self.params).zip(self.requests)
    }

    /// Writes `requests` and `flags`.
    pub(super) fn write(&self, k: &'k Builder) {
        let p = &self.params;
        k.when(k.thread().eq(0), || p.flags.store(self.flags));
        for (r, request) in self.own(k) {
            let row_ends = [request.qo_end, request.offset()];
            let row_ends = row_ends.map(|word| word.unless(r.ge(self.count), u32::MAX));
            k.when(r.lt(p.max_requests), || p.requests.at(r * 2).store_vector(row_ends));
        }
    }
}

/// Variables of a request that a thread may have.
#[derive(Clone, Copy)]
struct OwnRequest<'k> {
    /// The fields of [`RequestLengths`].
    words: [Var<'k, u32>; 4],
    /// Low word of the cost of the first query tile.
    cost: Var<'k, u32>,
    /// Rows and KV tiles of the first query tile.
    unit: [Var<'k, u32>; 2],
}

impl<'k> OwnRequest<'k> {
    fn declare(k: &'k Builder) -> Self {
        let cost = k.var("request_cost", 0_u32);
        let words = ["qo_begin", "qo_end", "kv_start", "kv_len"].map(|name| k.var(name, 0_u32));
        Self { words, cost, unit: ["unit_rows", "unit_tiles"].map(|name| k.var(name, 0_u32)) }
    }

    /// Loads request `r` and sets its flags in `bits`.
    fn read(self, k: &'k Builder, p: &PlanDeviceRegs<'k>, r: Value<'k, u32>, bits: Var<'k, u32>) {
        let entry = BatchEntry::load(p, r);
        let request = entry.request(p);
        let q_tile = QueryTile::of(p, request, request.qo_begin);
        let tile_cost = q_tile.cost(p);
        self.cost.set(tile_cost.low());
        self.words.into_iter().zip(request.words()).for_each(|(var, word)| var.set(word));
        self.unit.into_iter().zip([q_tile.rows, q_tile.tiles]).for_each(|(var, word)| var.set(word));
        let is_not_single = (request.qo_end - request.qo_begin - 1).ge(p.tile.by);
        set_flag(k, bits, NOT_SINGLE_TILE, is_not_single | tile_cost.ge(MAX_TILE_COST));
        set_flag(k, bits, NOT_EQUAL, is_not_single);
        for (error, holds) in entry.errors(p, r) {
            set_flag(k, bits, error as u32, holds);
        }
    }
}

/// Sets a flag if the condition holds.
fn set_flag<'k>(k: &'k Builder, bits: Var<'k, u32>, flag: u32, holds: Value<'k, bool>) {
    bits.set(bits.get() | holds.select(k.constant(flag), 0_u32));
}
