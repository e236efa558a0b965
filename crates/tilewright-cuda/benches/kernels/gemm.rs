//! `D = A · Bᵀ` in bf16.

use super::Case;
use half::bf16;
use std::error::Error;
use tilewright::Dtype;
use tilewright_cuda::Stream;
use tilewright_kernels::gemm::{Epilogue, GemmKernel, GemmParams, Matrix, sm80, sm90};

/// The kernel: that of Ampere, or tile columns of that of Hopper; then rows, features and inputs.
pub(crate) const NAMES: [&str; 6] = [
    "gemm.sm80.8192x8192x8192",
    "gemm.256.8192x8192x8192",
    "gemm.128.8192x8192x8192",
    "gemm.256.4096x4096x4096",
    "gemm.128.512x4096x4096",
    "gemm.256.16384x4096x4096",
];

/// Passes the case of a name to `time`.
pub(crate) fn with_case<T>(
    device: &Stream,
    name: &str,
    time: impl FnOnce(&Case<'_>) -> Result<T, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    let numbers: Vec<usize> = name.split(['.', 'x']).filter_map(|part| part.parse().ok()).collect();
    let (&[rows, features, inputs], elements) = (numbers.last_chunk().ok_or("no shape")?, Dtype::Bf16);
    let epilogue = Epilogue { bias: None, out: elements, paired: true, grouped: false };
    let kernel = match numbers[..] {
        [tile_columns, _, _, _] => GemmKernel::Sm90(sm90::Sm90Config { elements, tile_columns, epilogue }),
        _ => GemmKernel::Sm80(sm80::Sm80Config { elements, large: true, epilogue }),
    };
    let (x, weight) = (device.upload(&noise(rows * inputs))?, device.upload(&noise(features * inputs))?);
    let out = device.filled::<bf16>(rows * features, 0)?;
    let matrix = |address, stride: usize| Matrix { dtype: elements, address, stride: stride as u64 };
    let product = GemmParams {
        shape: [rows, features, inputs].map(|n| n as u32),
        x: matrix(x.address(), inputs),
        weight: matrix(weight.address(), inputs),
        bias: None,
        out: matrix(out.address(), features),
        groups: None,
    };
    let (grid, arguments) = product.launch(kernel, device.context().properties().multiprocessors);
    let function = device.load(&kernel.kernel("gemm")?)?;
    let products = rows * features * inputs;
    let calls = (1_usize << 42) / products + 1;
    time(&Case {
        name: name.to_owned(),
        flops: 2.0 * products as f64,
        calls,
        call: Box::new(|| device.launch(&function, grid, &arguments)),
        request: format!("{{\"gemm\": [{rows}, {features}, {inputs}], \"calls\": {calls}}}"),
    })
}

/// Uniform in -0.5..0.5.
pub(crate) fn noise(len: usize) -> Vec<bf16> {
    (0..len as u32)
        .map(|i| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0 - 0.5))
        .collect()
}
