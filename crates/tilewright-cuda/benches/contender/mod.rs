//! Contenders of a bench: our graph of calls and the graphs of a peer process, sampled in random order.

use super::peer::Peer;
use serde::Deserialize;
use std::{
    error::Error,
    time::{Duration, Instant},
};
use tilewright::RecordedGraph;
use tilewright_cuda::{Cuda, DriverError, Stopwatch};

/// The name of our contender.
pub(crate) const OURS: &str = "tilewright";
/// Minimum calls per graph.
const CALLS: usize = 10;

/// Work and pause before a sample, and its minimum length, in seconds.
#[derive(Clone, Copy)]
pub(crate) struct Protocol {
    pub(crate) name: &'static str,
    pub(crate) hot: f64,
    pub(crate) rest: f64,
    pub(crate) least: f64,
}

#[derive(Deserialize)]
struct Names {
    names: Vec<String>,
}

/// One measurement of a contender.
#[derive(Deserialize)]
pub(crate) struct Sample {
    /// Per call.
    pub(crate) seconds: f64,
    pub(crate) mhz: u32,
    pub(crate) watts: u32,
}

#[derive(Deserialize)]
struct Clocks {
    mhz: u32,
    watts: u32,
}

/// Our contender: a graph of calls. The caller keeps the memory of the calls.
pub(crate) struct OurGraph {
    graph: Box<dyn RecordedGraph>,
    calls: usize,
    stopwatch: Stopwatch,
}

impl OurGraph {
    /// Records calls of `run`, which take `sets` sets of inputs in turn.
    pub(crate) fn new(
        gpu: &Cuda,
        sets: usize,
        mut run: impl FnMut(usize) -> tilewright::Result<()>,
    ) -> Result<Self, Box<dyn Error>> {
        let stopwatch = gpu.machine().stream().stopwatch()?;
        (0..sets).try_for_each(&mut run)?;
        let once = stopwatch.time(|| run(0).map_err(driver_error))?;
        let calls = ((0.01 / once) as usize).clamp(CALLS, 200).next_multiple_of(sets);
        let graph = tilewright::Backend::record(gpu, &mut || (0..calls).try_for_each(|at| run(at % sets)))?;
        Ok(Self { graph: graph.ok_or("the device cannot record")?, calls, stopwatch })
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

/// Our contender and those of a peer, for one case.
pub(crate) struct Contenders<'a> {
    ours: OurGraph,
    peer: Option<&'a mut Peer>,
    pub(crate) names: Vec<String>,
    order: Shuffle,
}

impl<'a> Contenders<'a> {
    /// Builds the peer's contenders of the case in `request`.
    pub(crate) fn new(
        ours: OurGraph,
        mut peer: Option<&'a mut Peer>,
        request: &str,
    ) -> Result<Self, Box<dyn Error>> {
        let mut names = vec![OURS.to_owned()];
        if let Some(peer) = &mut peer {
            names.extend(peer.request::<Names>(request)?.names);
        }
        Ok(Self { ours, peer, names, order: Shuffle(1) })
    }

    /// Samples of each contender, in the order of `names`.
    pub(crate) fn sample(
        &mut self,
        protocol: Protocol,
        rounds: usize,
    ) -> Result<Vec<Vec<Sample>>, Box<dyn Error>> {
        let mut samples: Vec<Vec<Sample>> = self.names.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for at in self.order.of(self.names.len()) {
                let sample = if at == 0 {
                    self.ours.sample(protocol, self.peer.as_deref_mut())?
                } else if let Some(peer) = &mut self.peer {
                    let Protocol { hot, rest, least, .. } = protocol;
                    let name = &self.names[at];
                    let request =
                        serde_json::json!({"sample": name, "hot": hot, "rest": rest, "least": least});
                    peer.request(&request.to_string())?
                } else {
                    continue;
                };
                samples[at].push(sample);
            }
        }
        Ok(samples)
    }
}

/// Median, 20th and 80th percentile of the seconds per call; sorts the samples.
pub(crate) fn spread(samples: &mut [Sample]) -> [f64; 3] {
    samples.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    [5, 2, 8].map(|part| samples[(samples.len() - 1) * part / 10].seconds)
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

fn driver_error(why: tilewright::Error) -> DriverError {
    DriverError::new("bench", why.to_string())
}
