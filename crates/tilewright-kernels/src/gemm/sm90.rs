//! Persistent, warp-specialized `wgmma` GEMM for Hopper: 16-bit elements with f32 accumulation.
//!
//! ```text
//! CTA       tiles of the result in turn: one producer warpgroup, two consumers of 64 rows each
//! producer  per tile, per 64 inputs:  TMA loads of x and weight into one ring
//! consumer  per tile:  Σ x · weightᵀ with one wgmma group in flight;  stores from registers
//! ```
//!
//! Tiles are ordered in bands of 16 tile rows, column by column, so that the tiles in flight fit into L2.
//!
//! x and weight have rows aligned to 16 bytes and at least one input. Out-of-bounds elements read as 0 and are not written. Grid: at
//! most one CTA per tile.

use super::{
    args::GemmArgs,
    params::{Epilogue, Matrix},
    skinny::fragment,
};
use crate::tile::{Cursor, Ring, SharedTile, Sums, panel_map};
use tilewright::Dtype;
use tilewright_ptx::{Arg, Builder, Fence, Invalid, Kernel, Major, Value, WgmmaLeft, WgmmaOperands};

/// The architecture of `wgmma`.
pub(crate) const ARCH: u32 = 90;
/// Rows per tile of the result, 64 per consumer.
pub(crate) const TILE_ROWS: usize = 128;
/// Inputs per stage.
const DEPTH: usize = 64;
const THREADS: u32 = 384;
const CONSUMERS: u32 = 2;
/// Tile rows per band.
const BAND: u32 = 16;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90Config {
    /// Dtype of x and the weight: f16 or bf16.
    pub elements: Dtype,
    /// Features per tile of the result: 128 or 256.
    pub tile_columns: usize,
    /// Epilogue: bias and result.
    pub epilogue: Epilogue,
}

impl Sm90Config {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        format!("gemm_sm90_128x{}_{}_{}", self.tile_columns, self.elements, self.epilogue.name())
    }

    /// Stages that fit into shared memory.
    fn stages(self) -> usize {
        if self.tile_columns == 256 { 4 } else { 6 }
    }

    /// The tensor maps of x and the weight, which precede the other arguments.
    pub(super) fn maps(self, [x, weight]: [Matrix; 2], [rows, features, inputs]: [u32; 3]) -> Vec<Arg> {
        let map = |matrix: Matrix, rows: u32, box_rows: usize| {
            let stride = matrix.stride * matrix.dtype.size() as u64;
            let map = panel_map(matrix.address, &[inputs.into(), rows.into()], &[stride], box_rows);
            Arg::TensorMap(map.into())
        };
        vec![map(x, rows, TILE_ROWS), map(weight, features, self.tile_columns)]
    }
}

/// Records the kernel. Its parameters are those of [`super::GemmParams::launch`].
///
/// # Errors
/// When `tile_columns` is neither 128 nor 256.
pub fn gemm(name: &str, config: Sm90Config) -> Result<Kernel, Invalid> {
    if !matches!(config.tile_columns, 128 | 256) {
        let why = format!("tile_columns = {}, expected 128 or 256", config.tile_columns);
        return Err(Invalid::of(name, why));
    }
    Builder::dependent_kernel(name, THREADS, |k| {
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
    /// Tensor maps of x and the weight.
    maps: [Value<'k, u64>; 2],
    args: GemmArgs<'k>,
    /// Tile rows and tile columns of the result.
    tiles: (Value<'k, u32>, Value<'k, u32>),
    /// Stages per tile.
    steps: Value<'k, u32>,
    x: SharedTile<'k>,
    weight: SharedTile<'k>,
    ring: Ring<'k>,
}

impl<'k> Sm90Cta<'k> {
    fn new(k: &'k Builder, config: Sm90Config) -> Self {
        let maps = ["x_map", "weight_map"].map(|name| k.tensor_map(name));
        let args = GemmArgs::new(k, config.elements, config.elements, config.epilogue);
        let (columns, stages) = (config.tile_columns as u32, config.stages());
        Self {
            k,
            config,
            maps,
            args,
            tiles: (
                (args.rows + (TILE_ROWS - 1) as u32) / TILE_ROWS as u32,
                (args.features + (columns - 1)) / columns,
            ),
            steps: ((args.inputs + (DEPTH - 1) as u32) / DEPTH as u32).named("steps"),
            x: SharedTile::new(k, "x_tile", TILE_ROWS, DEPTH, stages),
            weight: SharedTile::new(k, "weight_tile", config.tile_columns, DEPTH, stages),
            ring: Ring::new(k, "ring", stages),
        }
    }

    fn init(&self) {
        let k = self.k;
        k.when(k.thread().eq(0), || {
            self.ring.init(k, 1, CONSUMERS);
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
                    let full = cursor.fill(self.x.bytes() + self.weight.bytes());
                    let depth = step * DEPTH as u32;
                    let [x_map, weight_map] = self.maps;
                    self.x.stage(cursor.stage()).load_columns(x_map, depth, &[row], full);
                    self.weight.stage(cursor.stage()).load_columns(weight_map, depth, &[column], full);
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
            sums: Sums::unset(k, "sum", cta.config.tile_columns),
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
    }

    /// Issues the products of a stage.
    fn multiply(&self) {
        self.next.wait_full();
        let elements = fragment(self.cta.config.elements);
        let x = self.cta.x.stage(self.next.stage()).from_row(self.index << 6).rows_descriptor();
        let weight = self.cta.weight.stage(self.next.stage()).rows_descriptor();
        self.k.wgmma_fence();
        for step in 0..DEPTH / 16 {
            let (left, right) = (WgmmaLeft::Shared(x.depth_step(step), Major::K), weight.depth_step(step));
            let operands = WgmmaOperands { elements, left, right, right_major: Major::K };
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

    /// Stores the sums of a tile: a lane has two adjacent features of two rows, per eight features.
    fn store(&self, row: Value<'k, u32>, column: Value<'k, u32>) {
        let (warp, lane) = ((self.thread >> 5).named("warp_of_group"), self.k.lane());
        let row = row + (self.index << 6) + (warp << 4) + (lane >> 2);
        let feature = column + ((lane & 3) << 1);
        for (block, sums) in (0..).zip(self.sums.registers().chunks_exact(4)) {
            for (half, pair) in (0..).zip(sums.chunks_exact(2)) {
                let pair = [pair[0].get(), pair[1].get()];
                self.cta.args.store(row + 8 * half, feature + 8 * block, &pair);
            }
        }
    }
}
