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
//! Plans of more than one request or two query tiles per thread have kernels of their own, with `MAX_PER_THREAD` times as many per
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

use super::{divisor::Divisor, params::PlanArrays};
use crate::params::{GlobalArray, Param};
use cuts::{CutCounts, Cuts, ShareEnd};
use layout::{BatchScratch, Cost, CostLayout, CostLocation, Quota, UnitCosts};
use lengths::{BatchLengths, RequestLengths};
use multi_tile::MultiTileBatch;
use query_tiles::{QueryTile, QueryTileVars};
use scan::Scan;
use single_tile::SingleTileBatch;
use std::ops::Deref;
use tilewright_ptx::{Arg, Builder, Global, Invalid, Kernel, Value};
use write::FirstItem;

/// Threads per CTA.
pub(crate) const THREADS: u32 = 1024;
/// Maximum requests per thread.
pub(crate) const MAX_PER_THREAD: u32 = 4;
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
    /// Visible keys below a row's position; [`UNLIMITED`](super::params::UNLIMITED) for no limit.
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
    pub(crate) fn query_tiles(&self) -> u32 {
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
    /// Whether each thread has `MAX_PER_THREAD` requests instead of one.
    pub is_large: bool,
}

impl PlanKernel {
    /// All kernels.
    pub(crate) const ALL: [Self; 4] = [
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

crate::params! {
    /// Arguments of the kernel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct PlanDeviceParams => PlanDeviceParamRegs(this, kernel: PlanKernel) {
        /// Address of `num_requests`.
        num_requests: u64 as GlobalArray<u32>,
        /// Address of `qo_indptr`.
        qo_indptr: u64 as GlobalArray<u32>,
        /// Lengths of keys.
        keys "": KvLengths[kernel],
        /// The output arrays. `requests` has capacity for `plan.num_requests`, the maximum; `indices`, `mask_bits` and
        /// `arrival_counters` are not written.
        host plan: PlanArrays,
        items: GlobalArray<u32> = this.plan.items,
        worker_indptr: GlobalArray<u32> = this.plan.worker_indptr,
        merge_deps: GlobalArray<u32> = this.plan.merge_deps,
        merges: GlobalArray<u32> = this.plan.merges,
        sources: GlobalArray<u32> = this.plan.sources,
        requests: GlobalArray<u32> = this.plan.requests,
        /// Address of a word for [`LengthError`] bits; 0 if there is no error.
        flags: u64 as GlobalArray<u32>,
        /// The configuration.
        host config: PlanConfig,
        kv_heads: Divisor = Divisor::new(this.config.kv_heads),
        tile: Divisor = Divisor::new(this.config.tile),
        kv_tokens: Divisor = Divisor::new(this.config.kv_tokens),
        workers: Divisor = Divisor::new(this.config.workers),
        ctas: Divisor = Divisor::new(this.grid()[0]),
        group: u32 = this.config.group,
        page_size: u32 = this.config.page_size,
        // windows beyond any length are clamped to avoid overflow
        left: u32 = this.config.left.min(1 << 30),
        right: u32 = this.config.right.min(1 << 30),
        overhead: u32 = this.config.segment_overhead,
        cut_overhead: u32 = this.config.cut_overhead,
        tile_load: u32 = this.config.tile_load,
        max_requests: u32 = this.config.capacity[0],
        max_rows: u32 = this.config.capacity[1],
        max_qo_len: u32 = this.config.capacity[2].min(this.config.capacity[1]),
        max_pages: u32 = this.config.capacity[3],
        max_kv_len: u32 = this.max_kv_len(),
        /// Pages of `max_kv_len` keys.
        max_kv_pages: u32 = this.max_kv_len().div_ceil(this.config.page_size.max(1)),
    }
}

impl PlanDeviceParams {
    /// The kernel.
    pub fn kernel(&self) -> PlanKernel {
        let is_large =
            self.config.capacity[0] > THREADS || self.config.query_tiles() > TILES_PER_REQUEST * THREADS;
        PlanKernel { block_table: matches!(self.keys, KvLengths::BlockTable { .. }), is_large }
    }

    /// Maximum keys of one request; a block table limits them to its columns.
    fn max_kv_len(&self) -> u32 {
        let PlanConfig { page_size, capacity: [.., kv_len], .. } = self.config;
        match self.keys {
            KvLengths::Pages { .. } => kv_len,
            KvLengths::BlockTable { columns, .. } => kv_len.min(columns.saturating_mul(page_size)),
        }
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

/// The parameters, and the indices of this thread.
#[derive(Clone, Copy)]
struct PlanDeviceRegs<'k> {
    /// Requests per thread: those of thread `t` begin at `t * per_thread`.
    per_thread: u32,
    params: PlanDeviceParamRegs<'k>,
    /// Indices of this warp, lane and CTA.
    warp: Value<'k, u32>,
    lane: Value<'k, u32>,
    cta: Value<'k, u32>,
}

impl<'k> PlanDeviceRegs<'k> {
    fn declare(k: &'k Builder, kernel: PlanKernel) -> Self {
        // fields are evaluated in source order
        Self {
            per_thread: kernel.per_thread(),
            params: PlanDeviceParamRegs::declare(k, kernel),
            warp: k.warp_index(),
            lane: k.lane(),
            cta: k.cta(),
        }
    }
}

impl<'k> Deref for PlanDeviceRegs<'k> {
    type Target = PlanDeviceParamRegs<'k>;

    fn deref(&self) -> &Self::Target {
        &self.params
    }
}

/// The parameters of [`KvLengths`].
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "documented in `KvLengths`")]
pub enum KvLengthRegs<'k> {
    Pages { kv_indptr: Global<'k, u32>, last_page_len: Global<'k, u32> },
    BlockTable { seq_lens: Global<'k, u32>, columns: Value<'k, u32> },
}

impl Param for KvLengths {
    type Host = Self;
    type Regs<'k> = KvLengthRegs<'k>;
    type Config = PlanKernel;

    fn declare<'k>(k: &'k Builder, _: &str, kernel: PlanKernel) -> KvLengthRegs<'k> {
        match kernel.block_table {
            false => KvLengthRegs::Pages {
                kv_indptr: k.global("kv_indptr"),
                last_page_len: k.global("last_page_len"),
            },
            true => KvLengthRegs::BlockTable { seq_lens: k.global("seq_lens"), columns: k.param("columns") },
        }
    }

    fn push(host: &Self, _: PlanKernel, args: &mut Vec<Arg>) {
        args.extend(match *host {
            Self::Pages { kv_indptr, last_page_len } => [Arg::U64(kv_indptr), Arg::U64(last_page_len)],
            Self::BlockTable { seq_lens, columns } => [Arg::U64(seq_lens), Arg::U32(columns)],
        });
    }
}

/// Builds a planning kernel, for all problems, tilings and capacities within its limits. Grid and arguments are those of
/// [`PlanDeviceParams`].
///
/// # Errors
/// Only those of the verifier.
pub fn plan_device(name: &str, kernel: PlanKernel) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, THREADS, |k| {
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
