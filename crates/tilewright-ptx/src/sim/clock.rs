//! Who knows what: vector clocks, over the threads of a cluster and what works for them, and over other clusters.
//!
//! Every thread counts its releases (arrivals, fences, barriers). An access is marked with the thread and its count; another
//! thread comes after it when its vector clock has a greater count for that thread. What works asynchronously has numbers of
//! its own behind the threads: a bulk copy is marked with its mbarrier and phase, a store with its thread's group.

use std::rc::Rc;

/// What a thread knows of others: for each the first count that it has not seen the end of.
///
/// A mark with count `c` is known when the clock is greater than `c`.
#[derive(Debug, Clone, Default)]
pub(super) struct Clock {
    /// The cluster of `counts`; `u32::MAX` where nobody is at home.
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

    /// All that either knows.
    pub(super) fn join(&mut self, other: &Self) {
        if !other.counts.is_empty() {
            join_counts(self.of(other.home), &other.counts);
        }
        for (cluster, counts) in &other.others {
            join_counts(self.of(*cluster), counts);
        }
    }

    /// Only what both know, of the same home; of other clusters nothing.
    pub(super) fn meet(&mut self, other: &Self) {
        self.counts.truncate(other.counts.len());
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine = (*mine).min(*theirs);
        }
    }

    /// Everything of `who` below `count` is known.
    pub(super) fn raise(&mut self, cluster: u32, who: usize, count: u32) {
        let counts = self.of(cluster);
        if counts.len() <= who {
            counts.resize(who + 1, 0);
        }
        counts[who] = counts[who].max(count);
    }

    /// What is known of one.
    #[inline]
    pub(super) fn get(&self, cluster: u32, who: usize) -> u32 {
        if cluster == self.home {
            return self.counts.get(who).copied().unwrap_or(0);
        }
        let other = self.others.iter().find(|(other, _)| *other == cluster);
        other.and_then(|(_, counts)| counts.get(who).copied()).unwrap_or(0)
    }
}

/// The clocks of a warp's lanes: lanes that know the same share one.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    /// Masks that do not overlap and together are all lanes.
    pub(super) parts: Vec<(u32, Rc<Clock>)>,
    /// How often each lane released, from 1 on.
    pub(super) counts: Vec<u32>,
}

impl Known {
    pub(super) fn new(home: u32) -> Self {
        Self { parts: vec![(!0, Rc::new(Clock::new(home)))], counts: vec![1; 32] }
    }

    /// The clock of a lane, without its own count.
    pub(super) fn of(&self, lane: usize) -> &Rc<Clock> {
        let part = self.parts.iter().find(|(mask, _)| mask >> lane & 1 != 0);
        &part.unwrap_or(&self.parts[0]).1
    }

    /// Lanes make what they did and know known to `into`. What they do next is not.
    pub(super) fn release(&mut self, mask: u32, (cluster, first): (u32, usize), into: &mut Clock) {
        self.publish(mask, (cluster, first), into);
        self.advance(mask);
    }

    /// The same, where [`Known::advance`] follows.
    pub(super) fn publish(&self, mask: u32, (cluster, first): (u32, usize), into: &mut Clock) {
        for (part, clock) in &self.parts {
            if part & mask != 0 {
                into.join(clock);
            }
        }
        for lane in (0..32).filter(|lane| mask >> lane & 1 != 0) {
            into.raise(cluster, first + lane, self.counts[lane] + 1);
        }
    }

    pub(super) fn advance(&mut self, mask: u32) {
        for (lane, count) in self.counts.iter_mut().enumerate() {
            *count += mask >> lane & 1;
        }
    }

    /// Changes what lanes know.
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

    /// Lanes learn what `from` knows.
    pub(super) fn acquire(&mut self, mask: u32, from: &Clock) {
        self.change(mask, |clock| clock.join(from));
    }

    /// All lanes know the same, and that includes all that they knew.
    pub(super) fn replace(&mut self, with: &Rc<Clock>) {
        self.parts.clear();
        self.parts.push((!0, Rc::clone(with)));
    }
}
