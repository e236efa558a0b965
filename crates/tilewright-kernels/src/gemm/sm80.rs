//! `D = A · Bᵀ` on any GPU from Ampere on: bf16 with f32 sums, `cp.async` and `mma.sync`.
//!
//! ```text
//! CTA    a tile of 128 by 128 of D; 8 warps, each 64 by 32
//! loop   copy stage s + 2 of A and B (64 columns each) while the products of stage s are computed
//! end    D from registers
//! ```
//!
//! Shapes: A `[m, k]`, B `[n, k]`, D `[m, n]`, dense, 16-byte aligned; n and k are multiples of 8, and k is at least 8.
//! Grid: `[ceil(n / 128), ceil(m / 128), 1]`.

use crate::tile::SharedTile;
use half::bf16;
use tilewright_ptx::{
    build::{Builder, Global, Value, Var},
    ir::Kernel,
    isa::matrix::Elements,
    verify::Invalid,
};

/// Rows and columns of a tile of D.
pub const TILE: usize = 128;
/// Columns of A and B that a stage holds.
const DEPTH: usize = 64;
const STAGES: usize = 3;
const THREADS: u32 = 256;
/// Rows and columns of a warp.
const WARP: (usize, usize) = (64, 32);
/// Elements of 16 bytes.
const CHUNK: u32 = 8;

/// The kernel. Parameters: a, b, d; m, n, k.
///
/// # Errors
/// None that a caller can provoke.
pub fn gemm(name: &str) -> Result<Kernel, Invalid> {
    Builder::kernel(name, THREADS, |k| Cta::new(k).run())
}

/// One tile of D.
struct Cta<'k> {
    k: &'k Builder,
    /// A and B: where they are, how many rows they have, which is the first of this CTA, where it comes to be.
    operands: [Side<'k>; 2],
    d: Global<'k, bf16>,
    depth: Value<'k, u32>,
    steps: Value<'k, u32>,
    /// The place of this thread's warp in the tile.
    warp: (Value<'k, u32>, Value<'k, u32>),
    /// `[row block][column block]`, each 16 by 8.
    sums: Vec<Vec<[Var<'k, f32>; 4]>>,
}

/// A or B.
#[derive(Clone, Copy)]
struct Side<'k> {
    memory: Global<'k, bf16>,
    rows: Value<'k, u32>,
    first: Value<'k, u32>,
    tile: SharedTile<'k>,
}

impl<'k> Cta<'k> {
    fn new(k: &'k Builder) -> Self {
        let (a, b, d) = (k.global("a"), k.global("b"), k.global("d"));
        let [m, n, depth] = ["m", "n", "k"].map(|name| k.param::<u32>(name));
        let tile = |name| SharedTile::new(k, name, (TILE, DEPTH), STAGES);
        let warp = k.warp_index();
        let sum = |_| std::array::from_fn(|_| k.var("d", 0.0));
        Self {
            k,
            operands: [
                Side { memory: a, rows: m, first: k.cta_y() * TILE as u32, tile: tile("a_tile") },
                Side { memory: b, rows: n, first: k.cta() * TILE as u32, tile: tile("b_tile") },
            ],
            d,
            depth,
            steps: ((depth + (DEPTH - 1) as u32) / DEPTH as u32).named("steps"),
            warp: ((warp & 1) * WARP.0 as u32, (warp >> 1) * WARP.1 as u32),
            sums: (0..WARP.0 / 16).map(|_| (0..WARP.1 / 8).map(sum).collect()).collect(),
        }
    }

    fn run(&self) {
        let k = self.k;
        for stage in 0..STAGES as u32 - 1 {
            self.copy(k.constant(stage), k.constant(stage));
        }
        let (reads, writes) = (k.var("reads", 0_u32), k.var("writes", STAGES as u32 - 1));
        k.repeat((0, self.steps), 1, |step| {
            k.wait_copies(STAGES - 2);
            // all threads' copies are there, and nobody reads the stage that is written next
            k.sync_threads();
            self.copy(step + (STAGES as u32 - 1), writes.get());
            self.multiply(reads.get());
            for stage in [reads, writes] {
                let next = stage.get() + 1;
                stage.set(next.unless(next.eq(STAGES as u32), 0));
            }
        });
        self.store();
    }

    /// Starts copying 64 columns, from `64 step` on, to a stage; what is outside of the matrix becomes 0.
    fn copy(&self, step: Value<'k, u32>, stage: Value<'k, u32>) {
        let (k, thread) = (self.k, self.k.thread());
        let chunk = thread & 7;
        let column = step * DEPTH as u32 + chunk * CHUNK;
        for side in self.operands {
            for first in (0..TILE as u32).step_by(THREADS as usize / 8) {
                let row = (thread >> 3) + first;
                let of_matrix = side.first + row;
                let inside = of_matrix.lt(side.rows) & column.lt(self.depth);
                // nothing is read outside, but the address is one inside
                let at = of_matrix.min(side.rows - 1).to_u64() * self.depth.to_u64()
                    + column.min(self.depth - CHUNK).to_u64();
                let to = side.tile.stage(stage).chunk(row, chunk);
                k.copy_async(to, side.memory.at_wide(at), 16, inside.select::<u32>(16, 0));
            }
        }
        k.commit_copies();
    }

    /// Adds the products of a stage.
    fn multiply(&self, stage: Value<'k, u32>) {
        let (k, lane) = (self.k, self.k.lane());
        let [a, b] = self.operands.map(|side| side.tile.stage(stage));
        for step in 0..DEPTH as u32 / 16 {
            // 16 rows and 16 columns: rows by lanes 0 to 15, the second 8 columns by the others
            let rows = |block: usize| {
                let row = self.warp.0 + (16 * block) as u32 + (lane & 15);
                k.load_matrix::<4, _>(a.chunk(row, (lane >> 4) + 2 * step), false)
            };
            // 16 columns of D: for each 8 both halves of the depth, one after the other
            let columns = |block: usize| {
                let column = self.warp.1 + (16 * block) as u32 + ((lane & 7) + ((lane >> 4) << 3));
                k.load_matrix::<4, _>(b.chunk(column, ((lane >> 3) & 1) + 2 * step), false)
            };
            let columns: Vec<_> = (0..WARP.1 / 16).map(columns).collect();
            for (block, sums) in self.sums.iter().enumerate() {
                let rows = rows(block);
                for (at, &sums) in sums.iter().enumerate() {
                    let of_pair = columns[at / 2];
                    let [low, high] = [of_pair[2 * (at % 2)], of_pair[2 * (at % 2) + 1]];
                    k.mma(Elements::Bf16, sums, rows, [low, high]);
                }
            }
        }
    }

    /// Rounds the sums and writes those that are inside.
    fn store(&self) {
        for (block, of_rows) in self.sums.iter().enumerate() {
            for (at, sums) in of_rows.iter().enumerate() {
                self.store_pair((16 * block, 8 * at), [sums[0], sums[1]]);
                self.store_pair((16 * block + 8, 8 * at), [sums[2], sums[3]]);
            }
        }
    }

    /// Two neighbours of a block of 8 by 8, whose first element is there in the warp's part of the tile.
    fn store_pair(&self, (down, sideways): (usize, usize), [low, high]: [Var<'k, f32>; 2]) {
        let (k, lane, [a, b]) = (self.k, self.k.lane(), self.operands);
        let row = a.first + self.warp.0 + down as u32 + (lane >> 2);
        let column = b.first + self.warp.1 + sideways as u32 + ((lane & 3) << 1);
        k.when(row.lt(a.rows) & column.lt(b.rows), || {
            let to = self.d.at_wide(row.to_u64() * b.rows.to_u64() + column.to_u64());
            to.cast::<u32>().store(k.bf16x2(low.get(), high.get()).reinterpret::<u32>());
        });
    }
}
