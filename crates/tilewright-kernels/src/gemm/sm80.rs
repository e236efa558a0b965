//! GEMM of 16-bit elements with f32 accumulation for Ampere and later: a `cp.async` pipeline feeds `mma.sync`.
//!
//! ```text
//! CTA       a 128 × 128 tile of the result, 8 warps of 64 × 32; or 64 × 64, 4 warps of 32 × 32
//! loop      copy stage s + 2 of x and the weight (64 inputs each) during the products of stage s
//! epilogue  results stored from registers
//! ```
//!
//! Shapes: x `[rows, inputs]`, weight `[features, inputs]` of one dtype; addresses and strides are aligned to 16
//! bytes. Rows, features and inputs are any numbers from 1 on. Grid: `[ceil(features / tile), ceil(rows / tile),
//! segments]`.

use super::{args::GemmArgs, params::Epilogue, skinny::fragment};
use crate::tile::{Elements, SharedTile};
use half::bf16;
use tilewright::Dtype;
use tilewright_ptx::{Builder, Global, GlobalToShared, Invalid, Kernel, Value, Var};

/// Inputs per stage.
const DEPTH: usize = 64;
const STAGES: usize = 3;
/// Elements per 16 bytes.
const CHUNK: u32 = 8;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm80Config {
    /// Dtype of x and the weight: f16 or bf16.
    pub elements: Dtype,
    /// Whether tiles are 128 × 128 instead of 64 × 64.
    pub large: bool,
    /// Epilogue: bias and result.
    pub epilogue: Epilogue,
}

impl Sm80Config {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        format!("gemm_sm80_{}_{}_{}", self.tile(), self.elements, self.epilogue.name())
    }

    /// Rows and features per tile.
    pub fn tile(self) -> usize {
        if self.large { 128 } else { 64 }
    }

    fn threads(self) -> u32 {
        if self.large { 256 } else { 128 }
    }

    /// Rows and features per warp.
    fn warp(self) -> (usize, usize) {
        (self.tile() / 2, 32)
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`super::GemmParams::launch`].
///
/// # Errors
/// None.
pub(crate) fn gemm(name: &str, config: Sm80Config) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, config.threads(), |k| {
        let args = GemmArgs::new(k, config.elements, config.elements, config.epilogue);
        // the grid covers the longest segment
        k.when((k.cta_y() * config.tile() as u32).lt(args.rows), || Sm80Cta::new(k, config, args).run());
    })
}

/// One tile of the result.
struct Sm80Cta<'k> {
    k: &'k Builder,
    config: Sm80Config,
    args: GemmArgs<'k>,
    /// x and the weight.
    operands: [MatrixOperand<'k>; 2],
    steps: Value<'k, u32>,
    /// Row and column of this warp in the tile.
    warp: (Value<'k, u32>, Value<'k, u32>),
    /// `[row block][column block]`, each 16 by 8.
    sums: Vec<Vec<[Var<'k, f32>; 4]>>,
}

/// x or the weight: base and row stride, number of rows, first row of the CTA, shared-memory tile.
#[derive(Clone, Copy)]
struct MatrixOperand<'k> {
    matrix: (Elements<'k>, Value<'k, u64>),
    rows: Value<'k, u32>,
    first: Value<'k, u32>,
    tile: SharedTile<'k>,
}

impl<'k> Sm80Cta<'k> {
    fn new(k: &'k Builder, config: Sm80Config, args: GemmArgs<'k>) -> Self {
        let (tile, warp_tile) = (config.tile(), config.warp());
        // only the element size matters: f16 and bf16 share this layout
        let shared = |name| SharedTile::<bf16>::new(k, name, tile, DEPTH, STAGES);
        let operand = |name, matrix, rows, cta: Value<'k, u32>| MatrixOperand {
            matrix,
            rows,
            first: cta * tile as u32,
            tile: shared(name),
        };
        let (warp, sum) = (k.warp_index(), |_| std::array::from_fn(|_| k.var("d", 0.0)));
        Self {
            k,
            config,
            args,
            operands: [
                operand("x_tile", args.x, args.rows, k.cta_y()),
                operand("weight_tile", args.weight, args.features, k.cta()),
            ],
            steps: ((args.inputs + (DEPTH - 1) as u32) / DEPTH as u32).named("steps"),
            warp: ((warp & 1) * warp_tile.0 as u32, (warp >> 1) * warp_tile.1 as u32),
            sums: (0..warp_tile.0 / 16).map(|_| (0..warp_tile.1 / 8).map(sum).collect()).collect(),
        }
    }

    fn run(&self) {
        let k = self.k;
        for stage in 0..STAGES as u32 - 1 {
            self.copy(k.constant(stage), k.constant(stage));
        }
        let (read_stage, write_stage) = (k.var("reads", 0_u32), k.var("writes", STAGES as u32 - 1));
        k.repeat((0, self.steps), 1, |step| {
            k.wait_copies(STAGES - 2);
            // the copies of all threads have arrived, and the stage to overwrite is no longer read
            k.sync_threads();
            self.copy(step + (STAGES as u32 - 1), write_stage.get());
            self.multiply(read_stage.get());
            for stage in [read_stage, write_stage] {
                let next = stage.get() + 1;
                stage.set(next.unless(next.eq(STAGES as u32), 0));
            }
        });
        self.store();
    }

    /// Starts the copy of 64 inputs from `64 step` on into a stage, zero-filled out of bounds.
    fn copy(&self, step: Value<'k, u32>, stage: Value<'k, u32>) {
        let (k, thread, inputs) = (self.k, self.k.thread(), self.args.inputs);
        let chunk = thread & 7;
        let column = step * DEPTH as u32 + chunk * CHUNK;
        // only in-bounds bytes are read; with none of them, the address is clamped into the matrix
        let left = inputs - inputs.min(column);
        let (bytes, column) = (left.min(CHUNK) * 2, left.eq(0).select(0, column));
        for operand in self.operands {
            for first in (0..self.config.tile() as u32).step_by(self.config.threads() as usize / 8) {
                let row = (thread >> 3) + first;
                let matrix_row = operand.first + row;
                let read = matrix_row.lt(operand.rows).select(bytes, 0);
                let (base, stride) = operand.matrix;
                let from = base.at_wide(matrix_row.min(operand.rows - 1).to_u64() * stride).at(column);
                let to = operand.tile.stage(stage).chunk(row, chunk);
                k.copy_async(GlobalToShared::new(to, Global::new(from.address()), 16), read);
            }
        }
        k.commit_copies();
    }

    /// Accumulates the products of a stage.
    fn multiply(&self, stage: Value<'k, u32>) {
        let (k, lane) = (self.k, self.k.lane());
        let [a, b] = self.operands.map(|operand| operand.tile.stage(stage));
        for step in 0..DEPTH as u32 / 16 {
            // 16 rows × 16 columns: lanes 0–15 address the first 8 columns, lanes 16–31 the second
            let rows = |block: usize| {
                let row = self.warp.0 + (16 * block) as u32 + (lane & 15);
                k.load_matrix::<4, _>(a.chunk(row, (lane >> 4) + 2 * step), false)
            };
            // 16 columns of D: for each 8 columns, the two halves of the depth
            let columns = |block: usize| {
                let column = self.warp.1 + (16 * block) as u32 + ((lane & 7) + ((lane >> 4) << 3));
                k.load_matrix::<4, _>(b.chunk(column, ((lane >> 3) & 1) + 2 * step), false)
            };
            let columns: Vec<_> = (0..self.config.warp().1 / 16).map(columns).collect();
            for (block, sums) in self.sums.iter().enumerate() {
                let rows = rows(block);
                for (at, &sums) in sums.iter().enumerate() {
                    let pair = columns[at / 2];
                    let [low, high] = [pair[2 * (at % 2)], pair[2 * (at % 2) + 1]];
                    k.mma(fragment(self.config.elements), sums, rows, [low, high]);
                }
            }
        }
    }

    /// Rounds the sums and stores those in bounds: two adjacent elements of a row per thread and 8 × 8 block.
    fn store(&self) {
        let (lane, [x, weight]) = (self.k.lane(), self.operands);
        for (block, of_rows) in self.sums.iter().enumerate() {
            for (at, sums) in of_rows.iter().enumerate() {
                for (down, pair) in [(16 * block, [sums[0], sums[1]]), (16 * block + 8, [sums[2], sums[3]])] {
                    let row = x.first + self.warp.0 + down as u32 + (lane >> 2);
                    let feature = weight.first + self.warp.1 + 8 * at as u32 + ((lane & 3) << 1);
                    self.args.store(row, feature, &pair.map(Var::get));
                }
            }
        }
    }
}
