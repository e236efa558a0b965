//! Times attention on the GPU of this machine beside torch and FlashInfer. Skipped without a GPU.
//!
//! Every contender is a graph of at least 10 calls that use three sets of inputs in turn. Contenders take samples in random order,
//! in two protocols: `hot` (its own work for 250 ms directly before a sample of 30 ms) and `rested` (a pause of 150 ms before).
//! A row is a contender in a protocol: median, 20th and 80th percentile of the seconds per call, with SM clock and power.

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
use serde::Deserialize;
use std::{
    error::Error,
    fmt::Write,
    path::PathBuf,
    time::{Duration, Instant},
};
use tilewright::RecordedGraph;
use tilewright_cuda::{Cuda, Device, Gpu, Stopwatch};

/// The script of the peers.
const SCRIPT: &str = include_str!("../../../../benches/peers/gpu_attention.py");
/// The name of our contender.
const OURS: &str = "tilewright";
/// Minimum calls per graph.
const CALLS: usize = 10;

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

/// Work and pause before a sample, and its minimum length, in seconds.
#[derive(Clone, Copy)]
struct Protocol {
    name: &'static str,
    hot: f64,
    rest: f64,
    least: f64,
}

const PROTOCOLS: [Protocol; 2] = [
    Protocol { name: "hot", hot: 0.25, rest: 0.0, least: 0.03 },
    Protocol { name: "rested", hot: 0.0, rest: 0.15, least: 0.0 },
];

#[derive(Deserialize)]
struct Names {
    names: Vec<String>,
}

#[derive(Deserialize)]
struct Sample {
    seconds: f64,
    mhz: u32,
    watts: u32,
}

#[derive(Deserialize)]
struct Clocks {
    mhz: u32,
    watts: u32,
}

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

/// Our contender: a graph of calls.
struct OurGraph {
    graph: Box<dyn RecordedGraph>,
    calls: usize,
    stopwatch: Stopwatch,
    /// The graph refers to its memory.
    _memory: Ours,
}

impl OurGraph {
    fn new(gpu: &Cuda, case: &Case) -> Result<Self, Box<dyn Error>> {
        let mut ours = Ours::new(gpu, case)?;
        let body = ours.describe().lines().next().unwrap_or_default().to_owned();
        println!("# {}: {body}; plan {:.1} us", case.name, ours.plan_seconds * 1e6);
        let stopwatch = gpu.machine().stream().stopwatch()?;
        (0..ours::SETS).try_for_each(|set| ours.run(set))?;
        let once = stopwatch.time(|| ours.run(0).map_err(driver_error))?;
        let calls = ((0.01 / once) as usize).clamp(CALLS, 200);
        let graph = tilewright::Backend::record(gpu, &mut || (0..calls).try_for_each(|set| ours.run(set)))?;
        Ok(Self { graph: graph.ok_or("the device cannot record")?, calls, stopwatch, _memory: ours })
    }

    fn sample(&self, protocol: Protocol, peer: Option<&mut Peer>) -> Result<Sample, Box<dyn Error>> {
        let time = |times: usize| {
            self.stopwatch.time(|| (0..times).try_for_each(|_| self.graph.replay().map_err(driver_error)))
        };
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < protocol.hot {
            time(1)?;
        }
        std::thread::sleep(Duration::from_secs_f64(protocol.rest));
        let mut seconds = time(1)?;
        if protocol.least > seconds {
            let times = (protocol.least / seconds) as usize + 1;
            seconds = time(times)? / times as f64;
        }
        let clocks = peer.map(|peer| peer.request::<Clocks>("{\"clocks\": true}")).transpose()?;
        let Clocks { mhz, watts } = clocks.unwrap_or(Clocks { mhz: 0, watts: 0 });
        Ok(Sample { seconds: seconds / self.calls as f64, mhz, watts })
    }
}

/// Samples all contenders of a case; returns the lines of the table.
fn measure(
    gpu: &Cuda,
    case: &Case,
    mut peer: Option<&mut Peer>,
    arguments: &Arguments,
) -> Result<String, Box<dyn Error>> {
    let ours = OurGraph::new(gpu, case)?;
    let mut names = vec![OURS.to_owned()];
    if let Some(peer) = &mut peer {
        names.extend(peer.request::<Names>(&case.request())?.names);
    }
    let mut lines = String::new();
    let mut order = Shuffle(1);
    for protocol in PROTOCOLS {
        if arguments.protocol.as_ref().is_some_and(|only| only != protocol.name) {
            continue;
        }
        let mut samples: Vec<Vec<Sample>> = names.iter().map(|_| Vec::new()).collect();
        for _ in 0..arguments.rounds {
            for at in order.of(names.len()) {
                let sample = if at == 0 {
                    ours.sample(protocol, peer.as_deref_mut())?
                } else if let Some(peer) = &mut peer {
                    let Protocol { hot, rest, least, .. } = protocol;
                    let request =
                        serde_json::json!({"sample": names[at], "hot": hot, "rest": rest, "least": least});
                    peer.request(&request.to_string())?
                } else {
                    continue;
                };
                samples[at].push(sample);
            }
        }
        lines.push_str(&table_of(case, protocol, &names, &mut samples)?);
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
    let spread = |samples: &mut Vec<Sample>| {
        samples.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let at = |part: usize| samples[(samples.len() - 1) * part / 10].seconds;
        [at(5), at(2), at(8)]
    };
    let spreads: Vec<[f64; 3]> = samples.iter_mut().map(spread).collect();
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

/// A generator of orders.
struct Shuffle(u64);

impl Shuffle {
    /// 0..count in random order.
    fn of(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for at in (1..count).rev() {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            order.swap(at, (self.0 >> 33) as usize % (at + 1));
        }
        order
    }
}

fn driver_error(why: tilewright::Error) -> tilewright_cuda::DriverError {
    tilewright_cuda::DriverError::new("attention", why.to_string())
}
