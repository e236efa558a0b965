//! A bench against peers: its command line and table; contenders, which are our graph of calls and the graphs of a peer
//! process, are sampled in random order.

#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../../../../benches/peers/process.rs"]
mod process;

use clap::Parser;
use process::PeerProcess;
use serde::Deserialize;
use std::{
    error::Error,
    path::PathBuf,
    time::{Duration, Instant},
};
use tilewright::{Backend, Dtype, RecordedGraph, gemm};
use tilewright_cuda::{Cuda, Device, DriverError, Gpu, Stopwatch};

/// The name of our contender.
const OURS: &str = "tilewright";
/// Contenders that are no peers: `matmul` shows the speed of the GPU in this moment.
const NO_PEERS: [&str; 2] = [OURS, "matmul"];
/// Minimum calls per graph.
const CALLS: usize = 10;
/// The bf16 matrix of 512 MiB that a flush of L2 reads. An H200 reads it in more than 100 us, so the host submits the call in this time.
const FLUSH: [usize; 2] = [65_536, 4096];
const FLUSH_BYTES: usize = 2 * FLUSH[0] * FLUSH[1];

/// Work and pause before a sample, and its minimum length, in seconds.
#[derive(Clone, Copy)]
pub(crate) struct Protocol {
    pub(crate) name: &'static str,
    pub(crate) hot: f64,
    pub(crate) rest: f64,
    pub(crate) least: f64,
    /// Graphs of one call, each after a flush of L2, whose median is a sample; if 0, a sample replays the graph of many calls.
    pub(crate) cold: usize,
}

/// Times this bench on the GPU of this machine, and its peers if given.
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

/// A bench: its name for cargo, the script of its peers, the columns of its cases, and its protocols.
pub(crate) struct Bench {
    pub(crate) name: &'static str,
    pub(crate) script: &'static str,
    pub(crate) columns: &'static str,
    pub(crate) protocols: &'static [Protocol],
}

pub(crate) trait BenchCase {
    fn name(&self) -> String;

    /// Our graph of calls.
    fn graph(&self, gpu: &Cuda) -> Result<OurGraph, Box<dyn Error>>;

    /// The request that builds the contenders of the peer.
    fn request(&self) -> String;

    /// The columns of the bench for a contender with this median of the seconds per call.
    fn columns(&self, contender: &str, median: f64) -> String;
}

impl Bench {
    /// Measures the cases that the command line selects. Without a GPU, prints the reason.
    pub(crate) fn run(&self, cases: &[impl BenchCase]) -> Result<(), Box<dyn Error>> {
        let arguments = Arguments::parse();
        let Some(device) = gpu::or_skip(Device::open(0)) else { return Ok(()) };
        let gpu: Cuda = Gpu::new(device);
        let mut peer =
            arguments.peer.as_deref().map(|python| PeerProcess::start(python, self.script)).transpose()?;
        let context = gpu.machine().stream().context();
        let properties = context.properties();
        let mut table = format!("# device: {}, driver for CUDA {}\n", properties.name, properties.driver);
        if let Some(peer) = &mut peer {
            let About { about } = peer.request("{\"about\": true}")?;
            table += &format!("# peers: {about}\n");
        }
        let Self { name, columns, .. } = self;
        let command = format!("cargo bench -p tilewright-cuda --bench {name} -- --peer PYTHON");
        table += &format!("# command: {command} --rounds {}\n", arguments.rounds);
        table += "case,protocol,contender,seconds,p20,p80,";
        table += &format!("{columns},mhz,watts,peers_best_over_this,verdict\n");
        print!("{table}");
        for case in cases.iter().filter(|case| arguments.selects(&case.name())) {
            let lines = self
                .measure(&gpu, case, peer.as_mut(), &arguments)
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
        &self,
        gpu: &Cuda,
        case: &impl BenchCase,
        peer: Option<&mut PeerProcess>,
        arguments: &Arguments,
    ) -> Result<String, Box<dyn Error>> {
        let mut contenders = Contenders::new(case.graph(gpu)?, peer, &case.request())?;
        let mut lines = String::new();
        for &protocol in self.protocols {
            if arguments.protocol.as_ref().is_some_and(|only| only != protocol.name) {
                continue;
            }
            let samples = contenders.sample(protocol, arguments.rounds)?;
            lines += &table(case, protocol, &contenders.names, &samples);
        }
        Ok(lines)
    }
}

/// The lines of one case and protocol.
fn table(case: &impl BenchCase, protocol: Protocol, names: &[String], samples: &[Vec<Sample>]) -> String {
    let spreads: Vec<_> = samples.iter().map(|samples| spread(samples)).collect();
    let peers = names.iter().zip(&spreads).filter(|(name, _)| !NO_PEERS.contains(&name.as_str()));
    let best = peers.map(|(_, spread)| *spread).min_by(|a, b| a[0].total_cmp(&b[0]));
    let mut lines = String::new();
    for ((name, &[median, low, high]), samples) in names.iter().zip(&spreads).zip(samples) {
        let verdict = best.filter(|_| name == OURS).map_or(String::from(","), |peer| {
            let ahead = if high < peer[1] { "ahead" } else { "equal" };
            let verdict = if low > peer[2] { "behind" } else { ahead };
            format!("{:.3},{verdict}", peer[0] / median)
        });
        let (label, columns) = (case.name(), case.columns(name, median));
        let Sample { mhz, watts, .. } = samples[samples.len() / 2];
        lines += &format!("{label},{},{name},{median:.8},{low:.8},{high:.8},", protocol.name);
        lines += &format!("{columns},{mhz},{watts},{verdict}\n");
    }
    lines
}

impl Arguments {
    fn selects(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.split(',').any(|only| name.contains(only)))
    }
}

/// The versions of a peer.
#[derive(Deserialize)]
struct About {
    about: String,
}

#[derive(Deserialize)]
struct Names {
    names: Vec<String>,
}

/// One measurement of a contender.
#[derive(Deserialize)]
struct Sample {
    /// Per call.
    seconds: f64,
    mhz: u32,
    watts: u32,
}

#[derive(Deserialize)]
struct Clocks {
    mhz: u32,
    watts: u32,
}

/// Our contender: a graph of calls, and the call, which owns their memory.
pub(crate) struct OurGraph {
    graph: Box<dyn RecordedGraph>,
    calls: usize,
    /// Graphs of one call per set of inputs, which the first cold sample records.
    single: Vec<Box<dyn RecordedGraph>>,
    run: Box<dyn FnMut(usize) -> tilewright::Result<()>>,
    sets: usize,
    gpu: Cuda,
    stopwatch: Stopwatch,
}

impl OurGraph {
    /// Records calls of `run`, which take `sets` sets of inputs in turn.
    pub(crate) fn new<T: 'static>(
        gpu: &Cuda,
        sets: usize,
        mut owner: T,
        run: impl Fn(&mut T, usize) -> tilewright::Result<()> + 'static,
    ) -> Result<Self, Box<dyn Error>> {
        let mut run = move |set| run(&mut owner, set);
        let stopwatch = gpu.machine().stream().stopwatch()?;
        (0..sets).try_for_each(&mut run)?;
        let once = stopwatch.time(|| run(0).map_err(driver_error))?;
        let calls = ((0.01 / once) as usize).clamp(CALLS, 200).next_multiple_of(sets);
        let graph = record(gpu, &mut || (0..calls).try_for_each(|at| run(at % sets)))?;
        let (run, gpu) = (Box::new(run), gpu.clone());
        Ok(Self { graph, calls, single: Vec::new(), run, sets, gpu, stopwatch })
    }

    fn sample(
        &mut self,
        protocol: Protocol,
        peer: Option<&mut PeerProcess>,
    ) -> Result<Sample, Box<dyn Error>> {
        let time = |times: usize| {
            self.stopwatch.time(|| (0..times).try_for_each(|_| self.graph.replay().map_err(driver_error)))
        };
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < protocol.hot {
            time(1)?;
        }
        std::thread::sleep(Duration::from_secs_f64(protocol.rest));
        let seconds = if protocol.cold > 0 {
            self.cold_seconds(protocol.cold)?
        } else {
            let mut seconds = time(1)?;
            if protocol.least > seconds {
                let times = (protocol.least / seconds) as usize + 1;
                seconds = time(times)? / times as f64;
            }
            seconds / self.calls as f64
        };
        let clocks = peer.map(|peer| peer.request::<Clocks>("{\"clocks\": true}")).transpose()?;
        let Clocks { mhz, watts } = clocks.unwrap_or(Clocks { mhz: 0, watts: 0 });
        Ok(Sample { seconds, mhz, watts })
    }

    /// The median seconds of `samples` graphs of one call, each submitted while a flush of L2 runs.
    fn cold_seconds(&mut self, samples: usize) -> Result<f64, Box<dyn Error>> {
        for set in self.single.len()..self.sets {
            self.single.push(record(&self.gpu, &mut || (self.run)(set))?);
        }
        let mut flush = flush(&self.gpu)?;
        self.single.iter().try_for_each(|graph| graph.replay())?; // the first replay uploads the graph
        let mut seconds = Vec::new();
        for at in 0..samples {
            let graph = &self.single[at % self.sets];
            flush()?;
            seconds.push(self.stopwatch.time(|| graph.replay().map_err(driver_error))?);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[samples / 2])
    }
}

fn record(
    gpu: &Cuda,
    work: &mut dyn FnMut() -> tilewright::Result<()>,
) -> Result<Box<dyn RecordedGraph>, Box<dyn Error>> {
    Ok(gpu.record(work)?.ok_or("the device cannot record")?)
}

/// A launch that replaces the contents of L2 by reads, which leave no lines to write back: the product of one row.
fn flush(gpu: &Cuda) -> tilewright::Result<impl FnMut() -> tilewright::Result<()>> {
    let ([features, inputs], bf16) = (FLUSH, Dtype::Bf16);
    let (x, weight) = (gpu.allocate(2 * inputs)?, gpu.allocate(FLUSH_BYTES)?);
    let (mut out, gpu) = (gpu.allocate(2 * features)?, gpu.clone());
    Ok(move || {
        let (x, weight) = (x.view(bf16, 0, &[1, inputs])?, weight.view(bf16, 0, &FLUSH)?);
        gemm::linear(&gpu, x, weight, None, out.view_mut(bf16, 0, &[1, features])?)
    })
}

/// Our contender and those of a peer, for one case.
struct Contenders<'a> {
    ours: OurGraph,
    peer: Option<&'a mut PeerProcess>,
    names: Vec<String>,
    order: Shuffle,
}

impl<'a> Contenders<'a> {
    /// Builds the peer's contenders of the case in `request`.
    fn new(
        ours: OurGraph,
        mut peer: Option<&'a mut PeerProcess>,
        request: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let mut names = vec![OURS.to_owned()];
        if let Some(peer) = &mut peer {
            names.extend(peer.request::<Names>(request)?.names);
        }
        Ok(Self { ours, peer, names, order: Shuffle(1) })
    }

    /// Samples of each contender, in the order of `names`, sorted by time.
    fn sample(&mut self, protocol: Protocol, rounds: usize) -> Result<Vec<Vec<Sample>>, Box<dyn Error>> {
        let mut samples: Vec<Vec<Sample>> = self.names.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for at in self.order.of(self.names.len()) {
                let sample = if at == 0 {
                    self.ours.sample(protocol, self.peer.as_deref_mut())?
                } else if let Some(peer) = &mut self.peer {
                    let Protocol { hot, rest, least, cold, .. } = protocol;
                    let request = serde_json::json!({
                        "sample": self.names[at], "hot": hot, "rest": rest, "least": least, "cold": cold, "flush": FLUSH_BYTES,
                    });
                    peer.request(&request.to_string())?
                } else {
                    continue;
                };
                samples[at].push(sample);
            }
        }
        for samples in &mut samples {
            samples.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        }
        Ok(samples)
    }
}

/// Median, 20th and 80th percentile of the seconds per call of sorted samples.
fn spread(samples: &[Sample]) -> [f64; 3] {
    [5, 2, 8].map(|part| samples[(samples.len() - 1) * part / 10].seconds)
}

/// A generator of orders.
pub(crate) struct Shuffle(pub(crate) u64);

impl Shuffle {
    /// 0..count in random order.
    pub(crate) fn of(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for at in (1..count).rev() {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            order.swap(at, (self.0 >> 33) as usize % (at + 1));
        }
        order
    }
}

fn driver_error(why: tilewright::Error) -> DriverError {
    DriverError::new("bench", why.to_string())
}
