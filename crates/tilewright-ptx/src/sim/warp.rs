//! The state of a warp: registers and groups of converged lanes.

use super::{clock::WarpClocks, lower::Program, rng::Rng};
use crate::isa::pure::Lanes;
use std::{cell::RefCell, collections::VecDeque, rc::Rc};

/// All lanes.
pub(super) const FULL: u32 = !0;

/// The condition that a group of lanes waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// None: the group can run.
    None,
    /// The other lanes of the warp, at an aligned instruction.
    Lanes,
    /// A named barrier, which releases the group itself.
    Barrier(usize),
    /// A phase of an mbarrier. The group retries after each event of the cluster.
    Phase,
    /// The cluster barrier, with retries.
    Cluster,
    /// The other warps of the warpgroup, with retries.
    Warpgroup,
}

/// Lanes at one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) pc: u32,
    pub(super) mask: u32,
    pub(super) wait: Wait,
    /// Whether a `try_wait` must return, even if its phase is incomplete.
    pub(super) timed_out: bool,
}

/// Groups of asynchronous operations of one lane. Batch numbers increase, so completion of one implies completion of all before.
#[derive(Debug, Clone, Default)]
pub(super) struct Batches {
    /// The open batch.
    pub(super) open: u32,
    /// The last batches of committed groups without a wait.
    pub(super) commits: VecDeque<u32>,
    /// The last batch with a wait.
    pub(super) waited: u32,
}

impl Batches {
    /// Commits a group.
    pub(super) fn commit(&mut self) {
        self.commits.push_back(self.open);
        self.open += 1;
    }

    /// The last complete batch if at most `left` groups are incomplete.
    pub(super) fn bound(&mut self, left: usize) -> Option<u32> {
        let done = self.commits.len().checked_sub(left + 1)?;
        self.commits.get(done).copied()
    }

    /// Removes groups up to a batch, after a wait.
    pub(super) fn forget(&mut self, bound: u32) {
        self.waited = self.waited.max(bound);
        while self.commits.front().is_some_and(|&batch| batch <= bound) {
            self.commits.pop_front();
        }
    }
}

/// The clock that a lane released with its last fence, and the fence's scope level.
#[derive(Debug)]
pub(super) struct FenceRelease {
    pub(super) clock: super::clock::Clock,
    pub(super) level: u8,
}

/// The `wgmma` state of a warp.
#[derive(Debug, Default)]
pub(super) struct WgmmaState {
    /// The number of the last issued `wgmma`.
    pub(super) issued: u32,
    /// The number of the last `wgmma` with a wait.
    pub(super) waited: u32,
    /// The number of waits.
    pub(super) waits: usize,
    /// The last `wgmma` of each committed group without a wait.
    pub(super) commits: VecDeque<u32>,
    /// Per register, the last `wgmma` that accumulates into it, and the last that reads it as A.
    pub(super) sums: Vec<u32>,
    pub(super) inputs: Vec<u32>,
    /// The number of fences, and per register one more than their number at its last write.
    pub(super) fences: u32,
    pub(super) written: Vec<u32>,
}

#[derive(Debug, Default)]
pub(super) struct Warp {
    /// The index in the CTA.
    pub(super) index: u32,
    /// Registers, then constants.
    pub(super) regs: Vec<Lanes>,
    /// Per register, a mask of the lanes in which it is initialized.
    pub(super) ready: Vec<u32>,
    pub(super) groups: Vec<Group>,
    pub(super) clocks: WarpClocks,
    /// Whether some group may be able to run.
    pub(super) awake: bool,
    /// Groups of `cp.async` per lane.
    pub(super) copies: Vec<Batches>,
    pub(super) wgmma: WgmmaState,
    pub(super) fence_releases: Vec<Option<Rc<FenceRelease>>>,
    /// Clocks of relaxed loads, acquired by the next fence.
    pub(super) pending_acquires: Vec<(usize, super::clock::Clock)>,
    /// Per lane, the mbarrier and phase that it waits for.
    pub(super) waits: Vec<Option<(u32, u64)>>,
    /// The lanes that have waited for the previous kernel.
    pub(super) waited: u32,
    /// Arrivals and waits at the cluster barrier.
    pub(super) cluster_arrivals: u64,
    pub(super) cluster_waits: u64,
}

/// Values and initialized lanes of a warp's registers.
#[derive(Debug, Default)]
struct RegisterFile(Vec<Lanes>, Vec<u32>);

thread_local! {
    /// Registers of ended warps. A warp has up to 20,000, and fresh memory for them took half of the time of short launches.
    static RETIRED: RefCell<Vec<RegisterFile>> = const { RefCell::new(Vec::new()) };
}

impl Warp {
    pub(super) fn new(index: u32, program: &Program<'_>, cluster: u32) -> Self {
        let RegisterFile(mut regs, mut ready) = RETIRED.with_borrow_mut(Vec::pop).unwrap_or_default();
        let count = program.registers + program.constants.len();
        if regs.capacity() < count {
            // zeroed pages, which are allocated at the first write
            regs = vec![[0; 32]; count];
        }
        // old values are not read: `ready` is 0
        regs.resize(count, [0; 32]);
        for (reg, &bits) in regs[program.registers..].iter_mut().zip(&program.constants) {
            *reg = [bits; 32];
        }
        ready.clear();
        ready.resize(program.registers, 0);
        ready.resize(count, FULL);
        let per_register = if program.wgmma { program.registers } else { 0 };
        let wgmma = WgmmaState {
            sums: vec![0; per_register],
            inputs: vec![0; per_register],
            written: vec![0; per_register],
            ..WgmmaState::default()
        };
        Self {
            index,
            regs,
            ready,
            groups: vec![Group { pc: 0, mask: FULL, wait: Wait::None, timed_out: false }],
            clocks: WarpClocks::new(cluster),
            awake: true,
            copies: vec![Batches { open: 1, ..Batches::default() }; 32],
            wgmma,
            fence_releases: vec![None; 32],
            pending_acquires: Vec::new(),
            waits: vec![None; 32],
            waited: 0,
            cluster_arrivals: 0,
            cluster_waits: 0,
        }
    }

    /// Keeps the registers for the next warp.
    pub(super) fn retire(self) {
        RETIRED.with_borrow_mut(|files| files.push(RegisterFile(self.regs, self.ready)));
    }

    /// Whether some lanes have not exited.
    pub(super) fn live(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Lets waits with retries try again.
    pub(super) fn wake(&mut self) {
        for group in &mut self.groups {
            if matches!(group.wait, Wait::Phase | Wait::Cluster | Wait::Warpgroup) {
                group.wait = Wait::None;
            }
        }
        self.awake = true;
    }

    /// Merges groups at the same step that can run or wait for lanes.
    pub(super) fn merge(&mut self) {
        let joins = |wait| matches!(wait, Wait::None | Wait::Lanes);
        let mut merged: Vec<Group> = Vec::with_capacity(self.groups.len());
        for &group in &self.groups {
            let target = merged.iter_mut().find(|other| other.pc == group.pc && joins(other.wait));
            match target {
                Some(other) if joins(group.wait) => {
                    other.mask |= group.mask;
                    if group.wait == Wait::None || other.mask == FULL {
                        other.wait = Wait::None;
                    }
                }
                _ => merged.push(group),
            }
        }
        self.groups = merged;
    }

    /// Chooses a runnable group: mostly the one with the lowest step, so that lanes reconverge.
    pub(super) fn choose(&self, rng: &mut Rng) -> Option<usize> {
        if self.groups.len() == 1 {
            return (self.groups[0].wait == Wait::None).then_some(0);
        }
        let mut free = (0..self.groups.len()).filter(|&at| self.groups[at].wait == Wait::None);
        if rng.once_in(8) {
            let count = free.clone().count();
            return if count == 0 { None } else { free.nth(rng.below(count)) };
        }
        free.min_by_key(|&at| self.groups[at].pc)
    }
}
