//! Matrix products on the GPU of this machine, against the definition. Skipped without a GPU.

use crate::real::noise;
use half::bf16;
use tilewright::Dtype;
use tilewright_cuda::{Result, Stream};
use tilewright_kernels::gemm::{Epilogue, GemmKernel, GemmParams, Matrix, sm80, sm90};

#[test]
fn products_of_odd_shapes_agree_with_the_definition() -> Result<()> {
    let Some(device) = device() else { return Ok(()) };
    for shape in [
        [128, 256, 64],
        [1, 8, 8],
        [300, 520, 200],
        [129, 264, 1000],
        [2500, 1000, 72],
        [7, 512, 4096],
        [24, 520, 1032],
    ] {
        product(&device, shape)?;
    }
    Ok(())
}

/// The kernels of the backend: its choice for the shape, and all kernels for many rows.
fn product(device: &Stream, [m, n, k]: [usize; 3]) -> Result<()> {
    let (a, b) = (noise(m * k, 1), noise(n * k, 2));
    let (a_d, b_d) = (device.upload(&a)?, device.upload(&b)?);
    let matrix = |address, stride: usize| Matrix { dtype: Dtype::Bf16, address, stride: stride as u64 };
    let epilogue = Epilogue { bias: None, out: Dtype::Bf16, paired: true, grouped: false };
    let elements = Dtype::Bf16;
    let sm80 = [false, true].map(|large| GemmKernel::Sm80(sm80::Sm80Config { elements, large, epilogue }));
    let sm90 = [128, 256]
        .map(|tile_columns| GemmKernel::Sm90(sm90::Sm90Config { elements, tile_columns, epilogue }));
    for forced in [None].into_iter().chain(sm80.into_iter().chain(sm90).map(Some)) {
        let d_d = device.filled::<u16>(m * n, 0xff)?;
        let product = GemmParams {
            shape: [m, n, k].map(|n| n as u32),
            x: matrix(a_d.address(), k),
            weight: matrix(b_d.address(), k),
            bias: None,
            out: matrix(d_d.address(), n),
            groups: None,
        };
        let properties = device.context().properties();
        let (arch, multiprocessors) = (properties.arch, properties.multiprocessors);
        let choice = forced.unwrap_or_else(|| product.choose_kernel(arch, multiprocessors));
        // fewer CTAs than tiles, so that some process several
        let (grid, arguments) = product.launch(choice, 7);
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

/// The GPU if it is Hopper; otherwise prints why the test is skipped.
fn device() -> Option<Stream> {
    match Stream::open(0) {
        Ok(device) if device.context().properties().arch == 90 => Some(device),
        Ok(device) => {
            println!(
                "skipped: {} is sm_{}, the kernel is for sm_90a",
                device.context().properties().name,
                device.context().properties().arch
            );
            None
        }
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}
