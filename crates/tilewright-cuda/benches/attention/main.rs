//! Times attention on the GPU of this machine, in alternating rounds with torch and FlashInfer. Skipped without a GPU.

mod case;
#[path = "../gpu/mod.rs"]
mod gpu;
mod ours;
#[path = "../peer/mod.rs"]
mod peer;

use case::Case;
use clap::Parser;
use ours::Ours;
use peer::Peer;
use std::{collections::BTreeMap, error::Error, fmt::Write, path::PathBuf};
use tilewright_cuda::{Cuda, Device, Gpu};

/// The script of the peers.
const SCRIPT: &str = include_str!("../../../../benches/peers/gpu_attention.py");

/// Times attention on the GPU of this machine, and its peers if given.
#[derive(Parser)]
struct Arguments {
    /// A Python with torch for CUDA, and optionally FlashInfer; without it no peer is timed.
    #[arg(long)]
    peer: Option<String>,
    /// Writes the results to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Number of rounds; the median counts.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Only cases whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const HEADER: &str = "case,seconds,tflops,tbps,plan_microseconds,peer,peer_seconds,speedup,speedup_min,speedup_max,expected,held";

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
    let mut times = BTreeMap::new();
    for case in Case::all()? {
        if arguments.only.as_ref().is_some_and(|only| !case.name.contains(only)) {
            continue;
        }
        let line = time(&gpu, &case, peer.as_mut(), (arguments.rounds, &mut times))
            .unwrap_or_else(|why| format!("# {}: {why}", case.name));
        println!("{line}");
        writeln!(table, "{line}")?;
        if let Some(file) = &arguments.record {
            std::fs::write(file, &table)?;
        }
    }
    Ok(())
}

/// Times a case in alternating rounds with the peer. Returns the line of the table.
fn time(
    gpu: &Cuda,
    case: &Case,
    mut peer: Option<&mut Peer>,
    (rounds, times): (usize, &mut BTreeMap<String, f64>),
) -> Result<String, Box<dyn Error>> {
    let mut ours = Ours::new(gpu, case)?;
    let stopwatch = gpu.machine().stream().stopwatch()?;
    ours.run()?;
    let once = stopwatch.time(|| ours.run().map_err(driver_error))?;
    // about 20 ms per round, so that launch overhead and clock ramps are negligible
    let calls = ((0.02 / once) as usize).clamp(3, 400);
    let request = case.request(calls);
    let (mut seconds, mut theirs, mut ratios, mut best) = (Vec::new(), Vec::new(), Vec::new(), String::new());
    for round in 0..=rounds {
        ours.run()?;
        let all = stopwatch.time(|| (0..calls).try_for_each(|_| ours.run().map_err(driver_error)))?;
        let of_peer = match (&mut peer, &request) {
            (Some(peer), Some(request)) => Some(peer.seconds(request)?),
            _ => None,
        };
        // the first round warms up
        if round > 0 {
            let each = all / calls as f64;
            seconds.push(each);
            if let Some((of_peer, name)) = of_peer {
                theirs.push(of_peer);
                ratios.push(of_peer / each);
                best = name;
            }
        }
    }
    let each = median(&mut seconds).unwrap_or(f64::NAN);
    times.insert(case.name.clone(), each);
    let (tflops, tbps) = (case.flops() / each * 1e-12, case.bytes() / each * 1e-12);
    let (expected, met) = check_targets(case, (each, tflops, tbps), times);
    let ratio = median(&mut ratios);
    let cell =
        |value: Option<f64>, digits: usize| value.map_or(String::new(), |value| format!("{value:.digits$}"));
    Ok(format!(
        "{},{each:.7},{tflops:.1},{tbps:.3},{:.1},{best},{},{},{},{},{expected},{met}",
        case.name,
        ours.plan_seconds * 1e6,
        cell(median(&mut theirs), 7),
        cell(ratio, 3),
        cell(ratios.first().copied(), 3),
        cell(ratios.last().copied(), 3),
    ))
}

/// The targets of a case, and whether they are met.
fn check_targets(
    case: &Case,
    (each, tflops, tbps): (f64, f64, f64),
    times: &BTreeMap<String, f64>,
) -> (String, String) {
    let mut expected = Vec::new();
    if let Some(least) = case.tflops {
        expected.push((format!("{least} TFLOP/s"), tflops >= least));
    }
    if let Some(least) = case.tbps {
        expected.push((format!("{least} TB/s"), tbps >= least));
    }
    if let (Some(baseline), Some(most)) = (&case.baseline, case.time_ratio)
        && let Some(of_baseline) = times.get(baseline)
    {
        let ratio = each / of_baseline;
        expected.push((format!("{ratio:.3} of {baseline} at most {most}"), ratio <= most));
    }
    let met = expected.iter().all(|(_, met)| *met);
    let texts: Vec<&str> = expected.iter().map(|(text, _)| text.as_str()).collect();
    match texts.is_empty() {
        true => (String::new(), String::new()),
        false => (texts.join("; "), if met { "yes" } else { "no" }.to_owned()),
    }
}

fn driver_error(why: tilewright::Error) -> tilewright_cuda::DriverError {
    tilewright_cuda::DriverError::new("attention", why.to_string())
}

/// Sorts the values and returns the median.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
