//! How operators share the threads of a pool: by rows, or by numbered jobs.

use crate::Cpu;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

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

    /// Calls `work` with each of `0..count` from as many threads as `states` gives, the calling one among them, each with
    /// a state of its own.
    /// Threads take the next number when they are done with one, so that one held up leaves its share to others.
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
        let Some(ours) = states.next() else { return };
        // the calling thread works too: waking another costs more than a small job
        self.pool.in_place_scope(|scope| {
            for state in states {
                let run = &run;
                scope.spawn(move |_| run(state));
            }
            run(ours);
        });
    }
}
