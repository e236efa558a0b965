//! Device-side planner: computes the schedule of a batch whose lengths are in device memory, without a copy to the host.
//!
//! The arrays are those of [`items`](super::items), word by word equal to the host's schedule of the same batch with
//! `Split::Balanced`. Supported are paged keys without cascade levels, mask bits or blocks, with one KV head per item. Batch
//! arrays, all i32:
//!
//! | array | |
//! |---|---|
//! | `num_requests` `[1]` | at most [`MAX_REQUESTS`] and the capacity |
//! | `qo_indptr` `[num_requests + 1]` | request `r` has query rows `qo_indptr[r]..qo_indptr[r + 1]` |
//!
//! with keys in lists of pages,
//!
//! | array | |
//! |---|---|
//! | `kv_indptr` `[num_requests + 1]` | request `r` has entries `kv_indptr[r]..kv_indptr[r + 1]` of the page indices |
//! | `last_page_len` `[num_requests]` | tokens in the last page; any number without pages, because engines pad so |
//!
//! or in a block table `[num_requests, columns]`, whose row `r` is entries `r * columns..` of the page indices:
//!
//! | array | |
//! |---|---|
//! | `seq_lens` `[num_requests]` | tokens of each request |
//!
//! As on the host, all units are concatenated along the cost axis and cut at the end of each worker's share. The kernel finds the
//! cuts from prefix sums of costs:
//!
//! 1. Scan the query tiles of the requests; a query tile is shared by all KV heads.
//! 2. Scan the costs of the query tiles.
//! 3. One thread per end of a share finds its unit and KV tile.
//! 4. Scan the cuts and their partial rows, which gives the indices of items, merges and sources.
//! 5. One thread per unit writes its first item, and one thread per cut writes the item after it.
//!
//! Every CTA repeats steps 1 to 4 and executes its part of step 5. The kernel is latency-bound: a chain of loads, barriers and
//! shuffles. Departures that shorten the chain:
//!
//! - Batches of one query tile per request and low costs, such as decode batches (`single_tile`), do steps 1 and 2 in one scan.
//!   They search for requests only, in 32 bits.
//! - Other batches (`multi_tile`) search for query tiles, with costs in 64 bits.
//! - Warps without ends to find look up the units of step 5 during step 3.
//!
//! Plans of more than one request or two query tiles per thread have kernels of their own, with [`MAX_PER_THREAD`] times as many per
//! thread. They treat all batches as general ones.
//!
//! Invalid lengths set bits of [`LengthError`] in `flags`, and the plan is empty. No address is derived from unchecked lengths.

mod cuts;
mod layout;
mod lengths;
mod multi_tile;
mod query_tiles;
mod scan;
mod single_tile;
mod write;

use super::{
    divisor::{Divisor, DivisorRegs},
    params::{PlanArrays, UNLIMITED},
};
use cuts::{Cuts, ShareEnd};
use layout::{BatchScratch, CostLayout};
use lengths::BatchLengths;
use multi_tile::MultiTileBatch;
use scan::Scan;
use single_tile::SingleTileBatch;
use tilewright_ptx::{
    build::{Builder, Global, Value},
    ir::Kernel,
    sim::Arg,
    verify::Invalid,
};
use write::FirstItem;

/// Threads per CTA.
pub const THREADS: u32 = 1024;
/// Maximum requests per thread.
pub const MAX_PER_THREAD: u32 = 4;
/// Units, or cuts, written per CTA.
const UNITS_PER_CTA: u32 = 128;
/// Maximum CTAs.
const MAX_CTAS: u32 = 64;
/// Maximum requests of a batch.
pub const MAX_REQUESTS: u32 = MAX_PER_THREAD * THREADS;
/// Maximum workers.
pub const MAX_WORKERS: u32 = THREADS / 32 * cuts::ENDS_PER_WARP - 1;
/// Maximum query tiles of a batch, per KV head.
pub const MAX_QUERY_TILES: u32 = TILES_PER_REQUEST * MAX_REQUESTS;
/// Maximum query tiles of a batch, per KV head and possible request.
const TILES_PER_REQUEST: u32 = 2;
/// Maximum query rows and keys, so that sums of positions fit into 32 bits.
pub const MAX_LEN: u32 = 1 << 28;

/// Error of the lengths on the device: a bit of `flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LengthError {
    /// More requests than the capacity.
    Requests = 1,
    /// `qo_indptr` does not start at 0, decreases, or exceeds the capacity of rows, in total or in one request.
    Rows = 2,
    /// `kv_indptr` decreases or exceeds the capacity of pages.
    Pages = 4,
    /// A `last_page_len` is not in `1..=page_size`, or a request has too many keys.
    Keys = 8,
}

/// Configuration of a plan, constant over its lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanConfig {
    /// Query heads per KV head.
    pub group: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Slots per page.
    pub page_size: u32,
    /// Visible keys below a row's position; [`UNLIMITED`] for no limit.
    pub left: u32,
    /// Visible keys above a row's position.
    pub right: u32,
    /// Query tokens per tile.
    pub tile: u32,
    /// Keys per KV tile.
    pub kv_tokens: u32,
    /// Fixed cost of an item, in KV tiles; at least 1.
    pub segment_overhead: u32,
    /// Cost of a cut, in KV tiles.
    pub cut_overhead: u32,
    /// Cost of loading a KV tile, in query tokens.
    pub tile_load: u32,
    /// Workers, at most [`MAX_WORKERS`].
    pub workers: u32,
    /// Maximum requests, query rows, rows of one request, pages, and keys of one request.
    pub capacity: [u32; 5],
}

impl PlanConfig {
    /// Maximum query tiles of a batch within the capacity.
    pub fn query_tiles(&self) -> u32 {
        let [requests, rows, ..] = self.capacity;
        rows.min((rows / self.tile.max(1)).saturating_add(requests))
    }
}

/// Addresses of the lengths of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvLengths {
    /// Lists of pages.
    Pages {
        /// Address of `kv_indptr`.
        kv_indptr: u64,
        /// Address of `last_page_len`.
        last_page_len: u64,
    },
    /// Rows of a block table.
    BlockTable {
        /// Address of `seq_lens`.
        seq_lens: u64,
        /// Columns of the table.
        columns: u32,
    },
}

/// A planning kernel: by the storage of keys, and by its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanKernel {
    /// Whether keys are in a block table.
    pub block_table: bool,
    /// Whether each thread has [`MAX_PER_THREAD`] requests instead of one.
    pub is_large: bool,
}

impl PlanKernel {
    /// All kernels.
    pub const ALL: [Self; 4] = [
        Self { block_table: false, is_large: false },
        Self { block_table: true, is_large: false },
        Self { block_table: false, is_large: true },
        Self { block_table: true, is_large: true },
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        match (self.block_table, self.is_large) {
            (false, false) => "plan_device",
            (true, false) => "plan_device_block_table",
            (false, true) => "plan_device_large",
            (true, true) => "plan_device_block_table_large",
        }
    }

    fn per_thread(self) -> u32 {
        if self.is_large { MAX_PER_THREAD } else { 1 }
    }
}

/// Arguments of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanDeviceParams {
    /// Address of `num_requests`.
    pub num_requests: u64,
    /// Address of `qo_indptr`.
    pub qo_indptr: u64,
    /// Lengths of keys.
    pub keys: KvLengths,
    /// The output arrays. `requests` has capacity for `plan.num_requests`, the maximum; `indices`, `mask_bits` and
    /// `arrival_counters` are not written.
    pub plan: PlanArrays,
    /// Address of a word for [`LengthError`] bits; 0 if there is no error.
    pub flags: u64,
    /// The configuration.
    pub config: PlanConfig,
}

impl PlanDeviceParams {
    /// The kernel.
    pub fn kernel(&self) -> PlanKernel {
        let is_large =
            self.config.capacity[0] > THREADS || self.config.query_tiles() > TILES_PER_REQUEST * THREADS;
        PlanKernel { block_table: matches!(self.keys, KvLengths::BlockTable { .. }), is_large }
    }

    /// The arguments in the order of the parameters.
    pub fn args(&self) -> Vec<Arg> {
        let (plan, config) = (&self.plan, &self.config);
        let arrays =
            [plan.items, plan.worker_indptr, plan.merge_deps, plan.merges, plan.sources, plan.requests];
        // windows beyond any length are clamped to avoid overflow
        let [left, right] = [config.left, config.right]
            .map(|side| if side == UNLIMITED { 1 << 30 } else { side.min(1 << 30) });
        let divisors = [config.kv_heads, config.tile, config.kv_tokens, config.workers, self.grid()[0]]
            .map(|by| Divisor::new(by).args());
        let PlanConfig { group, page_size, segment_overhead, cut_overhead, tile_load, .. } = *config;
        let numbers = [group, page_size, left, right, segment_overhead, cut_overhead, tile_load];
        let [requests, rows, qo_len, pages, kv_len] = config.capacity;
        let ([first, second], kv_len) = match self.keys {
            KvLengths::Pages { kv_indptr, last_page_len } => {
                ([Arg::U64(kv_indptr), Arg::U64(last_page_len)], kv_len)
            }
            KvLengths::BlockTable { seq_lens, columns } => {
                let row = columns.saturating_mul(page_size);
                ([Arg::U64(seq_lens), Arg::U32(columns)], kv_len.min(row))
            }
        };
        let lengths = [Arg::U64(self.num_requests), Arg::U64(self.qo_indptr), first, second];
        let addresses = arrays.into_iter().chain([self.flags]).map(Arg::U64);
        let capacity = [requests, rows, qo_len.min(rows), pages, kv_len, kv_len.div_ceil(page_size.max(1))];
        let numbers = numbers.into_iter().chain(capacity).map(Arg::U32);
        lengths.into_iter().chain(addresses).chain(divisors.into_iter().flatten()).chain(numbers).collect()
    }

    /// Grid: enough CTAs that each writes the items of a few warps' units and cuts, because writes of one SM are slow. Beyond 64
    /// CTAs each writes more, up to one unit per thread.
    pub fn grid(&self) -> [u32; 3] {
        let PlanConfig { kv_heads, workers, .. } = self.config;
        let units = self.config.query_tiles().min(MAX_QUERY_TILES).saturating_mul(kv_heads);
        let ctas = units.div_ceil(UNITS_PER_CTA).max(workers.div_ceil(UNITS_PER_CTA));
        [ctas.clamp(1, MAX_CTAS).max(units.div_ceil(THREADS)), 1, 1]
    }
}

/// The parameters in the order of [`PlanDeviceParams::args`], and the indices of this thread.
#[derive(Clone, Copy)]
struct PlanDeviceRegs<'k> {
    /// Requests per thread: those of thread `t` begin at `t * per_thread`.
    per_thread: u32,
    num_requests: Global<'k, u32>,
    qo_indptr: Global<'k, u32>,
    keys: KvLengthRegs<'k>,
    items: Global<'k, u32>,
    worker_indptr: Global<'k, u32>,
    merge_deps: Global<'k, u32>,
    merges: Global<'k, u32>,
    sources: Global<'k, u32>,
    requests: Global<'k, u32>,
    flags: Global<'k, u32>,
    kv_heads: DivisorRegs<'k>,
    tile: DivisorRegs<'k>,
    kv_tokens: DivisorRegs<'k>,
    workers: DivisorRegs<'k>,
    ctas: DivisorRegs<'k>,
    group: Value<'k, u32>,
    page_size: Value<'k, u32>,
    left: Value<'k, u32>,
    right: Value<'k, u32>,
    overhead: Value<'k, u32>,
    cut_overhead: Value<'k, u32>,
    tile_load: Value<'k, u32>,
    max_requests: Value<'k, u32>,
    max_rows: Value<'k, u32>,
    max_qo_len: Value<'k, u32>,
    max_pages: Value<'k, u32>,
    max_kv_len: Value<'k, u32>,
    /// Pages of `max_kv_len` keys.
    max_kv_pages: Value<'k, u32>,
    /// Indices of this warp, lane and CTA.
    warp: Value<'k, u32>,
    lane: Value<'k, u32>,
    cta: Value<'k, u32>,
}

/// The parameters of [`KvLengths`].
#[derive(Clone, Copy)]
enum KvLengthRegs<'k> {
    Pages { kv_indptr: Global<'k, u32>, last_page_len: Global<'k, u32> },
    BlockTable { seq_lens: Global<'k, u32>, columns: Value<'k, u32> },
}

impl<'k> PlanDeviceRegs<'k> {
    fn declare(k: &'k Builder, kernel: PlanKernel) -> Self {
        // fields are evaluated in source order
        Self {
            per_thread: kernel.per_thread(),
            num_requests: k.global("num_requests"),
            qo_indptr: k.global("qo_indptr"),
            keys: match kernel.block_table {
                false => KvLengthRegs::Pages {
                    kv_indptr: k.global("kv_indptr"),
                    last_page_len: k.global("last_page_len"),
                },
                true => {
                    KvLengthRegs::BlockTable { seq_lens: k.global("seq_lens"), columns: k.param("columns") }
                }
            },
            items: k.global("items"),
            worker_indptr: k.global("worker_indptr"),
            merge_deps: k.global("feeds"),
            merges: k.global("merges"),
            sources: k.global("sources"),
            requests: k.global("requests"),
            flags: k.global("flags"),
            kv_heads: DivisorRegs::declare(k, "kv_heads"),
            tile: DivisorRegs::declare(k, "tile"),
            kv_tokens: DivisorRegs::declare(k, "kv_tokens"),
            workers: DivisorRegs::declare(k, "workers"),
            ctas: DivisorRegs::declare(k, "ctas"),
            group: k.param("group"),
            page_size: k.param("page_size"),
            left: k.param("left"),
            right: k.param("right"),
            overhead: k.param("overhead"),
            cut_overhead: k.param("cut_overhead"),
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

/// Builds a planning kernel, for all problems, tilings and capacities within its limits. Grid and arguments are those of
/// [`PlanDeviceParams`].
///
/// # Errors
/// Only those of the verifier.
pub fn plan_device(name: &str, kernel: PlanKernel) -> Result<Kernel, Invalid> {
    Builder::kernel(name, THREADS, |k| {
        let params = PlanDeviceRegs::declare(k, kernel);
        let sums = Cuts::sums(k, &params);
        let lengths = BatchLengths::read(k, params);
        let scratch = BatchScratch::declare(k, params.per_thread);
        let general = || plan(k, MultiTileBatch::measure(k, lengths, scratch), sums);
        match kernel.is_large {
            true => general(),
            false => {
                let single = || plan(k, SingleTileBatch::measure(k, lengths, scratch), sums);
                k.when_else(lengths.single_tile, single, general);
            }
        }
        k.when(params.cta.eq(0), || lengths.write(k));
    })
}

/// Steps 3 to 5. Every warp executes the same `bar.sync`, idle ones included; separate barrier sites would be reported by
/// synccheck.
fn plan<'k, L: CostLayout<'k>>(k: &'k Builder, layout: L, sums: Scan<'k, u32, 2>) {
    let quota = layout.quota(k);
    let end = ShareEnd::find(k, layout, quota);
    let first = FirstItem::find(k, layout, quota);
    let cuts = Cuts::count(k, layout, end, sums);
    write::write_plan(k, layout, cuts, first);
}
