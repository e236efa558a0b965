//! A warp: its registers, and where its lanes are. Lanes that are at the same step and may go on form a group.

use super::{clock::Known, lower::Program, rng::Rng};
use crate::isa::pure::Lanes;
use std::{collections::VecDeque, rc::Rc};

/// All lanes.
pub(super) const FULL: u32 = !0;

/// Why lanes do not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// They do.
    None,
    /// For the other lanes of the warp, at an instruction that needs all.
    Lanes,
    /// For a named barrier, which lets them go itself.
    Barrier(usize),
    /// They try again when something happened in the cluster: a phase of an mbarrier.
    Phase,
    /// The same: the cluster's barrier.
    Cluster,
    /// The same: the other warps of the warpgroup.
    Warpgroup,
}

/// Lanes at one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) pc: u32,
    pub(super) mask: u32,
    pub(super) wait: Wait,
    /// Whether a wait that may give up has to.
    pub(super) give_up: bool,
}

/// Groups of asynchronous operations of one lane; batches count up, so that one that is complete says so of all before.
#[derive(Debug, Clone, Default)]
pub(super) struct Batches {
    /// The open batch.
    pub(super) open: u32,
    /// Last batches of committed groups that were not waited for.
    pub(super) commits: VecDeque<u32>,
    /// The last batch that was waited for.
    pub(super) waited: u32,
}

impl Batches {
    /// Ends a group.
    pub(super) fn commit(&mut self) {
        self.commits.push_back(self.open);
        self.open += 1;
    }

    /// The batch up to which all is complete when at most `left` groups are not.
    pub(super) fn bound(&mut self, left: usize) -> Option<u32> {
        let done = self.commits.len().checked_sub(left + 1)?;
        self.commits.get(done).copied()
    }

    /// Forgets groups up to a batch, which were waited for.
    pub(super) fn forget(&mut self, bound: u32) {
        self.waited = self.waited.max(bound);
        while self.commits.front().is_some_and(|&batch| batch <= bound) {
            self.commits.pop_front();
        }
    }
}

/// What a lane made known with its last fence, and how far.
#[derive(Debug)]
pub(super) struct Released {
    pub(super) clock: super::clock::Clock,
    pub(super) level: u8,
}

/// The `wgmma` of a warp.
#[derive(Debug, Default)]
pub(super) struct Products {
    /// The number of the last one that was issued.
    pub(super) issued: u32,
    /// The number of the last one that was waited for.
    pub(super) waited: u32,
    /// The last of each committed group that was not waited for.
    pub(super) commits: VecDeque<u32>,
    /// For each register the last product that adds to it, and the last that reads it as A.
    pub(super) sums: Vec<u32>,
    pub(super) inputs: Vec<u32>,
    /// Fences so far, and for each register how many there were when it was written.
    pub(super) fences: u32,
    pub(super) written: Vec<u32>,
}

/// A warp.
#[derive(Debug, Default)]
pub(super) struct Warp {
    /// Its place in its CTA.
    pub(super) index: u32,
    /// Registers, then constants.
    pub(super) regs: Vec<Lanes>,
    /// Lanes in which each register was written.
    pub(super) ready: Vec<u32>,
    pub(super) groups: Vec<Group>,
    pub(super) known: Known,
    /// Whether it is worth trying.
    pub(super) awake: bool,
    /// Groups of `cp.async`, of bulk stores, and of what these read.
    pub(super) copies: Vec<Batches>,
    pub(super) bulks: Vec<Batches>,
    pub(super) reads: Vec<Batches>,
    /// For each lane its last bulk store whose reads it did not wait for: batch and step.
    pub(super) unread: Vec<Option<(u32, u32)>>,
    pub(super) products: Products,
    pub(super) released: Vec<Option<Rc<Released>>>,
    /// What relaxed loads saw, until a fence.
    pub(super) acquired: Vec<(usize, super::clock::Clock)>,
    /// For each lane the mbarrier that it waits for in vain, and the phase.
    pub(super) waits: Vec<Option<(u32, u64)>>,
    /// Arrivals and waits at the cluster's barrier.
    pub(super) cluster_arrivals: u64,
    pub(super) cluster_waits: u64,
}

impl Warp {
    pub(super) fn new(index: u32, program: &Program, cluster: u32) -> Self {
        let mut regs =
            vec![[u64::from(super::memory::GARBAGE) * 0x0101_0101_0101_0101; 32]; program.registers];
        regs.extend(program.constants.iter().map(|&bits| [bits; 32]));
        let mut ready = vec![0; program.registers];
        ready.resize(regs.len(), FULL);
        let per_register = if program.wgmma { program.registers } else { 0 };
        let products = Products {
            sums: vec![0; per_register],
            inputs: vec![0; per_register],
            written: vec![0; per_register],
            ..Products::default()
        };
        Self {
            index,
            regs,
            ready,
            groups: vec![Group { pc: 0, mask: FULL, wait: Wait::None, give_up: false }],
            known: Known::new(cluster),
            awake: true,
            copies: vec![Batches { open: 1, ..Batches::default() }; 32],
            bulks: vec![Batches { open: 1, ..Batches::default() }; 32],
            reads: vec![Batches { open: 1, ..Batches::default() }; 32],
            unread: vec![None; 32],
            products,
            released: vec![None; 32],
            acquired: Vec::new(),
            waits: vec![None; 32],
            cluster_arrivals: 0,
            cluster_waits: 0,
        }
    }

    /// Whether some of its lanes have not ended.
    pub(super) fn live(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Something happened: waits that ask again may do so.
    pub(super) fn wake(&mut self) {
        for group in &mut self.groups {
            if matches!(group.wait, Wait::Phase | Wait::Cluster | Wait::Warpgroup) {
                group.wait = Wait::None;
            }
        }
        self.awake = true;
    }

    /// Joins groups at the same step, of which lanes that wait for lanes are one.
    pub(super) fn merge(&mut self) {
        let joins = |wait| matches!(wait, Wait::None | Wait::Lanes);
        let mut merged: Vec<Group> = Vec::with_capacity(self.groups.len());
        for &group in &self.groups {
            let place = merged.iter_mut().find(|other| other.pc == group.pc && joins(other.wait));
            match place {
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

    /// A group that may go on: mostly the one that is furthest behind, so that lanes meet again.
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
