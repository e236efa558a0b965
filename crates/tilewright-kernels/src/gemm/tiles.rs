//! GEMM of any dtypes in f32, on CUDA cores: for dtypes, alignments or accuracy that tensor cores do not support.
//!
//! ```text
//! CTA    a 64 × 64 tile of the result; 256 threads, each 4 × 4
//! loop   load and widen the next 16 inputs of both operands during the products of the current 16
//! ```
//!
//! Grid: `[ceil(features / TILE), ceil(rows / TILE), segments]`. Each result is one chain of multiply-adds over its
//! inputs, so the bits of a row do not depend on its batch peers.

use super::{args::GemmArgs, params::Epilogue};
use crate::tile::{Chunk, Elements};
use tilewright::Dtype;
use tilewright_ptx::{Access, Builder, Invalid, Kernel, Shared, Value, Var};

/// Rows and features per CTA.
pub(crate) const TILE: u32 = 64;
/// Inputs per step.
const DEPTH: u32 = 16;
const THREADS: u32 = 256;
/// Rows and features per thread.
const THREAD_TILE: u32 = 4;
/// Row pitch in shared memory: keeps 16-byte alignment and limits bank conflicts along columns.
const PITCH: u32 = TILE + 4;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TilesConfig {
    /// Dtype of x.
    pub x: Dtype,
    /// Dtype of the weight.
    pub weight: Dtype,
    /// Elements per load: 1 or 4.
    pub width: u32,
    /// Epilogue: bias and result.
    pub epilogue: Epilogue,
}

impl TilesConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        format!("gemm_tiles_{}_{}_{}_{}", self.x, self.weight, self.width, self.epilogue.name())
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`super::GemmParams::launch`].
///
/// # Errors
/// None.
pub(crate) fn gemm(name: &str, config: TilesConfig) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, THREADS, |k| {
        let args = GemmArgs::new(k, config.x, config.weight, config.epilogue);
        let first = (k.cta_y() * TILE, k.cta() * TILE);
        k.when(first.0.lt(args.rows), || {
            let memory = |name| k.shared::<f32>(name, (DEPTH * PITCH) as usize, 16);
            let sum = || std::array::from_fn(|_| k.var("sum", 0.0));
            let x = TileOperand {
                k,
                width: config.width,
                memory: memory("x_tile"),
                rows: args.rows,
                first: first.0,
            };
            let weight =
                TileOperand { memory: memory("weight_tile"), rows: args.features, first: first.1, ..x };
            let cta =
                TilesCta { k, args, operands: [x, weight], sums: [(); THREAD_TILE as usize].map(|()| sum()) };
            cta.run();
        });
    })
}

/// x or the weight.
#[derive(Clone, Copy)]
struct TileOperand<'k> {
    k: &'k Builder,
    width: u32,
    /// `[DEPTH][PITCH]`, transposed: tile rows are contiguous.
    memory: Shared<'k, f32>,
    rows: Value<'k, u32>,
    first: Value<'k, u32>,
}

struct TilesCta<'k> {
    k: &'k Builder,
    args: GemmArgs<'k>,
    operands: [TileOperand<'k>; 2],
    /// `[row][feature]`
    sums: [[Var<'k, f32>; THREAD_TILE as usize]; THREAD_TILE as usize],
}

impl<'k> TileOperand<'k> {
    /// Tile row and first input of chunk `i` of this thread.
    #[track_caller]
    fn locate(&self, i: u32) -> (Value<'k, u32>, Value<'k, u32>) {
        let chunk = self.k.thread() + i * THREADS;
        let chunks_per_row = DEPTH / self.width;
        (chunk / chunks_per_row, chunk % chunks_per_row * self.width)
    }

    /// Loads this thread's chunks of a step, zeros out of bounds.
    #[track_caller]
    fn load(
        &self,
        row: impl Fn(Value<'k, u32>) -> Elements<'k>,
        step: Value<'k, u32>,
        inputs: Value<'k, u32>,
    ) -> Vec<Chunk<'k>> {
        let load = |i| {
            let (at, input) = self.locate(i);
            let (at, input) = (self.first + at, step + input);
            let inside = at.lt(self.rows) & input.lt(inputs);
            row(at).at(input).load_when(inside, self.width, Access::Weak)
        };
        (0..TILE * DEPTH / THREADS / self.width).map(load).collect()
    }

    #[track_caller]
    fn store_shared(&self, chunks: &[Chunk<'k>]) {
        for (i, chunk) in (0..).zip(chunks) {
            let (row, input) = self.locate(i);
            let to = self.memory.at(input * PITCH + row);
            for (j, number) in chunk.numbers().into_iter().enumerate() {
                to.plus(j * PITCH as usize).store(number);
            }
        }
    }

    /// Four adjacent tile rows at one input.
    #[track_caller]
    fn load_four(&self, input: u32, first: Value<'k, u32>) -> [Value<'k, f32>; THREAD_TILE as usize] {
        self.memory.at(first * THREAD_TILE).plus((input * PITCH) as usize).load_vector()
    }
}

impl<'k> TilesCta<'k> {
    #[track_caller]
    fn load(&self, step: Value<'k, u32>) -> [Vec<Chunk<'k>>; 2] {
        let (args, inputs) = (self.args, self.args.inputs);
        [
            self.operands[0].load(|row| args.x_row(row), step, inputs),
            self.operands[1].load(|feature| args.weight_row(feature), step, inputs),
        ]
    }

    /// Accumulates the products of one input.
    #[track_caller]
    fn accumulate(
        &self,
        x: [Value<'k, f32>; THREAD_TILE as usize],
        weight: [Value<'k, f32>; THREAD_TILE as usize],
    ) {
        for (sums, x) in self.sums.iter().zip(x) {
            sums.iter().zip(weight).for_each(|(sum, weight)| sum.set(x.mul_add(weight, sum.get())));
        }
    }

    fn run(&self) {
        let (k, thread) = (self.k, self.k.thread());
        let (thread_row, thread_column) = (thread / (TILE / THREAD_TILE), thread % (TILE / THREAD_TILE));
        k.repeat((0, self.args.inputs), DEPTH, |step| {
            let loaded = self.load(step);
            // every thread has finished reading the previous step
            k.sync_threads();
            self.operands.iter().zip(&loaded).for_each(|(operand, chunks)| operand.store_shared(chunks));
            k.sync_threads();
            (0..DEPTH).for_each(|input| {
                self.accumulate(
                    self.operands[0].load_four(input, thread_row),
                    self.operands[1].load_four(input, thread_column),
                );
            });
        });
        let (row, feature) = (
            self.operands[0].first + thread_row * THREAD_TILE,
            self.operands[1].first + thread_column * THREAD_TILE,
        );
        for (i, sums) in (0..THREAD_TILE).zip(&self.sums) {
            let sums: Vec<_> = sums.iter().map(|sum| sum.get()).collect();
            self.args.store(row + i, feature, &sums);
        }
    }
}
