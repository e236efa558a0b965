//! The grid at work: which CTAs are there, who runs next and for how long, and when asynchronous operations complete.

use super::{
    Launch, Memory, Report,
    exec::Exec,
    fault::{Fault, FaultKind},
    flight,
    lower::Program,
    rng::Rng,
    shadow::Shadow,
    stuck,
    warp::{Wait, Warp},
    wgmma,
    world::{Cluster, World},
};
use std::{collections::HashMap, mem};

/// Clusters that run together at most.
const RESIDENT: usize = 132;

/// So many instructions of warps without any change that another could wait for are a loop without an end.
const PATIENCE: u64 = 4_000_000;

/// Slices after which moods change.
const MOOD: u32 = 64;

/// A launch at work.
pub(super) struct Grid<'m> {
    world: World<'m>,
    clusters: Vec<Cluster>,
    /// Clusters that did not begin, the next one last.
    waiting: Vec<u32>,
    mood: Mood,
    /// Progress when somebody last gave up, and when it was last seen, in instructions.
    gave_up_at: u64,
    progress: (u64, u64),
}

/// What the seed prefers for a while.
#[derive(Debug, Default)]
struct Mood {
    slices: u32,
    /// Warps whose mixed number is small wait while others can run.
    salt: u64,
    /// Pieces of copies that arrive after each slice: once in so many, and how many.
    pace: (usize, usize),
    last: Option<(usize, usize, usize)>,
}

impl<'m> Grid<'m> {
    pub(super) fn new(launch: &Launch<'_>, memory: &'m mut Memory) -> Result<Self, Fault> {
        let program = Program::new(launch.kernel, launch.args)?;
        let (grid, cluster) = (launch.grid, program.cluster);
        let ctas = grid.iter().map(|&side| u64::from(side)).product::<u64>();
        if ctas == 0 || !grid[0].is_multiple_of(cluster) || ctas >= 1 << 31 {
            let message =
                format!("a grid of {grid:?} CTAs: expected none to be 0, and x a multiple of {cluster}");
            return Err(Fault::of_launch(FaultKind::BadArgument, message));
        }
        let shape = (program.threads, program.cluster);
        let mut waiting: Vec<u32> = (0..(ctas / u64::from(cluster)) as u32).rev().collect();
        let mut rng = Rng::new(launch.seed);
        if rng.once_in(2) {
            for at in (1..waiting.len()).rev() {
                waiting.swap(at, rng.below(at + 1));
            }
        }
        let world = World {
            shadows: memory.sizes().map(|size| Shadow::new(size, shape)).collect(),
            program,
            memory,
            flags: HashMap::new(),
            fences: HashMap::new(),
            rng,
            report: Report::default(),
            progress: 0,
            grid,
        };
        let mood = Mood::default();
        Ok(Self { world, clusters: Vec::new(), waiting, mood, gave_up_at: u64::MAX, progress: (0, 0) })
    }

    /// Runs until all CTAs ended.
    pub(super) fn run(mut self) -> Result<Report, Fault> {
        loop {
            let room = self.clusters.len() < RESIDENT;
            if self.clusters.len() < 2 || (room && self.world.rng.once_in(128)) {
                self.admit();
            }
            if self.clusters.is_empty() {
                return Ok(self.world.report);
            }
            self.feel();
            match self.pick() {
                Some(place) => self.slice(place)?,
                None => self.unstick()?,
            }
        }
    }

    /// Lets the next cluster begin. Whether there was one.
    fn admit(&mut self) -> bool {
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

    fn feel(&mut self) {
        if self.mood.slices == 0 {
            let rng = &mut self.world.rng;
            self.mood.slices = MOOD;
            self.mood.salt = rng.next();
            self.mood.pace = [(1, 0), (8, 1), (2, 4), (1, 64), (1, 100_000)][rng.below(5)];
        }
        self.mood.slices -= 1;
    }

    /// A warp that is worth trying.
    fn pick(&mut self) -> Option<(usize, usize, usize)> {
        let rng = &mut self.world.rng;
        if let Some((c, r, w)) = self.mood.last
            && rng.once_in(3)
            && self.clusters.get(c).is_some_and(|cluster| cluster.ctas[r].warps[w].awake)
        {
            return self.mood.last;
        }
        let (size, warps) = (self.world.program.cluster as usize, self.world.program.threads as usize / 32);
        let total = self.clusters.len() * size * warps;
        let start = rng.below(total);
        let place = |at: usize| (at / warps / size, at / warps % size, at % warps);
        let awake = |&(c, r, w): &(usize, usize, usize)| {
            let warp: &Warp = &self.clusters[c].ctas[r].warps[w];
            warp.awake && warp.live()
        };
        let salt = self.mood.salt;
        let starved =
            |&(c, r, w): &(usize, usize, usize)| Rng::new(salt ^ (c << 20 | r << 10 | w) as u64).once_in(4);
        let mut found = (start..start + total).map(|at| place(at % total)).filter(awake);
        let first = found.next()?;
        let chosen =
            if starved(&first) { found.find(|place| !starved(place)).unwrap_or(first) } else { first };
        self.mood.last = Some(chosen);
        Some(chosen)
    }

    /// Runs one warp for a while.
    fn slice(&mut self, (c, rank, w): (usize, usize, usize)) -> Result<(), Fault> {
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
            culprit: 0,
        };
        let ran = exec.slice(budget);
        self.clusters[c].ctas[rank].warps[w] = warp;
        ran?;
        if !self.clusters[c].ctas[rank].warps[w].live() && !self.clusters[c].live() {
            return self.retire(c);
        }
        self.tick(c)?;
        self.check_patience()
    }

    /// All of a cluster's warps ended: what is on its way arrives.
    fn retire(&mut self, c: usize) -> Result<(), Fault> {
        let mut cluster = self.clusters.swap_remove(c);
        self.mood.last = None;
        for rank in 0..cluster.ctas.len() {
            flight::finish(&mut self.world, &mut cluster, rank, |_| true)?;
        }
        Ok(())
    }

    /// Some asynchronous operations of a cluster go on.
    fn tick(&mut self, c: usize) -> Result<(), Fault> {
        let (once_in, pieces) = self.mood.pace;
        let cluster = &mut self.clusters[c];
        for rank in 0..cluster.ctas.len() {
            for group in 0..cluster.ctas[rank].warpgroups.len() {
                let warpgroup = &cluster.ctas[rank].warpgroups[group];
                if warpgroup.pending.is_empty() {
                    continue;
                }
                let (hurry, any) = (warpgroup.hurry, u32::MAX);
                if self.world.rng.once_in(4) {
                    wgmma::compute(&mut self.world, cluster, (rank, group), any)?;
                }
                if self.world.rng.once_in(2) {
                    wgmma::compute(&mut self.world, cluster, (rank, group), hurry)?;
                }
            }
            let mut left = pieces;
            while left > 0 && !cluster.ctas[rank].flights.is_empty() && self.world.rng.once_in(once_in) {
                let at = self.world.rng.below(cluster.ctas[rank].flights.len());
                let some = 1 + self.world.rng.below(left);
                flight::fly(&mut self.world, cluster, (rank, at), some)?;
                left -= some;
            }
        }
        Ok(())
    }

    /// Nobody can go on: completes something, or lets a cluster begin, or waits give up; else that is the end.
    fn unstick(&mut self) -> Result<(), Fault> {
        let chosen = self.world.rng.below(self.clusters.len());
        let order = (chosen..self.clusters.len()).chain(0..chosen);
        for c in order {
            let cluster = &mut self.clusters[c];
            for rank in 0..cluster.ctas.len() {
                let count = cluster.ctas[rank].flights.len();
                if count > 0 {
                    let at = self.world.rng.below(count);
                    flight::fly(&mut self.world, cluster, (rank, at), usize::MAX)?;
                    return Ok(());
                }
                let groups = &cluster.ctas[rank].warpgroups;
                if let Some(group) = groups.iter().position(|group| !group.pending.is_empty()) {
                    return wgmma::compute(&mut self.world, cluster, (rank, group), u32::MAX);
                }
            }
        }
        if self.admit() {
            return Ok(());
        }
        let mut gave_up = false;
        if self.gave_up_at != self.world.progress {
            self.gave_up_at = self.world.progress;
            for warp in
                self.clusters.iter_mut().flat_map(|cluster| &mut cluster.ctas).flat_map(|cta| &mut cta.warps)
            {
                for group in warp.groups.iter_mut().filter(|group| group.wait == Wait::Phase) {
                    (group.wait, group.give_up) = (Wait::None, true);
                    (warp.awake, gave_up) = (true, true);
                }
            }
        }
        if gave_up { Ok(()) } else { Err(stuck::explain(&self.world, &self.clusters)) }
    }

    /// Whether anything changed for a long time.
    fn check_patience(&mut self) -> Result<(), Fault> {
        let now = self.world.report.warp_instructions;
        if self.world.progress != self.progress.0 {
            self.progress = (self.world.progress, now);
        } else if now - self.progress.1 > PATIENCE {
            for c in 0..self.clusters.len() {
                if self.clusters[c].ctas.iter().any(|cta| !cta.flights.is_empty()) {
                    self.progress.1 = now;
                    return self.unstick();
                }
            }
            if self.admit() {
                return Ok(());
            }
            return Err(stuck::runs_forever(&self.world, &self.clusters, PATIENCE));
        }
        Ok(())
    }
}
