//! Times token sampling on the GPU of this machine beside torch and FlashInfer. Skipped without a GPU.
//!
//! Every contender is a graph of at least 10 calls. `warm` cases sample the same logits in each call, which stay in L2 up to
//! 64 rows; `cold` cases rotate over at least 256 MB. The kernel is launched alone: parameters are on the device, and
//! outcomes stay there. A row is a contender: median, 20th and 80th percentile of the seconds per call.

mod case;
#[path = "../contender/mod.rs"]
mod contender;

use case::Case;
use contender::{Bench, Protocol};
use std::error::Error;

const BENCH: Bench = Bench {
    name: "sampling",
    script: concat!(
        include_str!("../../../../benches/peers/contenders.py"),
        include_str!("../../../../benches/peers/gpu_sampling.py")
    ),
    columns: "tbps",
    // own work for 100 ms, then a sample of 20 ms
    protocols: &[Protocol { name: "hot", hot: 0.1, rest: 0.0, least: 0.02, cold: 0 }],
};

fn main() -> Result<(), Box<dyn Error>> {
    BENCH.run(&Case::all())
}
