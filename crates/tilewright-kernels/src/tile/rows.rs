//! How rows of vectors are dealt to threads.
//!
//! Thread `t` of a row has the vectors `t + i · threads`, so that neighbours load neighbours. A row of up to 32 vectors has a power
//! of two of threads, and longer ones up to 128 a warp: nobody waits for a barrier. Beyond that a row has a CTA, and four vectors
//! a thread: 64 bytes in flight for each, in few enough registers that an SM holds some thousand threads.

use super::reduce;
use tilewright_ptx::build::{Builder, Shared, Value};

/// Threads of a CTA that has several rows.
const THREADS: u32 = 128;
/// Vectors of a thread.
const EACH: u32 = 4;

/// Rows of so many vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    vectors: u32,
    threads: u32,
}

impl Rows {
    /// The longest row, in vectors: a CTA has 1024 threads.
    pub const MAX_VECTORS: u32 = 1024 * EACH;

    /// Rows of `vectors` vectors, from 1 to [`Rows::MAX_VECTORS`].
    pub fn new(vectors: u32) -> Self {
        let wanted = vectors.div_ceil(EACH);
        let threads = match vectors {
            ..=32 => vectors.next_power_of_two(),
            _ => wanted.next_multiple_of(32),
        };
        Self { vectors, threads }
    }

    /// Threads of a CTA.
    pub fn cta_threads(self) -> u32 {
        if self.threads > 32 { self.threads } else { THREADS }
    }

    /// Rows of a CTA.
    pub fn of_cta(self) -> u32 {
        if self.threads > 32 { 1 } else { THREADS / self.threads }
    }

    /// CTAs of `rows` rows.
    pub fn ctas(self, rows: u32) -> u32 {
        rows.div_ceil(self.of_cta())
    }

    /// Calls `body` with the place of this thread among `rows` rows. Warps beyond the last row skip it, lanes do not: a warp stays
    /// together.
    #[track_caller]
    pub fn place<'k>(self, k: &'k Builder, rows: Value<'k, u32>, body: impl FnOnce(RowPlace<'k>)) {
        let (row, thread) = match self.of_cta() {
            1 => (k.cta(), k.thread()),
            rows => (k.cta() * rows + k.thread() / self.threads, k.thread() % self.threads),
        };
        let (row, thread) = (row.named("row"), thread.named("thread_of_row"));
        let place = |in_rows| RowPlace { k, rows: self, row, thread, in_rows };
        match self.threads.is_multiple_of(32) {
            true => k.when(row.lt(rows), || body(place(k.constant(true)))),
            false => body(place(row.lt(rows))),
        }
    }
}

/// A thread's row, and its vectors there.
#[derive(Debug, Clone, Copy)]
pub struct RowPlace<'k> {
    k: &'k Builder,
    rows: Rows,
    /// The row, which may be beyond the last.
    pub row: Value<'k, u32>,
    /// The thread among those of its row.
    pub thread: Value<'k, u32>,
    /// Whether there is such a row; known where a warp has one row or less.
    pub in_rows: Value<'k, bool>,
}

/// A vector of a thread.
#[derive(Debug, Clone, Copy)]
pub struct VectorPlace<'k> {
    /// Its distance from the thread's first, in vectors.
    pub after_first: usize,
    /// Whether rows have such a vector.
    pub is_there: Value<'k, bool>,
}

impl<'k> RowPlace<'k> {
    /// The vectors of this thread.
    #[track_caller]
    pub fn vectors(self) -> Vec<VectorPlace<'k>> {
        let Rows { vectors, threads } = self.rows;
        let place = |begin: u32| {
            let left = vectors - begin;
            let inside = if left >= threads { self.k.constant(true) } else { self.thread.lt(left) };
            VectorPlace { after_first: begin as usize, is_there: inside }
        };
        (0..vectors).step_by(threads as usize).map(place).collect()
    }

    /// The sum over all threads of the row, the same in all of them; `memory` has a number for each warp of the CTA.
    #[track_caller]
    pub fn sum(self, memory: Shared<'k, f32>, x: Value<'k, f32>) -> Value<'k, f32> {
        let threads = self.rows.threads;
        if threads > 32 {
            return reduce::over_cta(self.k, (memory, threads), x, |x| reduce::warp_sum(x), |a, b| a + b);
        }
        let masks = (0..5).rev().map(|bit| 1 << bit).filter(|mask| *mask < threads);
        masks.fold(x, |x, mask: u32| x + x.shuffle_xor(mask))
    }
}
