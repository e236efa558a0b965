//! Vector clocks over the threads and asynchronous agents of a cluster, and over other clusters.
//!
//! Every thread counts its releases (arrivals, fences, barriers). An access is marked with the thread and its count. It happens
//! before another thread's access if that thread's vector clock has a greater count for the first thread. Asynchronous agents
//! have indices after the threads: a bulk load is marked with its mbarrier and phase.

use std::rc::Rc;

/// A vector clock: per thread or agent, the first count that is not ordered before.
///
/// An access with count `c` happens before if the clock is greater than `c`.
#[derive(Debug, Clone, Default)]
pub(super) struct Clock {
    /// The cluster of `counts`; `u32::MAX` for none.
    home: u32,
    counts: Vec<u32>,
    others: Vec<(u32, Vec<u32>)>,
}

fn join_counts(into: &mut Vec<u32>, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (into, from) in into.iter_mut().zip(from) {
        *into = (*into).max(*from);
    }
}

impl Clock {
    pub(super) fn new(home: u32) -> Self {
        Self { home, counts: Vec::new(), others: Vec::new() }
    }

    fn of(&mut self, cluster: u32) -> &mut Vec<u32> {
        if cluster == self.home {
            return &mut self.counts;
        }
        let at = self.others.iter().position(|(other, _)| *other == cluster).unwrap_or_else(|| {
            self.others.push((cluster, Vec::new()));
            self.others.len() - 1
        });
        &mut self.others[at].1
    }

    /// Takes the maximum with another clock.
    pub(super) fn join(&mut self, other: &Self) {
        if !other.counts.is_empty() {
            join_counts(self.of(other.home), &other.counts);
        }
        for (cluster, counts) in &other.others {
            join_counts(self.of(*cluster), counts);
        }
    }

    /// Takes the minimum with another clock of the same home cluster; counts of other clusters are ignored.
    pub(super) fn meet(&mut self, other: &Self) {
        self.counts.truncate(other.counts.len());
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine = (*mine).min(*theirs);
        }
    }

    /// Raises the count of `thread` to at least `count`.
    pub(super) fn raise(&mut self, cluster: u32, thread: usize, count: u32) {
        let counts = self.of(cluster);
        if counts.len() <= thread {
            counts.resize(thread + 1, 0);
        }
        counts[thread] = counts[thread].max(count);
    }

    /// The count of a thread or agent.
    #[inline]
    pub(super) fn get(&self, cluster: u32, thread: usize) -> u32 {
        self.counts(cluster).get(thread).copied().unwrap_or(0)
    }

    /// The counts of a cluster's threads and agents; they may end early, with counts of 0.
    #[inline]
    pub(super) fn counts(&self, cluster: u32) -> &[u32] {
        if cluster == self.home {
            return &self.counts;
        }
        let other = self.others.iter().find(|(other, _)| *other == cluster);
        other.map_or(&[], |(_, counts)| counts)
    }
}

/// The clocks of a warp's lanes; lanes with equal clocks share one.
#[derive(Debug, Clone, Default)]
pub(super) struct WarpClocks {
    /// Disjoint lane masks that cover the warp, and their clocks.
    pub(super) parts: Vec<(u32, Rc<Clock>)>,
    /// The number of releases of each lane, starting at 1.
    pub(super) counts: Vec<u32>,
    /// The first agent of the lanes' `cp.async`, and per lane the first batch that it has not waited for. A lane waits only for
    /// its own copies; in `parts`, these batches would separate the clocks of all lanes.
    agent: u32,
    batches: [u32; 32],
}

impl WarpClocks {
    pub(super) fn new(home: u32) -> Self {
        Self { parts: vec![(!0, Rc::new(Clock::new(home)))], counts: vec![1; 32], ..Self::default() }
    }

    /// Orders the `cp.async` of a lane before its later accesses, up to a batch.
    pub(super) fn wait_for_copies(&mut self, lane: usize, first_agent: u32, batch: u32) {
        self.agent = first_agent;
        self.batches[lane] = self.batches[lane].max(batch + 1);
    }

    /// The agent of a lane's `cp.async`, and the first batch that the lane has not waited for.
    pub(super) fn copies_of(&self, lane: usize) -> (u32, u32) {
        (self.agent + lane as u32, self.batches[lane])
    }

    /// The clock of a lane, excluding its own count and copies.
    pub(super) fn of(&self, lane: usize) -> &Rc<Clock> {
        let part = self.parts.iter().find(|(mask, _)| mask >> lane & 1 != 0);
        &part.unwrap_or(&self.parts[0]).1
    }

    /// Release: joins the lanes' clocks and counts into `into`, then advances their counts.
    pub(super) fn release(&mut self, mask: u32, cluster: u32, first: usize, into: &mut Clock) {
        self.publish(mask, cluster, first, into);
        self.advance(mask);
    }

    /// The first half of a release; [`WarpClocks::advance`] is the second.
    pub(super) fn publish(&self, mask: u32, cluster: u32, first: usize, into: &mut Clock) {
        for (part, clock) in &self.parts {
            if part & mask != 0 {
                into.join(clock);
            }
        }
        for lane in (0..32).filter(|lane| mask >> lane & 1 != 0) {
            into.raise(cluster, first + lane, self.counts[lane] + 1);
            if self.batches[lane] > 0 {
                into.raise(cluster, self.agent as usize + lane, self.batches[lane]);
            }
        }
    }

    pub(super) fn advance(&mut self, mask: u32) {
        for (lane, count) in self.counts.iter_mut().enumerate() {
            *count += mask >> lane & 1;
        }
    }

    /// Applies `change` to the clocks of some lanes.
    pub(super) fn change(&mut self, mask: u32, mut change: impl FnMut(&mut Clock)) {
        let mut apart = Vec::new();
        for (part, clock) in &mut self.parts {
            let inside = *part & mask;
            if inside == *part {
                change(Rc::make_mut(clock));
            } else if inside != 0 {
                *part &= !mask;
                let mut own = Clock::clone(clock);
                change(&mut own);
                apart.push((inside, Rc::new(own)));
            }
        }
        self.parts.append(&mut apart);
    }

    /// Acquire: joins `from` into the lanes' clocks.
    pub(super) fn acquire(&mut self, mask: u32, from: &Clock) {
        self.change(mask, |clock| clock.join(from));
    }

    /// Replaces all lanes' clocks by one that includes them.
    pub(super) fn replace(&mut self, with: &Rc<Clock>) {
        self.parts.clear();
        self.parts.push((!0, Rc::clone(with)));
    }
}
