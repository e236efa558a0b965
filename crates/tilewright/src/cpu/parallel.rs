//! Work distribution over the thread team: per row, or per task index.

use super::simd::team::lock;
use crate::Cpu;
use std::sync::Mutex;

/// Elements that one thread processes before another would have joined.
const MIN_PARALLEL_ELEMENTS: usize = 1 << 14;
/// Tasks per thread of [`Cpu::each_row`], so that other threads take over those of a delayed thread.
const TASKS_PER_THREAD: usize = 4;

impl Cpu {
    /// Runs `work(scratch, row, item)` for every item, a row of `width` elements.
    ///
    /// One thread processes a row, so results do not depend on the number of threads or on other rows. `work` must write to
    /// `scratch` before reading it.
    pub(crate) fn each_row<I: Send, S: Send>(
        &self,
        items: Vec<I>,
        width: usize,
        scratch: impl Fn() -> S + Sync + Send,
        work: impl Fn(&mut S, usize, I) + Sync + Send,
    ) {
        if items.len() <= 1 || items.len() * width <= MIN_PARALLEL_ELEMENTS {
            let mut scratch = scratch();
            return items.into_iter().enumerate().for_each(|(row, item)| work(&mut scratch, row, item));
        }
        let rows_per_task = items.len().div_ceil(self.threads() * TASKS_PER_THREAD);
        let tasks = items.len().div_ceil(rows_per_task);
        let rows = Mutex::new(items.into_iter().enumerate());
        let scratches = (0..self.threads()).map(|_| None);
        self.for_each(tasks, scratches, |_, of_thread: &mut Option<S>| {
            let scratch = of_thread.get_or_insert_with(&scratch);
            let taken: Vec<_> = lock(&rows).by_ref().take(rows_per_task).collect();
            taken.into_iter().for_each(|(row, item)| work(scratch, row, item));
        });
    }

    /// Calls `work` for each index in `0..count` on at most one thread per state in `states`, including the calling thread.
    ///
    /// Threads fetch the next index dynamically, which balances the load if one is delayed.
    pub(crate) fn for_each<W: Send>(
        &self,
        count: usize,
        states: impl Iterator<Item = W>,
        work: impl Fn(usize, &mut W) + Sync,
    ) {
        let mut states: Vec<W> = states.take(count.min(self.threads())).collect();
        if let [state] = &mut *states {
            return (0..count).for_each(|at| work(at, state));
        }
        let states = Mutex::new(states);
        self.team.run(count, &|indices| {
            let state = lock(&states).pop();
            let Some(mut state) = state else { return };
            indices.for_each(|at| work(at, &mut state));
        });
    }
}
