//! GEMM for up to [`MAX_ROWS`] rows of any dtypes (weight-bandwidth-bound).
//!
//! ```text
//! CTA       4 features; each thread loads 16-byte chunks of each feature's weight and the matching chunks of x
//! epilogue  reduction over lanes, then over warps
//! ```
//!
//! Grid: `[ceil(features / FEATURES), 1, 1]`. The accumulation order of a row does not depend on other rows.

use super::{args::GemmArgs, params::Epilogue};
use crate::tile::reduce;
use tilewright::Dtype;
use tilewright_ptx::{
    build::{Builder, Value, Var},
    ir::Kernel,
    isa::memory::Access,
    verify::Invalid,
};

/// Maximum number of rows.
pub const MAX_ROWS: u32 = 8;
/// Features per CTA.
pub const FEATURES: u32 = 4;
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
pub fn dot(name: &str, config: DotConfig) -> Result<Kernel, Invalid> {
    let (rows, width) = (config.rows as usize, config.width);
    Builder::kernel(name, THREADS, |k| {
        let args = GemmArgs::new(k, (config.x, config.weight), config.epilogue);
        let first = (k.cta() * FEATURES).named("feature");
        // out-of-range rows and features repeat the last one and are not stored
        let x: Vec<_> = (0..config.rows).map(|row| args.x_row(k.constant(row).min(args.rows - 1))).collect();
        let weights: Vec<_> =
            (0..FEATURES).map(|i| args.weight_row((first + i).min(args.features - 1))).collect();
        let sums: Vec<Vec<Var<'_, f32>>> =
            (0..rows).map(|_| weights.iter().map(|_| k.var("sum", 0.0)).collect()).collect();
        k.repeat((k.thread() * width, args.inputs), THREADS * width, |at| {
            let loaded: Vec<_> =
                weights.iter().map(|row| row.at(at).load(width, Access::Streaming)).collect();
            let x: Vec<_> = x.iter().map(|row| row.at(at).load(width, Access::ReadOnly)).collect();
            let weights: Vec<_> = loaded.iter().map(|chunk| chunk.numbers()).collect();
            for (x, sums) in x.iter().map(|chunk| chunk.numbers()).zip(&sums) {
                for (weight, sum) in weights.iter().zip(sums) {
                    let all = x.iter().zip(weight);
                    sum.set(all.fold(sum.get(), |sum, (&x, &weight)| x.mul_add(weight, sum)));
                }
            }
        });
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
            args.store((row, first), &sums);
        });
    })
}
