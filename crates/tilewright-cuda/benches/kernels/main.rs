//! Times kernels on the GPU of this machine, in alternating rounds with torch (cuBLAS, cuDNN). Skipped without a GPU.

mod gemm;
#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../peer/mod.rs"]
mod peer;

use clap::Parser;
use peer::Peer;
use std::{error::Error, fmt::Write, path::PathBuf};
use tilewright_cuda::{Stopwatch, Stream};

const SCRIPT: &str = include_str!("peer.py");

/// Times kernels on the GPU of this machine, and torch if given.
#[derive(Parser)]
struct Arguments {
    /// A Python with torch for CUDA; without it no peer is timed.
    #[arg(long)]
    peer: Option<String>,
    /// Writes the results to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Number of rounds; the median counts.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Only cases whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A response of the peer.
#[derive(serde::Deserialize)]
struct Seconds {
    seconds: f64,
}

/// A timed kernel: name, operations per call, and the call.
pub(crate) struct Case<'a> {
    pub(crate) name: String,
    /// Floating-point operations per call.
    pub(crate) flops: f64,
    /// Calls per round, enough to hide the launch overhead.
    pub(crate) calls: usize,
    pub(crate) call: Box<dyn Fn() -> tilewright_cuda::Result<()> + 'a>,
    /// The request to the peer.
    pub(crate) request: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let Some(device) = gpu::or_skip(Stream::open(0)) else { return Ok(()) };
    let mut peer = arguments.peer.as_deref().map(|python| Peer::start(python, SCRIPT)).transpose()?;
    let mut table = format!("# device: {}\n", device.context().properties().name);
    if let Some(peer) = &mut peer {
        writeln!(table, "# peer: {}", peer.about()?)?;
    }
    writeln!(
        table,
        "# command: cargo bench -p tilewright-cuda --bench kernels -- --peer PYTHON --rounds {}",
        arguments.rounds
    )?;
    writeln!(table, "case,seconds_median,seconds_min,tflops,peer_seconds,peer_tflops,speedup")?;
    print!("{table}");
    let wanted = |name: &str| arguments.only.as_ref().is_none_or(|only| name.contains(only));
    let stopwatch = device.stopwatch()?;
    for name in gemm::NAMES.iter().filter(|name| wanted(name)) {
        let line =
            gemm::with_case(&device, name, |case| time(&stopwatch, case, peer.as_mut(), arguments.rounds))?;
        println!("{line}");
        writeln!(table, "{line}")?;
    }
    if let Some(file) = &arguments.record {
        std::fs::write(file, table)?;
    }
    Ok(())
}

/// Times a case in alternating rounds with the peer. Returns the line of the table.
fn time(
    stopwatch: &Stopwatch,
    case: &Case<'_>,
    mut peer: Option<&mut Peer>,
    rounds: usize,
) -> Result<String, Box<dyn Error>> {
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        (case.call)()?;
        let all = stopwatch.time(|| (0..case.calls).try_for_each(|_| (case.call)()))?;
        let seconds = all / case.calls as f64;
        let of_peer = peer
            .as_mut()
            .map(|peer| peer.request::<Seconds>(&case.request))
            .transpose()?
            .map(|of| of.seconds);
        // the first round warms up
        if round > 0 {
            ours.push(seconds);
            theirs.extend(of_peer);
            ratios.extend(of_peer.map(|of_peer| of_peer / seconds));
        }
    }
    let least = ours.iter().copied().fold(f64::INFINITY, f64::min);
    let (ours, theirs, ratio) = (median(ours), median(theirs), median(ratios));
    let cell =
        |value: Option<f64>, scale: f64| value.map_or(String::new(), |value| format!("{:.4}", value * scale));
    let seconds = ours.unwrap_or(f64::NAN);
    Ok(format!(
        "{},{seconds:.7},{least:.7},{:.1},{},{},{}",
        case.name,
        case.flops / seconds * 1e-12,
        theirs.map_or(String::new(), |theirs| format!("{theirs:.7}")),
        theirs.map_or(String::new(), |theirs| format!("{:.1}", case.flops / theirs * 1e-12)),
        cell(ratio, 1.0)
    ))
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
