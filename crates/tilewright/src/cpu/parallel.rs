//! Work distribution over the thread pool: per row, or per task index.

use crate::Cpu;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Waking the pool takes about 20 µs, in which one thread processes this many elements.
const MIN_PARALLEL_ELEMENTS: usize = 1 << 14;

impl Cpu {
    /// Runs `work(scratch, row, item)` for every item, a row of `width` elements.
    ///
    /// One thread processes a row, so results do not depend on the number of threads or on other rows. `work` must write to
    /// `scratch` before reading it.
    pub(crate) fn each_row<I: Send, S>(
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
        let run = || {
            let rows = items.into_par_iter().enumerate();
            rows.for_each_init(&scratch, |scratch, (row, item)| work(scratch, row, item));
        };
        self.pool.install(run);
    }

    /// Calls `work` for each index in `0..count` on one thread per state in `states`, including the calling thread.
    ///
    /// Threads fetch the next index dynamically, which balances the load if one is delayed.
    pub(crate) fn for_each<W: Send>(
        &self,
        count: usize,
        states: impl Iterator<Item = W>,
        work: impl Fn(usize, &mut W) + Sync,
    ) {
        let next = AtomicUsize::new(0);
        let run = |mut state: W| {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= count {
                    break;
                }
                work(at, &mut state);
            }
        };
        let mut states = states.take(count.min(self.threads()));
        let Some(own_state) = states.next() else { return };
        // the calling thread participates, because waking another costs more than a small task
        self.pool.in_place_scope(|scope| {
            for state in states {
                let run = &run;
                scope.spawn(move |_| run(state));
            }
            run(own_state);
        });
    }
}
