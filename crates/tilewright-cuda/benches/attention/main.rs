//! Times attention on the GPU of this machine through the engine, beside torch and FlashInfer in the same rounds. Without a GPU
//! it says so.

#[path = "../card/mod.rs"]
mod card;
mod case;
mod ours;
#[path = "../peer/mod.rs"]
mod peer;

use case::Case;
use clap::Parser;
use ours::Ours;
use peer::Peer;
use std::{collections::BTreeMap, error::Error, fmt::Write, path::PathBuf};
use tilewright_cuda::{Card, Cuda, Gpu};

/// The peers.
const SCRIPT: &str = include_str!("../../../../benches/peers/gpu_attention.py");

/// Times attention on the GPU of this machine, beside its peers if there are any.
#[derive(Parser)]
struct Arguments {
    /// A Python that has torch with CUDA, and FlashInfer perhaps; without one no peer is timed.
    #[arg(long)]
    peer: Option<String>,
    /// Writes what was measured to this file.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Only cases whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// What cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

const HEADER: &str = "case,seconds,tflops,tbps,plan_microseconds,peer,peer_seconds,speedup,speedup_min,speedup_max,expected,held";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let Some(card) = card::or_skipped(Card::open(0)) else { return Ok(()) };
    let gpu: Cuda = Gpu::new(card);
    let mut peer = arguments.peer.as_deref().map(|python| Peer::start(python, SCRIPT)).transpose()?;
    let context = gpu.machine().stream().context();
    let mut table =
        format!("# device: {}, driver for CUDA {}\n", context.limits().name, context.limits().driver);
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

/// Takes turns with the peer; the line of the table.
fn time(
    gpu: &Cuda,
    case: &Case,
    mut peer: Option<&mut Peer>,
    (rounds, times): (usize, &mut BTreeMap<String, f64>),
) -> Result<String, Box<dyn Error>> {
    let mut ours = Ours::new(gpu, case)?;
    let stopwatch = gpu.machine().stream().stopwatch()?;
    ours.run()?;
    let once = stopwatch.time(|| ours.run().map_err(of_engine))?;
    // some 20 ms a round, so that neither launches nor clocks that rise decide
    let calls = ((0.02 / once) as usize).clamp(3, 400);
    let asked = case.asked(calls);
    let (mut seconds, mut theirs, mut ratios, mut best) = (Vec::new(), Vec::new(), Vec::new(), String::new());
    for round in 0..=rounds {
        ours.run()?;
        let all = stopwatch.time(|| (0..calls).try_for_each(|_| ours.run().map_err(of_engine)))?;
        let of_peer = match (&mut peer, &asked) {
            (Some(peer), Some(asked)) => Some(peer.seconds(asked)?),
            _ => None,
        };
        // the first warms up
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
    let (expected, held) = judged(case, (each, tflops, tbps), times);
    let ratio = median(&mut ratios);
    let cell =
        |value: Option<f64>, digits: usize| value.map_or(String::new(), |value| format!("{value:.digits$}"));
    Ok(format!(
        "{},{each:.7},{tflops:.1},{tbps:.3},{:.1},{best},{},{},{},{},{expected},{held}",
        case.name,
        ours.plan_seconds * 1e6,
        cell(median(&mut theirs), 7),
        cell(ratio, 3),
        cell(ratios.first().copied(), 3),
        cell(ratios.last().copied(), 3),
    ))
}

/// What is expected of a case, and whether it holds.
fn judged(
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
    let held = expected.iter().all(|(_, held)| *held);
    let texts: Vec<&str> = expected.iter().map(|(text, _)| text.as_str()).collect();
    match texts.is_empty() {
        true => (String::new(), String::new()),
        false => (texts.join("; "), if held { "yes" } else { "no" }.to_owned()),
    }
}

fn of_engine(why: tilewright::Error) -> tilewright_cuda::Error {
    tilewright_cuda::Error::new("attention", why.to_string())
}

/// Sorts, and gives the one in the middle.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
