//! Persistent, warp-specialized `wgmma` GEMM for Hopper: `D = A · Bᵀ` in bf16 with f32 accumulation.
//!
//! ```text
//! CTA       tiles of D in turn: one producer warpgroup, two consumers of 64 rows each
//! producer  per tile, per 64 columns of A and B:  TMA loads of both into one ring
//! consumer  per tile:  D = Σ A · Bᵀ with one wgmma group in flight;  D to shared memory, then TMA store
//! ```
//!
//! Tiles are ordered in bands of 16 tile rows, column by column, so that the tiles in flight fit into L2.
//!
//! Shapes: A `[m, k]`, B `[n, k]`, D `[m, n]`, rows aligned to 16 bytes; k is at least 1. Out-of-bounds elements read
//! as 0 and are not written. Grid: at most one CTA per tile.

use crate::tile::{Cursor, Ring, SharedTile, Sums};
use tilewright_ptx::{
    build::{Builder, Value, WgmmaLeft, WgmmaOperands},
    ir::Kernel,
    isa::{
        matrix::{Elements, Major},
        sync::Fence,
    },
    verify::Invalid,
};

/// Rows per tile of D, 64 per consumer.
pub const TILE_ROWS: usize = 128;
/// Columns of A and B per stage.
const DEPTH: usize = 64;
/// Columns of D per store.
const STORE_COLUMNS: usize = 128;
const THREADS: u32 = 384;
const CONSUMERS: u32 = 2;
/// Tile rows per band.
const BAND: u32 = 16;
const BF16: (Elements, Elements) = (Elements::Bf16, Elements::Bf16);

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sm90Config {
    /// Columns per tile of D: 128 or 256.
    pub tile_columns: usize,
}

impl Sm90Config {
    /// Stages that fit into shared memory.
    fn stages(self) -> usize {
        if self.tile_columns == 256 { 4 } else { 6 }
    }
}

/// Records the kernel. Parameters: tensor maps of A and B in boxes of `[128, 64]` and `[tile_columns, 64]`, of D in
/// boxes of `[64, 64]`; m, n, k.
///
/// # Errors
/// When `tile_columns` is neither 128 nor 256.
pub fn gemm(name: &str, config: Sm90Config) -> Result<Kernel, Invalid> {
    if !matches!(config.tile_columns, 128 | 256) {
        let why = format!("tile_columns = {}, expected 128 or 256", config.tile_columns);
        return Err(Invalid::of(name, why));
    }
    Builder::kernel(name, THREADS, |k| {
        let cta = Sm90Cta::new(k, config);
        cta.init();
        let group = (k.thread() >> 7).of_lane(0).named("warpgroup");
        k.when_else(group.eq(0), || cta.run_producer(), || GemmConsumer::new(&cta, group - 1).run());
    })
}

/// State that all warps of a CTA share.
struct Sm90Cta<'k> {
    k: &'k Builder,
    config: Sm90Config,
    a_map: Value<'k, u64>,
    b_map: Value<'k, u64>,
    d_map: Value<'k, u64>,
    /// Tile rows and tile columns of D.
    tiles: (Value<'k, u32>, Value<'k, u32>),
    /// Stages per tile.
    steps: Value<'k, u32>,
    a: SharedTile<'k>,
    b: SharedTile<'k>,
    /// Staging buffer of results, one per consumer.
    d: SharedTile<'k>,
    ring: Ring<'k>,
}

impl<'k> Sm90Cta<'k> {
    fn new(k: &'k Builder, config: Sm90Config) -> Self {
        let [a_map, b_map, d_map] = ["a_map", "b_map", "d_map"].map(|name| k.tensor_map(name));
        let [m, n, depth] = ["m", "n", "k"].map(|name| k.param::<u32>(name));
        let (columns, stages) = (config.tile_columns as u32, config.stages());
        Self {
            k,
            config,
            a_map,
            b_map,
            d_map,
            tiles: ((m + (TILE_ROWS - 1) as u32) / TILE_ROWS as u32, (n + (columns - 1)) / columns),
            steps: ((depth + (DEPTH - 1) as u32) / DEPTH as u32).named("steps"),
            a: SharedTile::new(k, "a", (TILE_ROWS, DEPTH), stages),
            b: SharedTile::new(k, "b", (config.tile_columns, DEPTH), stages),
            d: SharedTile::new(k, "d", (64, STORE_COLUMNS), CONSUMERS as usize),
            ring: Ring::new(k, "ring", stages),
        }
    }

    fn init(&self) {
        let k = self.k;
        k.when(k.thread().eq(0), || {
            self.ring.init(k, (1, CONSUMERS));
            k.fence(Fence::MbarrierInit);
        });
        k.sync_threads();
    }

    /// Calls `body` with the first row and column of every tile of this CTA.
    fn for_each_tile(&self, body: impl FnOnce(Value<'k, u32>, Value<'k, u32>)) {
        let k = self.k;
        let (tile_rows, tile_columns) = self.tiles;
        k.repeat((k.cta(), tile_rows * tile_columns), k.ctas(), |tile| {
            let tiles_per_band = tile_columns * BAND;
            let band = tile / tiles_per_band;
            let in_band = tile % tiles_per_band;
            let height = (tile_rows - band * BAND).min(BAND);
            let (row, column) = (band * BAND + in_band % height, in_band / height);
            body(row * TILE_ROWS as u32, column * self.config.tile_columns as u32);
        });
    }

    fn run_producer(&self) {
        let k = self.k;
        k.setmaxnreg_dec(40);
        k.when(k.thread().eq(0), || {
            let cursor = self.ring.cursor(k);
            self.for_each_tile(|row, column| {
                k.repeat((0, self.steps), 1, |step| {
                    let full = cursor.fill(self.a.bytes() + self.b.bytes());
                    let depth = step * DEPTH as u32;
                    self.a.stage(cursor.stage()).load_columns(k, self.a_map, (depth, &[row]), full);
                    self.b.stage(cursor.stage()).load_columns(k, self.b_map, (depth, &[column]), full);
                    cursor.advance();
                });
            });
        });
    }
}

/// One warpgroup: 64 rows of each tile.
struct GemmConsumer<'c, 'k> {
    cta: &'c Sm90Cta<'k>,
    k: &'k Builder,
    /// Consumer index.
    index: Value<'k, u32>,
    /// Thread index in the warpgroup.
    thread: Value<'k, u32>,
    d: SharedTile<'k>,
    sums: Sums<'k>,
    /// The next stage to read, and the stage of the products in flight.
    next: Cursor<'k>,
    in_flight: Cursor<'k>,
}

impl<'c, 'k> GemmConsumer<'c, 'k> {
    fn new(cta: &'c Sm90Cta<'k>, index: Value<'k, u32>) -> Self {
        let k = cta.k;
        k.setmaxnreg_inc(232);
        Self {
            cta,
            k,
            index,
            thread: (k.thread() & 127).named("thread_of_group"),
            d: cta.d.stage(index),
            sums: Sums::unset(k, "d", cta.config.tile_columns),
            next: cta.ring.cursor(k),
            in_flight: cta.ring.cursor(k),
        }
    }

    fn run(&self) {
        let k = self.k;
        self.cta.for_each_tile(|row, column| {
            self.sums.registers().iter().for_each(|sum| sum.set(0.0));
            self.multiply();
            k.repeat((1, self.cta.steps), 1, |_| {
                self.multiply();
                k.wgmma_wait(1);
                self.release();
            });
            k.wgmma_wait(0);
            self.release();
            self.store(row, column);
        });
        // pending TMA stores still read shared memory
        k.when(self.thread.eq(0), || k.wait_bulk(0));
    }

    /// Issues the products of a stage.
    fn multiply(&self) {
        self.next.wait_full();
        let a = self.cta.a.stage(self.next.stage()).from_row(self.index << 6).rows_descriptor();
        let b = self.cta.b.stage(self.next.stage()).rows_descriptor();
        self.k.wgmma_fence();
        for step in 0..DEPTH / 16 {
            let (left, right) = (WgmmaLeft::Shared(a.depth_step(step), Major::K), b.depth_step(step));
            let operands = WgmmaOperands { elements: BF16, left, right, right_major: Major::K };
            self.k.wgmma(self.sums.registers(), operands, true);
        }
        self.k.wgmma_commit();
        self.next.advance();
    }

    /// Releases the oldest stage in flight, by one thread.
    fn release(&self) {
        self.k.when(self.thread.eq(0), || self.in_flight.release());
        self.in_flight.advance();
    }

    /// Rounds the sums and stores them through shared memory, `STORE_COLUMNS` at a time.
    fn store(&self, row: Value<'k, u32>, column: Value<'k, u32>) {
        let k = self.k;
        let (warp, lane) = ((self.thread >> 5).named("warp_of_group"), k.lane());
        // four 8 × 8 matrices at once: 16 rows and 16 columns
        let (row_of_lane, chunk_of_lane) = ((warp << 4) + (lane & 15), lane >> 4);
        for first in (0..self.cta.config.tile_columns).step_by(STORE_COLUMNS) {
            k.when(self.thread.eq(0), || k.wait_bulk_read(0));
            k.sync_named(self.index + 1, 128);
            for block in (0..STORE_COLUMNS).step_by(16) {
                // register order of 16 columns: row halves alternate, then the next 8 columns
                let words =
                    std::array::from_fn(|i| self.sums.pair(k, (first + block) / 4 + i).reinterpret::<u32>());
                let to = self.d.chunk(row_of_lane, chunk_of_lane + (block / 8) as u32);
                k.store_matrix::<4, _>(to, words, false);
            }
            k.fence(Fence::ProxyAsyncShared);
            k.sync_named(self.index + 1, 128);
            k.when(self.thread.eq(0), || {
                let corner = [row + (self.index << 6)];
                self.d.store_columns(k, self.cta.d_map, (column + first as u32, &corner));
                k.commit_bulk();
            });
        }
    }
}
