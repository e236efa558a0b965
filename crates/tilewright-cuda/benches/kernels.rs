//! Times matrix products on the GPU of this machine beside torch (cuBLAS). Skipped without a GPU.
//!
//! Every contender is a graph of at least 10 calls on the same matrices. A row is a contender: median, 20th and 80th percentile of
//! the seconds per call.

mod contender;

use contender::{Bench, BenchCase, OurGraph, Protocol};
use half::bf16;
use std::error::Error;
use tilewright::Dtype;
use tilewright_cuda::{Cuda, machine::Machine};
use tilewright_kernels::gemm::{Epilogue, GemmKernel, GemmParams, Matrix, sm80, sm90};

const BENCH: Bench = Bench {
    name: "kernels",
    script: concat!(
        include_str!("../../../benches/peers/contenders.py"),
        include_str!("../../../benches/peers/gpu_gemm.py")
    ),
    columns: "tflops",
    protocols: &[Protocol { name: "hot", hot: 0.1, rest: 0.0, least: 0.02, cold: 0 }],
};

const CASES: [Case; 6] = [
    Case { tile_columns: None, shape: [8192, 8192, 8192] },
    Case { tile_columns: Some(256), shape: [8192, 8192, 8192] },
    Case { tile_columns: Some(128), shape: [8192, 8192, 8192] },
    Case { tile_columns: Some(256), shape: [4096, 4096, 4096] },
    Case { tile_columns: Some(128), shape: [512, 4096, 4096] },
    Case { tile_columns: Some(256), shape: [16384, 4096, 4096] },
];

/// `D = A · Bᵀ` in bf16.
struct Case {
    /// Tile columns of the kernel of Hopper; `None` is that of Ampere.
    tile_columns: Option<usize>,
    /// Rows, features and inputs.
    shape: [usize; 3],
}

fn main() -> Result<(), Box<dyn Error>> {
    BENCH.run(&CASES)
}

impl BenchCase for Case {
    fn name(&self) -> String {
        let kernel = self.tile_columns.map_or_else(|| "sm80".to_owned(), |columns| columns.to_string());
        let [rows, features, inputs] = self.shape;
        format!("gemm.{kernel}.{rows}x{features}x{inputs}")
    }

    fn graph(&self, gpu: &Cuda) -> Result<OurGraph, Box<dyn Error>> {
        let ([rows, features, inputs], elements) = (self.shape, Dtype::Bf16);
        let epilogue = Epilogue { bias: None, out: elements, paired: true, grouped: false };
        let kernel = match self.tile_columns {
            Some(tile_columns) => GemmKernel::Sm90(sm90::Sm90Config { elements, tile_columns, epilogue }),
            None => GemmKernel::Sm80(sm80::Sm80Config { elements, large: true, epilogue }),
        };
        let upload = |len| gpu.upload(bytemuck::cast_slice(&noise(len)));
        let (x, weight) = (upload(rows * inputs)?, upload(features * inputs)?);
        let out = gpu.allocate(rows * features * elements.size())?;
        let matrix = |address, stride: usize| Matrix { dtype: elements, address, stride: stride as u64 };
        let product = GemmParams {
            shape: self.shape.map(|n| n as u32),
            x: matrix(x.address(), inputs),
            weight: matrix(weight.address(), inputs),
            bias: None,
            out: matrix(out.address(), features),
            groups: None,
        };
        let (grid, arguments) = product.launch(kernel, gpu.machine().limits().multiprocessors);
        let function = gpu.machine().load(&kernel.kernel("gemm")?)?;
        let machine = gpu.machine().clone();
        OurGraph::new(gpu, 1, (x, weight, out), move |_, _| machine.launch(&function, grid, &arguments))
    }

    fn request(&self) -> String {
        serde_json::json!({"case": {"gemm": self.shape}}).to_string()
    }

    fn columns(&self, _contender: &str, median: f64) -> String {
        let operations = 2.0 * self.shape.iter().product::<usize>() as f64;
        format!("{:.1}", operations / median * 1e-12)
    }
}

/// Uniform in -0.5..0.5.
fn noise(len: usize) -> Vec<bf16> {
    (0..len as u32)
        .map(|i| bf16::from_f32((i.wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0 - 0.5))
        .collect()
}
