//! One row, one job: how operators over rows share a pool of threads.

use crate::Cpu;
use rayon::prelude::*;

impl Cpu {
    /// Runs `work(scratch, row, item)` for every item. Each row is the work of one thread, so the number of
    /// threads and the other rows cannot change a result; `scratch` is only ever a buffer to write before reading.
    pub(crate) fn each_row<I: Send, S>(
        &self,
        items: Vec<I>,
        scratch: impl Fn() -> S + Sync + Send,
        work: impl Fn(&mut S, usize, I) + Sync + Send,
    ) {
        // Waking the pool costs more than most single rows.
        if items.len() <= 1 {
            return items.into_iter().for_each(|item| work(&mut scratch(), 0, item));
        }
        let run = || {
            let rows = items.into_par_iter().enumerate();
            rows.for_each_init(&scratch, |scratch, (row, item)| work(scratch, row, item));
        };
        self.pool.install(run);
    }
}
