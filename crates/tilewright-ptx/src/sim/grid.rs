//! The grid scheduler: residency of clusters, choice and length of warp slices, progress of asynchronous operations.

use super::{
    Cluster, Exec, Fault, FaultKind, Launch, Memory, Program, Report, Rng, Shadow, Wait, Warp, World,
    deadlock, flight, wgmma,
};
use rustc_hash::FxHashMap;
use std::mem;

/// The maximum number of resident clusters.
const MAX_RESIDENT_CLUSTERS: usize = 132;

/// The maximum number of launches that a dependent launch is checked against.
const MAX_IN_FLIGHT: usize = 4;

/// Warp instructions without progress after which the kernel counts as deadlocked or as an infinite loop.
const DEADLOCK_LIMIT: u64 = 4_000_000;

/// Slices between two changes of the scheduler bias, each as probable as the others. After the largest number, a starved warp has
/// missed several phases of a barrier that does not wait for it.
const BIAS_SLICES: [u32; 4] = [64, 64, 64, 4096];

/// A running launch.
pub(super) struct Grid<'m> {
    world: World<'m>,
    clusters: Vec<Cluster>,
    /// Clusters that have not started, the next one last.
    waiting: Vec<u32>,
    bias: SchedulerBias,
    /// The progress count at the last forced wakeup of waits.
    forced_at: u64,
    /// The last progress count, and the instruction count at which it changed.
    progress: (u64, u64),
}

/// The scheduler's bias for a number of slices, so that seeds reach different interleavings.
#[derive(Debug, Default)]
struct SchedulerBias {
    slices: u32,
    /// The seed of a hash that selects the starved warps: they run only if no other warp can.
    seed: u64,
    /// The arrival rate of copy chunks after each slice: once in `.0`, at most `.1` chunks.
    pace: (usize, usize),
    last: Option<(usize, usize, usize)>,
}

impl<'m> Grid<'m> {
    pub(super) fn new(launch: &Launch<'m>, memory: &'m mut Memory) -> Result<Self, Fault> {
        let program = Program::new(launch.kernel, launch.args)?;
        let (grid, cluster) = (launch.grid, program.cluster);
        let ctas = grid.iter().map(|&side| u64::from(side)).product::<u64>();
        if ctas == 0 || !grid[0].is_multiple_of(cluster) || ctas >= 1 << 31 {
            let message =
                format!("a grid of {grid:?} CTAs: expected none to be 0, and x a multiple of {cluster}");
            return Err(Fault::of_launch(FaultKind::BadArgument, message));
        }
        if !program.waits {
            memory.serialize();
        }
        let mut waiting: Vec<u32> = (0..(ctas / u64::from(cluster)) as u32).rev().collect();
        let mut rng = Rng::new(launch.seed);
        if rng.once_in(2) {
            for at in (1..waiting.len()).rev() {
                waiting.swap(at, rng.below(at + 1));
            }
        }
        let world = World {
            shadows: memory.sizes().map(Shadow::new).collect(),
            in_flight: mem::take(&mut memory.in_flight),
            program,
            memory,
            flags: FxHashMap::default(),
            fences: FxHashMap::default(),
            rng,
            report: Report::default(),
            progress: 0,
            grid,
        };
        let bias = SchedulerBias::default();
        Ok(Self { world, clusters: Vec::new(), waiting, bias, forced_at: u64::MAX, progress: (0, 0) })
    }

    /// Runs until all CTAs have exited.
    pub(super) fn run(mut self) -> Result<Report, Fault> {
        loop {
            let has_capacity = self.clusters.len() < MAX_RESIDENT_CLUSTERS;
            if self.clusters.len() < 2 || (has_capacity && self.world.rng.once_in(128)) {
                self.start_cluster();
            }
            if self.clusters.is_empty() {
                let World { memory, in_flight, shadows, report, .. } = self.world;
                memory.in_flight = in_flight;
                memory.in_flight.truncate(MAX_IN_FLIGHT - 1);
                memory.in_flight.insert(0, shadows);
                return Ok(report);
            }
            self.resample_bias();
            match self.pick() {
                Some((cluster, rank, warp)) => self.slice(cluster, rank, warp)?,
                None => self.force_progress()?,
            }
        }
    }

    /// Starts the next cluster. Returns whether there was one.
    fn start_cluster(&mut self) -> bool {
        let Some(number) = self.waiting.pop() else { return false };
        let [width, height, _] = self.world.grid;
        let size = self.world.program.cluster;
        let per_row = width / size;
        let (row, first) = (number / per_row, number % per_row * size);
        let ctas = (0..size).map(|rank| [first + rank, row % height, row / height]).collect();
        self.clusters.push(Cluster::new(number, ctas, &self.world.program));
        self.world.progress += 1;
        true
    }

    fn resample_bias(&mut self) {
        if self.bias.slices == 0 {
            let rng = &mut self.world.rng;
            self.bias.slices = BIAS_SLICES[rng.below(BIAS_SLICES.len())];
            self.bias.seed = rng.next();
            self.bias.pace = [(1, 0), (8, 1), (2, 4), (1, 64), (1, 100_000)][rng.below(5)];
        }
        self.bias.slices -= 1;
    }

    /// Chooses a warp that may make progress.
    fn pick(&mut self) -> Option<(usize, usize, usize)> {
        let rng = &mut self.world.rng;
        if let Some((c, r, w)) = self.bias.last
            && rng.once_in(3)
            && self.clusters.get(c).is_some_and(|cluster| cluster.ctas[r].warps[w].awake)
        {
            return self.bias.last;
        }
        let (size, warps) = (self.world.program.cluster as usize, self.world.program.threads as usize / 32);
        let total = self.clusters.len() * size * warps;
        let start = rng.below(total);
        let position = |at: usize| (at / warps / size, at / warps % size, at % warps);
        let awake = |&(c, r, w): &(usize, usize, usize)| {
            let warp: &Warp = &self.clusters[c].ctas[r].warps[w];
            warp.awake && warp.live()
        };
        let seed = self.bias.seed;
        let starved =
            |&(c, r, w): &(usize, usize, usize)| Rng::new(seed ^ (c << 20 | r << 10 | w) as u64).once_in(4);
        let mut found = (start..start + total).map(|at| position(at % total)).filter(awake);
        let first = found.next()?;
        let chosen =
            if starved(&first) { found.find(|position| !starved(position)).unwrap_or(first) } else { first };
        self.bias.last = Some(chosen);
        Some(chosen)
    }

    /// Runs one warp for a while.
    fn slice(&mut self, c: usize, rank: usize, w: usize) -> Result<(), Fault> {
        let budget = [1, 4, 16, 64, 256, 1024][self.world.rng.below(6)];
        let cluster = &mut self.clusters[c];
        let mut warp = mem::take(&mut cluster.ctas[rank].warps[w]);
        let mut exec = Exec {
            world: &mut self.world,
            cluster,
            rank,
            warp: &mut warp,
            group: 0,
            pc: 0,
            mask: 0,
            faulting_lanes: 0,
        };
        let ran = exec.slice(budget);
        self.clusters[c].ctas[rank].warps[w] = warp;
        ran?;
        if !self.clusters[c].ctas[rank].warps[w].live() && !self.clusters[c].live() {
            return self.retire(c);
        }
        self.advance_async(c)?;
        self.check_deadlock_limit()
    }

    /// Completes all copies in flight of a cluster after all its warps have exited.
    fn retire(&mut self, c: usize) -> Result<(), Fault> {
        let mut cluster = self.clusters.swap_remove(c);
        self.bias.last = None;
        for rank in 0..cluster.ctas.len() {
            flight::finish(&mut self.world, &mut cluster, rank, |_| true)?;
        }
        cluster.ctas.into_iter().flat_map(|cta| cta.warps).for_each(Warp::retire);
        Ok(())
    }

    /// Advances some asynchronous operations of a cluster.
    fn advance_async(&mut self, c: usize) -> Result<(), Fault> {
        let (once_in, chunks) = self.bias.pace;
        let cluster = &mut self.clusters[c];
        for rank in 0..cluster.ctas.len() {
            for group in 0..cluster.ctas[rank].warpgroups.len() {
                let warpgroup = &cluster.ctas[rank].warpgroups[group];
                if warpgroup.pending.is_empty() {
                    continue;
                }
                let (drain_until, any) = (warpgroup.drain_until, u32::MAX);
                if self.world.rng.once_in(4) {
                    wgmma::compute(&mut self.world, cluster, rank, group, any)?;
                }
                if self.world.rng.once_in(2) {
                    wgmma::compute(&mut self.world, cluster, rank, group, drain_until)?;
                }
            }
            let mut left = chunks;
            while left > 0 && !cluster.ctas[rank].in_flight.is_empty() && self.world.rng.once_in(once_in) {
                let at = self.world.rng.below(cluster.ctas[rank].in_flight.len());
                let some = 1 + self.world.rng.below(left);
                flight::advance(&mut self.world, cluster, rank, at, some)?;
                left -= some;
            }
        }
        Ok(())
    }

    /// Forces progress when no warp can run: completes an asynchronous operation, starts a cluster, or wakes `try_wait`s. If
    /// none of these is possible, reports a deadlock.
    fn force_progress(&mut self) -> Result<(), Fault> {
        let chosen = self.world.rng.below(self.clusters.len());
        let order = (chosen..self.clusters.len()).chain(0..chosen);
        for c in order {
            let cluster = &mut self.clusters[c];
            for rank in 0..cluster.ctas.len() {
                let count = cluster.ctas[rank].in_flight.len();
                if count > 0 {
                    let at = self.world.rng.below(count);
                    flight::advance(&mut self.world, cluster, rank, at, usize::MAX)?;
                    return Ok(());
                }
                let groups = &cluster.ctas[rank].warpgroups;
                if let Some(group) = groups.iter().position(|group| !group.pending.is_empty()) {
                    return wgmma::compute(&mut self.world, cluster, rank, group, u32::MAX);
                }
            }
        }
        if self.start_cluster() {
            return Ok(());
        }
        let mut woken = false;
        if self.forced_at != self.world.progress {
            self.forced_at = self.world.progress;
            for warp in
                self.clusters.iter_mut().flat_map(|cluster| &mut cluster.ctas).flat_map(|cta| &mut cta.warps)
            {
                for group in warp.groups.iter_mut().filter(|group| group.wait == Wait::Phase) {
                    (group.wait, group.timed_out) = (Wait::None, true);
                    (warp.awake, woken) = (true, true);
                }
            }
        }
        if woken { Ok(()) } else { Err(deadlock::explain(&self.world, &self.clusters)) }
    }

    /// Reports a fault if there was no progress for [`DEADLOCK_LIMIT`] instructions.
    fn check_deadlock_limit(&mut self) -> Result<(), Fault> {
        let now = self.world.report.warp_instructions;
        if self.world.progress != self.progress.0 {
            self.progress = (self.world.progress, now);
        } else if now - self.progress.1 > DEADLOCK_LIMIT {
            for c in 0..self.clusters.len() {
                if self.clusters[c].ctas.iter().any(|cta| !cta.in_flight.is_empty()) {
                    self.progress.1 = now;
                    return self.force_progress();
                }
            }
            if self.start_cluster() {
                return Ok(());
            }
            return Err(deadlock::no_progress(&self.world, &self.clusters, DEADLOCK_LIMIT));
        }
        Ok(())
    }
}
