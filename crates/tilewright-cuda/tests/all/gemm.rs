//! Matrix products on the GPU of this machine, against the definition. Skipped without a GPU.

use crate::{hopper, real::noise};
use half::bf16;
use tilewright::Dtype;
use tilewright_cuda::{Result, Stream};
use tilewright_kernels::gemm::{
    Epilogue, GemmKernel, GemmParams, Matrix, sm80,
    sm90::{Sm90Config, TILE_ROWS, gemm},
};
use tilewright_kernels::tile::panel_map;
use tilewright_ptx::sim::Arg;

#[test]
fn products_of_odd_shapes_agree_with_the_definition() -> Result<()> {
    let Some(device) = hopper::device() else { return Ok(()) };
    for shape in [
        [128, 256, 64],
        [1, 8, 8],
        [300, 520, 200],
        [129, 264, 1000],
        [2500, 1000, 72],
        [7, 512, 4096],
        [24, 520, 1032],
    ] {
        for tile_columns in [128, 256] {
            product(&device, Sm90Config { tile_columns }, shape)?;
        }
        product_of_any_gpu(&device, shape)?;
    }
    Ok(())
}

fn product(device: &Stream, config: Sm90Config, [m, n, k]: [usize; 3]) -> Result<()> {
    let kernel = gemm("gemm", config).expect("a valid kernel");
    let function = device.load(&kernel)?;
    let (a, b) = (noise(m * k, 1), noise(n * k, 2));
    let (a_d, b_d) = (device.upload(&a)?, device.upload(&b)?);
    let d_d = device.filled::<u16>(m * n, 0xff)?;
    let map = |address: u64, [rows, columns]: [usize; 2], box_rows: usize| {
        let dims = [columns as u64, rows as u64];
        Arg::TensorMap(panel_map(address, &dims, &[dims[0] * 2], box_rows).into())
    };
    let arguments = [
        map(a_d.address(), [m, k], TILE_ROWS),
        map(b_d.address(), [n, k], config.tile_columns),
        map(d_d.address(), [m, n], 64),
        Arg::U32(m as u32),
        Arg::U32(n as u32),
        Arg::U32(k as u32),
    ];
    let tiles = m.div_ceil(TILE_ROWS) * n.div_ceil(config.tile_columns);
    // fewer CTAs than tiles, so that some process several
    device.launch(&function, [tiles.min(7) as u32, 1, 1], &arguments)?;
    device.synchronize()?;
    judge((&a, &b, &d_d.download()?), [m, n, k]);
    Ok(())
}

/// The kernels of the backend: its choice for the shape, and both tile sizes for tensor cores.
fn product_of_any_gpu(device: &Stream, [m, n, k]: [usize; 3]) -> Result<()> {
    let (a, b) = (noise(m * k, 1), noise(n * k, 2));
    let (a_d, b_d) = (device.upload(&a)?, device.upload(&b)?);
    let matrix = |address, stride: usize| Matrix { dtype: Dtype::Bf16, address, stride: stride as u64 };
    let epilogue = Epilogue { bias: None, out: Dtype::Bf16, paired: true, grouped: false };
    let tiles = [false, true]
        .map(|large| GemmKernel::Sm80(sm80::Sm80Config { elements: Dtype::Bf16, large, epilogue }));
    for forced in [None, Some(tiles[0]), Some(tiles[1])] {
        let d_d = device.filled::<u16>(m * n, 0xff)?;
        let product = GemmParams {
            shape: [m, n, k].map(|n| n as u32),
            x: matrix(a_d.address(), k),
            weight: matrix(b_d.address(), k),
            bias: None,
            out: matrix(d_d.address(), n),
            groups: None,
        };
        let choice =
            forced.unwrap_or_else(|| product.choose_kernel(device.context().properties().multiprocessors));
        let (grid, arguments) = product.launch(choice);
        let function = device.load(&choice.kernel("gemm").expect("a valid kernel"))?;
        device.launch(&function, grid, &arguments)?;
        device.synchronize()?;
        judge((&a, &b, &d_d.download()?), [m, n, k]);
    }
    Ok(())
}

fn judge((a, b, d): (&[bf16], &[bf16], &[u16]), [m, n, k]: [usize; 3]) {
    for (at, found) in d.iter().enumerate() {
        let (row, column) = (at / n, at % n);
        let expected: f64 = (0..k).map(|i| a[row * k + i].to_f64() * b[column * k + i].to_f64()).sum();
        let found = bf16::from_bits(*found).to_f64();
        let tolerance = 1e-2 * (k as f64).sqrt().max(expected.abs());
        assert!(
            (found - expected).abs() <= tolerance,
            "{m}x{n}x{k}: d[{row}, {column}] = {found}, expected {expected}"
        );
    }
}
