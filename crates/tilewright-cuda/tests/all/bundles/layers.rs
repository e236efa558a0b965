//! Norms, activations, products and rows.

use super::{DTYPES, judge, memory, view, view_mut};
use tilewright::{
    Result,
    activation::{gelu_and_mul, gelu_tanh_and_mul, silu_and_mul},
    gather::gather_rows,
    gemm::linear,
    norm::{fused_add_rmsnorm, rmsnorm, rmsnorm_in_place},
};

const TOKENS: usize = 4;
/// Hidden sizes of common models.
const HIDDEN: [usize; 12] = [896, 1024, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 7168, 8192];

#[test]
fn norms() {
    judge(|gpu| {
        for dtype in DTYPES {
            let heads: Vec<Vec<usize>> = [64, 128].map(|dim| vec![TOKENS, 8, dim]).into();
            for shape in HIDDEN.map(|hidden| vec![TOKENS, hidden]).into_iter().chain(heads) {
                let width = shape[shape.len() - 1];
                let (mut x, mut out) = (memory(gpu, &shape), memory(gpu, &shape));
                let weight = memory(gpu, &[width]);
                let weight = || view(&weight, dtype, &[width]);
                rmsnorm(gpu, view(&x, dtype, &shape), weight(), 1e-6, view_mut(&mut out, dtype, &shape))?;
                rmsnorm_in_place(gpu, view_mut(&mut x, dtype, &shape), weight(), 1e-6)?;
                if shape.len() == 2 {
                    let (x, residual) = (view_mut(&mut x, dtype, &shape), view_mut(&mut out, dtype, &shape));
                    fused_add_rmsnorm(gpu, x, residual, weight(), 1e-6)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn activations_and_rows() {
    judge(|gpu| {
        for dtype in DTYPES {
            let (shape, hidden) = ([TOKENS, 2 * 14_336], [TOKENS, 14_336]);
            let (x, mut out, ids) = (memory(gpu, &shape), memory(gpu, &hidden), memory(gpu, &[TOKENS]));
            silu_and_mul(gpu, view(&x, dtype, &shape), view_mut(&mut out, dtype, &hidden))?;
            gelu_and_mul(gpu, view(&x, dtype, &shape), view_mut(&mut out, dtype, &hidden))?;
            gelu_tanh_and_mul(gpu, view(&x, dtype, &shape), view_mut(&mut out, dtype, &hidden))?;
            let table = view(&x, dtype, &hidden);
            gather_rows(gpu, table, ids.indices(0, TOKENS)?, view_mut(&mut out, dtype, &hidden))?;
        }
        Ok(())
    });
}

#[test]
fn products() {
    judge(|gpu| {
        for dtype in DTYPES {
            for rows in [1, 2, 3, 4, 8, 16, 32, 64, 100, 512] {
                for features in [1024, 4096, 14_336] {
                    let (x, weight) = (memory(gpu, &[rows, 512]), memory(gpu, &[features, 512]));
                    let (bias, mut out) = (memory(gpu, &[features]), memory(gpu, &[rows, features]));
                    for bias in [None, Some(view(&bias, dtype, &[features]))] {
                        let (x, weight) =
                            (view(&x, dtype, &[rows, 512]), view(&weight, dtype, &[features, 512]));
                        linear(gpu, x, weight, bias, view_mut(&mut out, dtype, &[rows, features]))?;
                    }
                }
            }
        }
        Ok::<_, tilewright::Error>(())
    });
}

#[test]
fn nothing_else_is_in_the_bundle_of_these_tests() {
    // a kernel of no model: the machine reports it
    let gpu = tilewright_cuda::Gpu::new(super::BundledMachine::new(90));
    let shape = [TOKENS, 8];
    let (x, mut out, weight) = (memory(&gpu, &shape), memory(&gpu, &shape), memory(&gpu, &[8]));
    let f32 = tilewright::Dtype::F32;
    let done: Result<()> =
        rmsnorm(&gpu, view(&x, f32, &shape), view(&weight, f32, &[8]), 1e-6, view_mut(&mut out, f32, &shape));
    done.expect("the machine launches nothing");
    let missing = gpu.machine().missing.lock().expect("no panic").clone();
    assert_eq!(missing, ["rmsnorm_f32_f32_4_2x1"]);
}
