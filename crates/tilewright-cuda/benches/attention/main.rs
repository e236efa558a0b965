//! Times attention on the GPU of this machine beside torch and FlashInfer. Skipped without a GPU.
//!
//! Every contender is a graph of at least 10 calls that use three sets of inputs in turn. Contenders take samples in random order,
//! in three protocols. `hot`: its own work for 250 ms directly before a sample of 30 ms. `rested`: a pause of 150 ms before. `cold`: the
//! same pause, then the median of 21 graphs of one call, each after a read of 512 MiB that flushes L2.
//! A row is a contender in a protocol: median, 20th and 80th percentile of the seconds per call, with SM clock and power.

mod case;
#[path = "../contender/mod.rs"]
mod contender;
mod ours;

use case::Case;
use contender::{Bench, BenchCase, OurGraph, Protocol};
use ours::Ours;
use std::error::Error;
use tilewright_cuda::Cuda;

const BENCH: Bench = Bench {
    name: "attention",
    script: concat!(
        include_str!("../../../../benches/peers/contenders.py"),
        include_str!("../../../../benches/peers/gpu_attention.py")
    ),
    columns: "tflops,tbps,floor_ratio",
    protocols: &[
        Protocol { name: "hot", hot: 0.25, rest: 0.0, least: 0.03, cold: 0 },
        Protocol { name: "rested", hot: 0.0, rest: 0.15, least: 0.0, cold: 0 },
        Protocol { name: "cold", hot: 0.0, rest: 0.15, least: 0.0, cold: 21 },
    ],
};

fn main() -> Result<(), Box<dyn Error>> {
    BENCH.run(&Case::all()?)
}

impl BenchCase for Case {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn request(&self) -> String {
        self.request()
    }

    fn graph(&self, gpu: &Cuda) -> Result<OurGraph, Box<dyn Error>> {
        let ours = Ours::new(gpu, self)?;
        let body = ours.describe().lines().next().unwrap_or_default().to_owned();
        println!("# {}: {body}; plan {:.1} us", self.name, ours.plan_seconds * 1e6);
        OurGraph::new(gpu, ours::SETS, ours, Ours::run)
    }

    fn columns(&self, contender: &str, median: f64) -> String {
        let (flops, bytes, floor) = match contender {
            "matmul" => (2.0 * 8192_f64.powi(3), 3.0 * 2.0 * 8192_f64.powi(2), String::new()),
            _ => (self.flops(), self.bytes(), format!("{:.3}", median / self.floor())),
        };
        format!("{:.1},{:.3},{floor}", flops / median * 1e-12, bytes / median * 1e-12)
    }
}
