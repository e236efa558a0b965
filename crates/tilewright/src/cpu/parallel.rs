//! One row, one job: how operators over rows share a pool of threads.

use crate::Cpu;
use rayon::prelude::*;

/// Waking the pool takes some 20 microseconds, in which one thread gets through about this many elements.
const WORTH_WAKING: usize = 1 << 14;

impl Cpu {
    /// Runs `work(scratch, row, item)` for every item, a row of `width` elements.
    ///
    /// Each row is the work of one thread, so the number of threads and the other rows cannot change a result;
    /// `scratch` is only ever a buffer to write before reading.
    pub(crate) fn each_row<I: Send, S>(
        &self,
        items: Vec<I>,
        width: usize,
        scratch: impl Fn() -> S + Sync + Send,
        work: impl Fn(&mut S, usize, I) + Sync + Send,
    ) {
        if items.len() <= 1 || items.len() * width <= WORTH_WAKING {
            let mut scratch = scratch();
            return items.into_iter().enumerate().for_each(|(row, item)| work(&mut scratch, row, item));
        }
        let run = || {
            let rows = items.into_par_iter().enumerate();
            rows.for_each_init(&scratch, |scratch, (row, item)| work(scratch, row, item));
        };
        self.pool.install(run);
    }
}
