//! The plan of a batch whose lengths are on the device, made by a kernel: no number of it is read by the host.
//!
//! The arrays are those of [`items`](super::items), equal word by word to what the host makes of the same batch with
//! `Split::Balanced`: the keys of every request in pages, neither levels, mask bits nor blocks, an item for one KV head. Arrays of a
//! batch, all i32:
//!
//! | array | |
//! |---|---|
//! | `num_requests` `[1]` | at most [`MAX_REQUESTS`] and the capacity |
//! | `qo_indptr` `[num_requests + 1]` | request `r` has query rows `qo_indptr[r]..qo_indptr[r + 1]` |
//! | `kv_indptr` `[num_requests + 1]` | and entries `kv_indptr[r]..kv_indptr[r + 1]` of the page indices |
//! | `last_page_len` `[num_requests]` | tokens in the last page, 0 where there is none |
//!
//! All units, laid end to end as the host does, are cut where the share of a worker ends. Cuts come from prefix sums of costs alone:
//!
//! 1. tiles of query rows of each request, added up: *spans*, one for each tile, for all heads;
//! 2. what each span costs, added up;
//! 3. a thread for each end of a share finds the unit that it falls into, and the KV tile;
//! 4. cuts before each, and their partial rows, added up: from them follow the numbers of items, merges and sources;
//! 5. a thread for each unit writes its first item, and a thread for each cut the item behind it.
//!
//! Every CTA does 1 to 4 for itself, and its part of 5. Its time is that of a chain of loads, barriers and shuffles, so what is known
//! of most batches makes it short: where each request is one span and costs are low, as those that decode are (`even`), 1 and 2 are
//! one step, nothing is searched for but requests, and all numbers have 32 bits; otherwise (`uneven`) spans are found by searching, and
//! costs have 64 bits. Units are found by warps that have no ends to find, at the same time.
//!
//! What is not as above is told by [`Refusal`] in `flags`, and then the plan is one of nothing: nothing is read or written through
//! lengths that were not checked.

mod cuts;
mod even;
mod layout;
mod lengths;
mod scan;
mod spans;
mod uneven;
mod write;

use super::{
    call::{PlanArgs, UNLIMITED},
    divisor::{Divisor, DivisorValues},
};
use cuts::{Cuts, End};
use even::Even;
use layout::{Layout, Room};
use lengths::Lengths;
use scan::Scan;
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    sim::Arg,
    verify::Invalid,
};
use uneven::Uneven;
use write::First;

/// Threads of a CTA, and the most requests, and half the most spans.
pub const THREADS: u32 = 1024;
/// Units, or cuts, that a CTA writes.
const UNITS: u32 = 128;
/// The most CTAs.
const MAX_CTAS: u32 = 64;
/// The most requests of a batch.
pub const MAX_REQUESTS: u32 = THREADS;
/// The most workers.
pub const MAX_WORKERS: u32 = THREADS / 32 * cuts::ENDS - 1;
/// The most tiles of query rows of a batch, for one KV head.
pub const MAX_SPANS: u32 = 2 * THREADS;
/// The most query rows and keys: sums of positions stay within 32 bits.
pub const MAX_LEN: u32 = 1 << 28;

/// What was wrong with lengths on the device: bits of `flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Refusal {
    /// More requests than the capacity has.
    Requests = 1,
    /// `qo_indptr` does not start at 0, decreases, or has more rows than the capacity, in all or in one request.
    Rows = 2,
    /// `kv_indptr` does not start at 0, decreases, or has more pages than the capacity.
    Pages = 4,
    /// A `last_page_len` is not in `1..=page_size`, or not 0 where there are no pages; or a request has too many keys.
    Keys = 8,
}

/// What a plan depends on beside the batch. Constant over its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Query heads of a KV head.
    pub group: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Slots of a page.
    pub page_size: u32,
    /// How far below its position a row sees; [`UNLIMITED`] for no limit.
    pub left: u32,
    /// How far above.
    pub right: u32,
    /// Query tokens of a tile.
    pub tile: u32,
    /// Keys of a KV tile.
    pub kv_tokens: u32,
    /// What an item costs beside its KV tiles, in KV tiles; at least 1.
    pub segment_overhead: u32,
    /// What bringing a KV tile costs, in query tokens.
    pub tile_load: u32,
    /// Workers, at most [`MAX_WORKERS`].
    pub workers: u32,
    /// The most requests, query rows, rows of one request, pages, and keys of one request.
    pub capacity: [u32; 5],
}

/// The arguments of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Addresses of `num_requests`, `qo_indptr`, `kv_indptr` and `last_page_len`.
    pub batch: [u64; 4],
    /// Where the plan goes. `requests` has room for `plan.num_requests`, which is the capacity; `indices`, `mask_bits` and
    /// `counters` are not written.
    pub plan: PlanArgs,
    /// The address of a word for [`Refusal`]s; 0 if there is nothing wrong.
    pub flags: u64,
    /// Everything else.
    pub shape: Shape,
}

impl Call {
    /// The arguments in the order of the parameters.
    pub fn args(&self) -> Vec<Arg> {
        let (plan, shape) = (&self.plan, &self.shape);
        let arrays = [plan.items, plan.worker_indptr, plan.feeds, plan.merges, plan.sources, plan.requests];
        // distances beyond any length limit nothing, and do not overflow
        let [left, right] =
            [shape.left, shape.right].map(|side| if side == UNLIMITED { 1 << 30 } else { side.min(1 << 30) });
        let divisors = [shape.kv_heads, shape.tile, shape.kv_tokens, shape.workers, self.grid()[0]]
            .map(|by| Divisor::new(by).args());
        let Shape { group, page_size, segment_overhead, tile_load, .. } = *shape;
        let numbers = [group, page_size, left, right, segment_overhead, tile_load];
        let addresses = self.batch.into_iter().chain(arrays).chain([self.flags]).map(Arg::U64);
        let [requests, rows, qo_len, pages, kv_len] = shape.capacity;
        let capacity = [requests, rows, qo_len.min(rows), pages, kv_len, kv_len.div_ceil(page_size.max(1))];
        let numbers = numbers.into_iter().chain(capacity).map(Arg::U32);
        addresses.chain(divisors.into_iter().flatten()).chain(numbers).collect()
    }

    /// CTAs: so many that each writes the items of a few warps' units and cuts, as an SM takes long to write many. Beyond 64, each
    /// writes more, up to one unit a thread.
    pub fn grid(&self) -> [u32; 3] {
        let Shape { kv_heads, tile, workers, capacity: [requests, rows, ..], .. } = self.shape;
        let spans = rows.min((rows / tile.max(1)).saturating_add(requests));
        let units = spans.min(MAX_SPANS).saturating_mul(kv_heads);
        let ctas = units.div_ceil(UNITS).max(workers.div_ceil(UNITS));
        [ctas.clamp(1, MAX_CTAS).max(units.div_ceil(THREADS)), 1, 1]
    }
}

/// The parameters, in the order of [`Call::args`], and who asks.
#[derive(Clone, Copy)]
struct Params<'k> {
    num_requests: Global<'k, u32>,
    qo_indptr: Global<'k, u32>,
    kv_indptr: Global<'k, u32>,
    last_page_len: Global<'k, u32>,
    items: Global<'k, u32>,
    worker_indptr: Global<'k, u32>,
    feeds: Global<'k, u32>,
    merges: Global<'k, u32>,
    sources: Global<'k, u32>,
    requests: Global<'k, u32>,
    flags: Global<'k, u32>,
    kv_heads: DivisorValues<'k>,
    tile: DivisorValues<'k>,
    kv_tokens: DivisorValues<'k>,
    workers: DivisorValues<'k>,
    ctas: DivisorValues<'k>,
    group: Value<'k, u32>,
    page_size: Value<'k, u32>,
    left: Value<'k, u32>,
    right: Value<'k, u32>,
    overhead: Value<'k, u32>,
    tile_load: Value<'k, u32>,
    max_requests: Value<'k, u32>,
    max_rows: Value<'k, u32>,
    max_qo_len: Value<'k, u32>,
    max_pages: Value<'k, u32>,
    max_kv_len: Value<'k, u32>,
    /// Pages of so many keys.
    max_kv_pages: Value<'k, u32>,
    /// The numbers of this warp, lane and CTA.
    warp: Value<'k, u32>,
    lane: Value<'k, u32>,
    cta: Value<'k, u32>,
}

impl<'k> Params<'k> {
    fn declare(k: &'k Builder) -> Self {
        // fields are evaluated in the order in which they stand here
        Self {
            num_requests: k.global("num_requests"),
            qo_indptr: k.global("qo_indptr"),
            kv_indptr: k.global("kv_indptr"),
            last_page_len: k.global("last_page_len"),
            items: k.global("items"),
            worker_indptr: k.global("worker_indptr"),
            feeds: k.global("feeds"),
            merges: k.global("merges"),
            sources: k.global("sources"),
            requests: k.global("requests"),
            flags: k.global("flags"),
            kv_heads: DivisorValues::declare(k, "kv_heads"),
            tile: DivisorValues::declare(k, "tile"),
            kv_tokens: DivisorValues::declare(k, "kv_tokens"),
            workers: DivisorValues::declare(k, "workers"),
            ctas: DivisorValues::declare(k, "ctas"),
            group: k.param("group"),
            page_size: k.param("page_size"),
            left: k.param("left"),
            right: k.param("right"),
            overhead: k.param("overhead"),
            tile_load: k.param("tile_load"),
            max_requests: k.param("max_requests"),
            max_rows: k.param("max_rows"),
            max_qo_len: k.param("max_qo_len"),
            max_pages: k.param("max_pages"),
            max_kv_len: k.param("max_kv_len"),
            max_kv_pages: k.param("max_kv_pages"),
            warp: k.warp_index(),
            lane: k.lane(),
            cta: k.cta(),
        }
    }
}

/// The kernel that makes a plan. One for all problems, tilings and capacities; grid and arguments are those of [`Call`].
///
/// # Errors
/// None but those of the verifier.
pub fn plan_device(name: &str) -> Result<Kernel, Invalid> {
    Builder::kernel(name, THREADS, |k| {
        let params = Params::declare(k);
        let sums = Cuts::sums(k, &params);
        let lengths = Lengths::read(k, params);
        let room = Room::declare(k);
        k.when_else(
            lengths.even,
            || plan(k, Even::measure(k, lengths, room), sums),
            || plan(k, Uneven::measure(k, lengths, room), sums),
        );
        k.when(params.cta.eq(0), || lengths.write(k));
    })
}

/// Steps 3 to 5. All warps come to each barrier, those with nothing to do too: at a place of their own it would be another barrier to
/// tools that look for such mistakes.
fn plan<'k, L: Layout<'k>>(k: &'k Builder, layout: L, sums: Scan<'k, u32, 2>) {
    let quota = layout.quota(k);
    let end = End::find(k, layout, quota);
    let first = First::find(k, layout, quota);
    let cuts = Cuts::count(k, layout, end, sums);
    write::all(k, layout, cuts, first);
}
