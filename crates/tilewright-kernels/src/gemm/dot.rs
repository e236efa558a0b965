//! GEMM for up to `MAX_ROWS` rows of any dtypes (weight-bandwidth-bound).
//!
//! ```text
//! CTA       4 features; each thread loads 16-byte chunks of each feature's weight and the matching chunks of x
//! epilogue  reduction over lanes, then over warps
//! ```
//!
//! Grid: `[ceil(features / FEATURES), 1, 1]`. The accumulation order of a row does not depend on other rows.

use super::{args::GemmArgs, params::Epilogue};
use crate::tile::{Chunk, Elements, reduce};
use tilewright::Dtype;
use tilewright_ptx::{Access, Builder, Invalid, Kernel, Value, Var};

/// Maximum number of rows.
pub(crate) const MAX_ROWS: u32 = 8;
/// Features per CTA.
pub(crate) const FEATURES: u32 = 4;
const THREADS: u32 = 128;

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DotConfig {
    /// Dtype of x.
    pub x: Dtype,
    /// Dtype of the weight.
    pub weight: Dtype,
    /// Elements per load.
    pub width: u32,
    /// Row capacity, at least the number of rows: 1, 2, 4 or 8.
    pub rows: u32,
    /// Epilogue: bias and result.
    pub epilogue: Epilogue,
}

impl DotConfig {
    /// Kernel name, unique per configuration.
    pub fn name(self) -> String {
        let Self { x, weight, width, rows, epilogue } = self;
        format!("gemm_dot{rows}_{x}_{weight}_{width}_{}", epilogue.name())
    }
}

/// Records the kernel of a configuration. Its parameters are those of [`super::GemmParams::launch`].
///
/// # Errors
/// None.
pub(crate) fn dot(name: &str, config: DotConfig) -> Result<Kernel, Invalid> {
    let rows = config.rows as usize;
    Builder::kernel(name, THREADS, |k| {
        let args = GemmArgs::new(k, config.x, config.weight, config.epilogue);
        let first = (k.cta() * FEATURES).named("feature");
        args.begin_dependent(first, FEATURES, THREADS);
        let sums: Vec<Vec<Var<'_, f32>>> =
            (0..rows).map(|_| (0..FEATURES).map(|_| k.var("sum", 0.0)).collect()).collect();
        DotProducts {
            config,
            // out-of-range rows and features repeat the last one and are not stored
            x: (0..config.rows).map(|row| args.x_row(k.constant(row).min(args.rows - 1))).collect(),
            weights: (0..FEATURES).map(|i| args.weight_row((first + i).min(args.features - 1))).collect(),
            sums: &sums,
        }
        .multiply(k, args.inputs);
        let memory = k.shared::<f32>("sums", rows * FEATURES as usize * THREADS as usize / 32, 16);
        let warp_sums = memory.at((k.thread() >> 5) * (config.rows * FEATURES));
        for (at, sum) in sums.iter().flatten().enumerate() {
            let sum = reduce::warp_sum(sum.get());
            k.when((k.thread() & 31).eq(0), || warp_sums.plus(at).store(sum));
        }
        k.sync_threads();
        k.when(k.thread().lt(config.rows), || {
            let row = k.thread();
            let sum = |feature: usize| -> Value<'_, f32> {
                let of = memory.at(row * FEATURES).plus(feature);
                let all =
                    (0..THREADS as usize / 32).map(|warp| of.plus(warp * rows * FEATURES as usize).load());
                all.fold(k.constant(0.0), |sum, part| sum + part)
            };
            let sums: Vec<_> = (0..FEATURES as usize).map(sum).collect();
            args.store(row, first, &sums);
        });
    })
}

/// The products of a thread.
struct DotProducts<'a, 'k> {
    config: DotConfig,
    x: Vec<Elements<'k>>,
    weights: Vec<Elements<'k>>,
    /// By row, then feature.
    sums: &'a [Vec<Var<'k, f32>>],
}

impl<'k> DotProducts<'_, 'k> {
    /// Adds the products of every `THREADS`-th chunk, two at a time.
    fn multiply(&self, k: &'k Builder, inputs: Value<'k, u32>) {
        let step = THREADS * self.config.width;
        let at = k.var("input", k.thread() * self.config.width);
        k.loop_(|| {
            k.break_if((at.get() + step).ge(inputs));
            self.accumulate(&[at.get(), at.get() + step]);
            at.set(at.get() + 2 * step);
        });
        k.when(at.get().lt(inputs), || self.accumulate(&[at.get()]));
    }

    /// Adds the products of chunks, whose weights are in flight together.
    fn accumulate(&self, chunks: &[Value<'k, u32>]) {
        let width = self.config.width;
        let load = |rows: &[Elements<'k>], at: Value<'k, u32>, access| -> Vec<Chunk<'k>> {
            rows.iter().map(|row| row.at(at).load(width, access)).collect()
        };
        let loaded: Vec<_> = chunks.iter().map(|&at| load(&self.weights, at, Access::Streaming)).collect();
        for (&at, weights) in chunks.iter().zip(loaded) {
            let x = load(&self.x, at, Access::ReadOnly);
            let weights: Vec<_> = weights.iter().map(Chunk::numbers).collect();
            for (x, sums) in x.iter().map(Chunk::numbers).zip(self.sums) {
                for (weight, sum) in weights.iter().zip(sums) {
                    let all = x.iter().zip(weight);
                    sum.set(all.fold(sum.get(), |sum, (&x, &weight)| x.mul_add(weight, sum)));
                }
            }
        }
    }
}
