//! Times token sampling on the GPU of this machine beside torch and FlashInfer. Skipped without a GPU.
//!
//! Every contender is a graph of at least 10 calls. `warm` cases sample the same logits in each call, which stay in L2 up to
//! 64 rows; `cold` cases rotate over at least 256 MB. The kernel is launched alone: parameters are on the device, and
//! outcomes stay there. A row is a contender: median, 20th and 80th percentile of the seconds per call.

mod case;
#[path = "../contender/mod.rs"]
mod contender;
#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../peer/mod.rs"]
mod peer;

use case::{Case, Launch};
use clap::Parser;
use contender::{Contenders, OURS, OurGraph, Protocol, spread};
use peer::Peer;
use std::{error::Error, fmt::Write, path::PathBuf};
use tilewright_cuda::{Cuda, Device, Gpu};

/// The script of the peers.
const SCRIPT: &str = concat!(
    include_str!("../../../../benches/peers/contenders.py"),
    include_str!("../../../../benches/peers/gpu_sampling.py")
);

/// Own work for 100 ms, then a sample of 20 ms.
const PROTOCOL: Protocol = Protocol { name: "hot", hot: 0.1, rest: 0.0, least: 0.02 };

/// Times token sampling on the GPU of this machine, and its peers if given.
#[derive(Parser)]
struct Arguments {
    /// A Python with torch for CUDA, and optionally FlashInfer; without it no peer is timed.
    #[arg(long)]
    peer: Option<String>,
    /// Writes the results to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Number of rounds.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Only cases whose name contains one of these texts, separated by commas.
    #[arg(long)]
    only: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const HEADER: &str = "case,protocol,contender,seconds,p20,p80,tbps,mhz,watts,peers_best_over_this";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let Some(device) = gpu::or_skip(Device::open(0)) else { return Ok(()) };
    let gpu: Cuda = Gpu::new(device);
    let mut peer = arguments.peer.as_deref().map(|python| Peer::start(python, SCRIPT)).transpose()?;
    let context = gpu.machine().stream().context();
    let mut table =
        format!("# device: {}, driver for CUDA {}\n", context.properties().name, context.properties().driver);
    if let Some(peer) = &mut peer {
        writeln!(table, "# peers: {}", peer.about()?)?;
    }
    let rounds = arguments.rounds;
    writeln!(
        table,
        "# command: cargo bench -p tilewright-cuda --bench sampling -- --peer PYTHON --rounds {rounds}\n{HEADER}"
    )?;
    print!("{table}");
    let wanted = |name: &str| match &arguments.only {
        Some(only) => only.split(',').any(|only| name.contains(only)),
        None => true,
    };
    for case in Case::all().iter().filter(|case| wanted(&case.name())) {
        let lines = measure(&gpu, case, peer.as_mut(), rounds)
            .unwrap_or_else(|why| format!("# {}: {why}\n", case.name()));
        print!("{lines}");
        table.push_str(&lines);
        if let Some(file) = &arguments.record {
            std::fs::write(file, &table)?;
        }
    }
    Ok(())
}

/// Samples all contenders of a case; returns the lines of the table.
fn measure(
    gpu: &Cuda,
    case: &Case,
    peer: Option<&mut Peer>,
    rounds: usize,
) -> Result<String, Box<dyn Error>> {
    let launch = Launch::new(gpu, case)?;
    let graph = OurGraph::new(gpu, case.sets(), |set| launch.run(gpu, set))?;
    let mut contenders = Contenders::new(graph, peer, &case.request())?;
    let mut samples = contenders.sample(PROTOCOL, rounds)?;
    let spreads: Vec<_> = samples.iter_mut().map(|samples| spread(samples)).collect();
    let peers = contenders.names.iter().zip(&spreads).filter(|(name, _)| *name != OURS);
    let best = peers.map(|(_, spread)| spread[0]).min_by(f64::total_cmp);
    let mut lines = String::new();
    for ((name, [median, low, high]), samples) in contenders.names.iter().zip(&spreads).zip(&samples) {
        let middle = &samples[samples.len() / 2];
        let ratio =
            best.filter(|_| name == OURS).map_or(String::new(), |best| format!("{:.3}", best / median));
        writeln!(
            lines,
            "{},{},{name},{median:.8},{low:.8},{high:.8},{:.3},{},{},{ratio}",
            case.name(),
            PROTOCOL.name,
            case.bytes() as f64 / median * 1e-12,
            middle.mhz,
            middle.watts,
        )?;
    }
    Ok(lines)
}
