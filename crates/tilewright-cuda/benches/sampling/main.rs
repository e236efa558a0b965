//! Times token sampling on the GPU of this machine beside torch and FlashInfer. Skipped without a GPU.
//!
//! Every contender is a graph of at least 10 calls. `warm` cases sample the same logits in each call, which stay in L2 up to
//! 64 rows; `cold` cases rotate over at least 256 MB. The kernel is launched alone: parameters are on the device, and
//! outcomes stay there. A row is a contender: median, 20th and 80th percentile of the seconds per call.

mod case;
#[path = "../contender/mod.rs"]
mod contender;

use case::{Case, Launch};
use contender::{Bench, BenchCase, OurGraph, Protocol};
use std::error::Error;
use tilewright_cuda::Cuda;

const BENCH: Bench = Bench {
    name: "sampling",
    script: concat!(
        include_str!("../../../../benches/peers/contenders.py"),
        include_str!("../../../../benches/peers/gpu_sampling.py")
    ),
    columns: "tbps",
    // own work for 100 ms, then a sample of 20 ms
    protocols: &[Protocol { name: "hot", hot: 0.1, rest: 0.0, least: 0.02 }],
};

fn main() -> Result<(), Box<dyn Error>> {
    BENCH.run(&Case::all())
}

impl BenchCase for Case {
    fn name(&self) -> String {
        self.name()
    }

    fn request(&self) -> String {
        self.request()
    }

    fn graph(&self, gpu: &Cuda) -> Result<OurGraph, Box<dyn Error>> {
        let device = gpu.clone();
        OurGraph::new(gpu, self.sets(), Launch::new(gpu, self)?, move |launch, set| launch.run(&device, set))
    }

    fn columns(&self, _contender: &str, median: f64) -> String {
        format!("{:.3}", self.bytes() as f64 / median * 1e-12)
    }
}
