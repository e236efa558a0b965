//! Times attention on the GPU of this machine beside torch and FlashInfer. Skipped without a GPU.
//!
//! Every contender is a graph of at least 10 calls that use three sets of inputs in turn. Contenders take samples in random order,
//! in two protocols: `hot` (its own work for 250 ms directly before a sample of 30 ms) and `rested` (a pause of 150 ms before).
//! A row is a contender in a protocol: median, 20th and 80th percentile of the seconds per call, with SM clock and power.

mod case;
#[path = "../contender/mod.rs"]
mod contender;
#[path = "../gpu/mod.rs"]
mod gpu;
mod ours;
#[path = "../peer/mod.rs"]
mod peer;

use case::Case;
use clap::Parser;
use contender::{Contenders, OURS, OurGraph, Protocol, Sample, spread};
use ours::Ours;
use peer::Peer;
use std::{error::Error, fmt::Write, path::PathBuf};
use tilewright_cuda::{Cuda, Device, Gpu};

/// The script of the peers.
const SCRIPT: &str = concat!(
    include_str!("../../../../benches/peers/contenders.py"),
    include_str!("../../../../benches/peers/gpu_attention.py")
);
/// Times attention on the GPU of this machine, and its peers if given.
#[derive(Parser)]
struct Arguments {
    /// A Python with torch for CUDA, and optionally FlashInfer; without it no peer is timed.
    #[arg(long)]
    peer: Option<String>,
    /// Writes the results to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Number of rounds per protocol.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Only cases whose name contains one of these texts, separated by commas.
    #[arg(long)]
    only: Option<String>,
    /// Only this protocol.
    #[arg(long)]
    protocol: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const PROTOCOLS: [Protocol; 2] = [
    Protocol { name: "hot", hot: 0.25, rest: 0.0, least: 0.03 },
    Protocol { name: "rested", hot: 0.0, rest: 0.15, least: 0.0 },
];

const HEADER: &str =
    "case,protocol,contender,seconds,p20,p80,tflops,tbps,floor_ratio,mhz,watts,peers_best_over_this,verdict";

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
    writeln!(
        table,
        "# command: cargo bench -p tilewright-cuda --bench attention -- --peer PYTHON --rounds {}\n{HEADER}",
        arguments.rounds
    )?;
    print!("{table}");
    let wanted = |name: &str| match &arguments.only {
        Some(only) => only.split(',').any(|only| name.contains(only)),
        None => true,
    };
    for case in Case::all()?.iter().filter(|case| wanted(&case.name)) {
        let lines = measure(&gpu, case, peer.as_mut(), &arguments)
            .unwrap_or_else(|why| format!("# {}: {why}\n", case.name));
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
    arguments: &Arguments,
) -> Result<String, Box<dyn Error>> {
    let mut ours = Ours::new(gpu, case)?;
    let body = ours.describe().lines().next().unwrap_or_default().to_owned();
    println!("# {}: {body}; plan {:.1} us", case.name, ours.plan_seconds * 1e6);
    let graph = OurGraph::new(gpu, ours::SETS, |set| ours.run(set))?;
    let mut contenders = Contenders::new(graph, peer, &case.request())?;
    let mut lines = String::new();
    for protocol in PROTOCOLS {
        if arguments.protocol.as_ref().is_some_and(|only| only != protocol.name) {
            continue;
        }
        let mut samples = contenders.sample(protocol, arguments.rounds)?;
        lines.push_str(&table_of(case, protocol, &contenders.names, &mut samples)?);
    }
    Ok(lines)
}

/// The lines of one case and protocol.
fn table_of(
    case: &Case,
    protocol: Protocol,
    names: &[String],
    samples: &mut [Vec<Sample>],
) -> Result<String, Box<dyn Error>> {
    let spreads: Vec<[f64; 3]> = samples.iter_mut().map(|samples| spread(samples)).collect();
    let peers = names.iter().zip(&spreads).filter(|(name, _)| *name != OURS && *name != "matmul");
    let best = peers.map(|(_, spread)| *spread).min_by(|a, b| a[0].total_cmp(&b[0]));
    let mut lines = String::new();
    for ((name, of), samples) in names.iter().zip(&spreads).zip(samples) {
        let [median, low, high] = *of;
        let (flops, bytes) = match name.as_str() {
            "matmul" => (2.0 * 8192_f64.powi(3), 3.0 * 2.0 * 8192_f64.powi(2)),
            _ => (case.flops(), case.bytes()),
        };
        let floor = if name == "matmul" { String::new() } else { format!("{:.3}", median / case.floor()) };
        let middle = &samples[samples.len() / 2];
        let (ratio, verdict) = match best.filter(|_| name == OURS) {
            Some([peer, peer_low, peer_high]) => {
                let verdict = if high < peer_low {
                    "ahead"
                } else if low > peer_high {
                    "behind"
                } else {
                    "equal"
                };
                (format!("{:.3}", peer / median), verdict)
            }
            None => (String::new(), ""),
        };
        writeln!(
            lines,
            "{},{},{name},{median:.8},{low:.8},{high:.8},{:.1},{:.3},{floor},{},{},{ratio},{verdict}",
            case.name,
            protocol.name,
            flops / median * 1e-12,
            bytes / median * 1e-12,
            middle.mhz,
            middle.watts,
        )?;
    }
    Ok(lines)
}
