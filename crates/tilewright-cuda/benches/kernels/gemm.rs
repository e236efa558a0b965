//! `D = A · Bᵀ` in bf16.

use super::Case;
use half::bf16;
use std::error::Error;
use tilewright::Dtype;
use tilewright_cuda::Stream;
use tilewright_kernels::gemm::{
    GemmParams, Matrix,
    sm90::{Sm90Config, TILE_ROWS, gemm},
};
use tilewright_kernels::tile::panel_map;
use tilewright_ptx::sim::Arg;

/// Tile columns, then rows, columns and depth.
pub(crate) const NAMES: [&str; 5] = [
    "gemm.sm80.8192x8192x8192",
    "gemm.256.8192x8192x8192",
    "gemm.128.8192x8192x8192",
    "gemm.256.4096x4096x4096",
    "gemm.256.16384x4096x4096",
];

/// Passes the case of a name to `time`.
pub(crate) fn with_case<T>(
    device: &Stream,
    name: &str,
    time: impl FnOnce(&Case<'_>) -> Result<T, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    if let Some(shape) = name.strip_prefix("gemm.sm80.") {
        return with_case_sm80(device, name, shape, time);
    }
    let numbers: Vec<usize> = name.split(['.', 'x']).filter_map(|part| part.parse().ok()).collect();
    let &[tile_columns, m, n, k] = &numbers[..] else { return Err(format!("{name} is no case").into()) };
    let function = device.load(&gemm("gemm", Sm90Config { tile_columns })?)?;
    let (a, b) = (device.upload(&noise(m * k))?, device.upload(&noise(n * k))?);
    let d = device.filled::<bf16>(m * n, 0)?;
    let map = |address: u64, [rows, columns]: [usize; 2], box_rows: usize| {
        let dims = [columns as u64, rows as u64];
        Arg::TensorMap(panel_map(address, &dims, &[dims[0] * 2], box_rows).into())
    };
    let arguments = [
        map(a.address(), [m, k], TILE_ROWS),
        map(b.address(), [n, k], tile_columns),
        map(d.address(), [m, n], 64),
        Arg::U32(m as u32),
        Arg::U32(n as u32),
        Arg::U32(k as u32),
    ];
    let tiles = m.div_ceil(TILE_ROWS) * n.div_ceil(tile_columns);
    let grid = [device.context().properties().multiprocessors.min(tiles as u32), 1, 1];
    time(&Case {
        name: name.to_owned(),
        flops: 2.0 * (m * n * k) as f64,
        calls: (1 << 42) / (m * n * k) + 1,
        call: Box::new(|| device.launch(&function, grid, &arguments)),
        request: format!("{{\"gemm\": [{m}, {n}, {k}], \"calls\": {}}}", (1_usize << 42) / (m * n * k) + 1),
    })
}

/// Same for the kernel for Ampere and later.
fn with_case_sm80<T>(
    device: &Stream,
    name: &str,
    shape: &str,
    time: impl FnOnce(&Case<'_>) -> Result<T, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    let numbers: Vec<usize> = shape.split('x').filter_map(|part| part.parse().ok()).collect();
    let &[m, n, k] = &numbers[..] else { return Err(format!("{name} is no case").into()) };
    let (a, b) = (device.upload(&noise(m * k))?, device.upload(&noise(n * k))?);
    let d = device.filled::<bf16>(m * n, 0)?;
    let matrix = |address, stride: usize| Matrix { dtype: Dtype::Bf16, address, stride: stride as u64 };
    let product = GemmParams {
        shape: [m, n, k].map(|n| n as u32),
        x: matrix(a.address(), k),
        weight: matrix(b.address(), k),
        bias: None,
        out: matrix(d.address(), n),
        groups: None,
    };
    let choice = product.choose_kernel(device.context().properties().multiprocessors);
    let (grid, arguments) = product.launch(choice);
    let function = device.load(&choice.kernel("gemm")?)?;
    time(&Case {
        name: name.to_owned(),
        flops: 2.0 * (m * n * k) as f64,
        calls: 5,
        call: Box::new(|| device.launch(&function, grid, &arguments)),
        request: format!("{{\"gemm\": [{m}, {n}, {k}], \"calls\": 5}}"),
    })
}

/// Uniform in -0.5..0.5.
pub(crate) fn noise(len: usize) -> Vec<bf16> {
    (0..len as u32)
        .map(|i| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0 - 0.5))
        .collect()
}
