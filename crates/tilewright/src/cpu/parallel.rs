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
        mut items: Vec<I>,
        width: usize,
        scratch: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, usize, &mut I) + Sync,
    ) {
        let rows_per_task = self.rows_per_task(items.len(), width);
        let tasks = items.len().div_ceil(rows_per_task);
        let chunks = Mutex::new(items.chunks_mut(rows_per_task).enumerate());
        let scratches = Mutex::new(Vec::new());
        self.run_tasks(tasks, &|| {
            let Some((task, items)) = lock(&chunks).next() else { return };
            let unused = lock(&scratches).pop();
            let mut of_task = unused.unwrap_or_else(&scratch);
            for (row, item) in (task * rows_per_task..).zip(items) {
                work(&mut of_task, row, item);
            }
            lock(&scratches).push(of_task);
        });
    }

    /// Rows per task: all, if they are too few for a second thread.
    fn rows_per_task(&self, rows: usize, width: usize) -> usize {
        let parallel = rows * width > MIN_PARALLEL_ELEMENTS;
        let tasks = if parallel { self.threads() * TASKS_PER_THREAD } else { 1 };
        rows.div_ceil(tasks).max(1)
    }

    /// Calls `task` `count` times, shared by the threads. Not generic, because most operators have a task per dtype.
    fn run_tasks(&self, count: usize, task: &(dyn Fn() + Sync)) {
        if count == 1 {
            return task();
        }
        self.team.run(count, &|indices| indices.for_each(|_| task()));
    }

    /// Calls `work` for each index in `0..count` on at most one thread per state in `states`, including the calling thread.
    ///
    /// Threads fetch the next index dynamically, which balances the load if one is delayed.
    pub(crate) fn for_each<W: Send>(
        &self,
        count: usize,
        states: impl Iterator<Item = W> + Send,
        work: impl Fn(usize, &mut W) + Sync,
    ) {
        let states = Mutex::new(states.take(count.min(self.threads())));
        self.team.run(count, &|indices| {
            let state = lock(&states).next();
            let Some(mut state) = state else { return };
            indices.for_each(|at| work(at, &mut state));
        });
    }
}
