//! GEMM for 2–32 rows of 16-bit elements on tensor cores (weight-bandwidth-bound).
//!
//! ```text
//! CTA       16 features; 8 or 16 warps split the inputs
//! loop      16 bytes of a row per lane, loaded directly into fragments: two MMAs of 16 inputs
//! epilogue  reduction over warps
//! ```
//!
//! The weight is the A operand of `mma.sync`, x is B. The K order is arbitrary as long as both operands use the same
//! one, so the fragment of a lane holds the eight inputs of one 16-byte load.
//!
//! x and weight are aligned to 16 bytes; inputs are a multiple of 8. Grid: `[ceil(features / FEATURES), 1, 1]`. The
//! accumulation order of a row does not depend on other rows.

use super::{args::GemmArgs, params::Epilogue};
use crate::tile::Elements;
use tilewright::Dtype;
use tilewright_ptx::{Access, Builder, Elements as Fragment, Global, Invalid, Kernel, Shared, Value, Var};

/// Features per CTA.
pub(crate) const FEATURES: u32 = 16;
/// Inputs per lane and load, and per warp.
const CHUNK: u32 = 8;
const WARP_DEPTH: u32 = 4 * CHUNK;
/// Row pitch of partial sums in shared memory, without bank conflicts among the lanes of a warp.
const PITCH: u32 = FEATURES + 4;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SkinnyConfig {
    /// Dtype of x and the weight: f16 or bf16.
    pub elements: Dtype,
    /// Warps per CTA: 8, or 16 if there are few CTAs.
    pub warps: u32,
    /// Row capacity, at least the number of rows: 8, 16 or 32.
    pub rows: u32,
    /// Epilogue: bias and result.
    pub epilogue: Epilogue,
}

impl SkinnyConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let Self { warps, rows, elements, epilogue } = self;
        format!("gemm_skinny{rows}x{warps}_{elements}_{}", epilogue.name())
    }
}

/// Operand type of `mma.sync` for a dtype.
pub(super) fn fragment(dtype: Dtype) -> Fragment {
    if dtype == Dtype::F16 { Fragment::F16 } else { Fragment::Bf16 }
}

/// Records the kernel of a configuration. Its parameters are those of [`super::GemmParams::launch`].
///
/// # Errors
/// None.
pub(crate) fn gemm(name: &str, config: SkinnyConfig) -> Result<Kernel, Invalid> {
    Builder::kernel(name, 32 * config.warps, |k| {
        let args = GemmArgs::new(k, config.elements, config.elements, config.epilogue);
        let first = (k.cta() * FEATURES).named("feature");
        args.begin_dependent(first, FEATURES, 32 * config.warps);
        let memory = k.shared::<f32>("sums", (config.warps * config.rows * PITCH) as usize, 16);
        let sums: Vec<[Var<'_, f32>; 4]> =
            (0..config.rows / 8).map(|_| std::array::from_fn(|_| k.var("sum", 0.0))).collect();
        let cta = SkinnyCta { k, config, args, first, memory };
        cta.multiply(&sums);
        cta.store_partials(&sums);
        k.sync_threads();
        cta.store();
    })
}

struct SkinnyCta<'k> {
    k: &'k Builder,
    config: SkinnyConfig,
    args: GemmArgs<'k>,
    /// First feature of the CTA.
    first: Value<'k, u32>,
    /// `[warps][rows][PITCH]`
    memory: Shared<'k, f32>,
}

impl<'k> SkinnyCta<'k> {
    fn multiply(&self, sums: &[[Var<'k, f32>; 4]]) {
        let (k, args, group) = (self.k, self.args, self.k.lane() >> 2);
        // loads in flight per warp, in units of `WARP_DEPTH` inputs
        let unroll = if sums.len() == 1 { 4 } else { 2 };
        // out-of-range rows and features repeat the last one and are not stored
        let rows: Vec<_> =
            (0..sums.len() as u32).map(|i| args.x_row((group + 8 * i).min(args.rows - 1))).collect();
        let features = [0, 8].map(|half| args.weight_row((self.first + group + half).min(args.features - 1)));
        let begin = k.warp_index() * (WARP_DEPTH * unroll);
        k.repeat((begin, args.inputs), self.config.warps * WARP_DEPTH * unroll, |at| {
            let at = at + (k.lane() & 3) * CHUNK;
            let load = |row: &Elements<'k>, piece: u32, access| {
                let from = row.at(at).plus(piece * WARP_DEPTH);
                self.load_words(from, (at + piece * WARP_DEPTH).lt(args.inputs), access)
            };
            let loaded: Vec<_> = (0..unroll)
                .map(|piece| {
                    let left = features.each_ref().map(|row| load(row, piece, Access::Streaming));
                    let right: Vec<_> = rows.iter().map(|row| load(row, piece, Access::ReadOnly)).collect();
                    (left, right)
                })
                .collect();
            for (left, right) in loaded {
                sums.iter().zip(right).for_each(|(sums, x)| self.accumulate(*sums, left, x));
            }
        });
    }

    /// Accumulates the products of a lane: 16 features by eight rows.
    #[track_caller]
    fn accumulate(
        &self,
        sums: [Var<'k, f32>; 4],
        [low, high]: [[Value<'k, u32>; 4]; 2],
        x: [Value<'k, u32>; 4],
    ) {
        for i in [0, 2] {
            let left = [low[i], high[i], low[i + 1], high[i + 1]];
            self.k.mma(fragment(self.config.elements), sums, left, [x[i], x[i + 1]]);
        }
    }

    /// Loads 16 bytes, or zeros out of bounds.
    #[track_caller]
    fn load_words(
        &self,
        from: Elements<'k>,
        in_bounds: Value<'k, bool>,
        access: Access,
    ) -> [Value<'k, u32>; 4] {
        let words: [Var<'k, u32>; 4] = std::array::from_fn(|_| self.k.var("word", 0));
        self.k.when(in_bounds, || {
            let loaded = Global::<u32>::new(from.address()).load_vector_with::<4>(access);
            words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
        });
        words.map(Var::get)
    }

    /// Writes the partial sums of a warp to shared memory.
    fn store_partials(&self, sums: &[[Var<'k, f32>; 4]]) {
        let (k, group, pair) = (self.k, self.k.lane() >> 2, (self.k.lane() & 3) << 1);
        let warp_sums = self.memory.at(k.warp_index() * (self.config.rows * PITCH));
        for (i, sums) in (0..).zip(sums) {
            let at = warp_sums.at((pair + 8 * i) * PITCH + group);
            for (sum, place) in sums.iter().zip([0, PITCH, 8, PITCH + 8]) {
                at.plus(place as usize).store(sum.get());
            }
        }
    }

    /// Reduces the partial sums over warps and stores two features per thread.
    fn store(&self) {
        let (k, rows) = (self.k, self.config.rows);
        let (row, feature) = (k.thread() / (FEATURES / 2), k.thread() % (FEATURES / 2) * 2);
        k.when(row.lt(rows), || {
            let at = self.memory.at(row * PITCH + feature);
            let parts =
                (0..self.config.warps).map(|warp| at.plus((warp * rows * PITCH) as usize).load_vector::<2>());
            let zero = k.constant(0.0);
            let sums = parts.fold([zero; 2], |sums, part| [sums[0] + part[0], sums[1] + part[1]]);
            self.args.store(row, self.first + feature, &sums);
        });
    }
}
