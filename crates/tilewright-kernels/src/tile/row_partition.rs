//! How rows of chunks are dealt to threads.
//!
//! Thread `t` of a row has the chunks `t + i · threads`, so that neighbours load neighbours. A row of up to 32 chunks has a power
//! of two of threads, and longer ones up to 128 a warp: nobody waits for a barrier. Beyond that a row has a CTA, and four chunks
//! a thread: 64 bytes in flight for each, in few enough registers that an SM holds some thousand threads. How many chunks rows
//! have is known when a kernel is launched; compiled in is only a class of lengths ([`Rows::for_chunks`]).

use super::reduce;
use tilewright_ptx::build::{Builder, Shared, Value};

/// Threads of a CTA that has several rows.
const THREADS: u32 = 128;
/// Chunks of a thread, unless rows are short.
const CHUNKS_PER_THREAD: u32 = 4;
/// Threads of a CTA that has one row: few classes, near enough to each other that few threads are idle.
const CLASSES: [u32; 15] = [64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024];

/// A class of lengths of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowPartition {
    threads: u32,
    chunks_per_thread: u32,
}

impl RowPartition {
    /// The longest row, in chunks.
    pub const MAX_CHUNKS: u32 = 1024 * CHUNKS_PER_THREAD;

    /// The class of rows of `chunks` chunks; none beyond [`Rows::MAX_CHUNKS`].
    pub fn for_chunks(chunks: u32) -> Option<Self> {
        let min_threads = chunks.div_ceil(CHUNKS_PER_THREAD);
        match chunks {
            ..=32 => Some(Self { threads: chunks.max(1).next_power_of_two(), chunks_per_thread: 1 }),
            33..=128 => Some(Self { threads: 32, chunks_per_thread: CHUNKS_PER_THREAD }),
            _ => CLASSES
                .into_iter()
                .find(|&threads| threads >= min_threads)
                .map(|threads| Self { threads, chunks_per_thread: CHUNKS_PER_THREAD }),
        }
    }

    /// Its name in names of kernels: threads of a row, and chunks of a thread.
    pub fn name(self) -> String {
        format!("{}x{}", self.threads, self.chunks_per_thread)
    }

    /// Threads of a CTA.
    pub fn cta_threads(self) -> u32 {
        if self.threads > 32 { self.threads } else { THREADS }
    }

    /// Rows of a CTA.
    pub fn rows_per_cta(self) -> u32 {
        if self.threads > 32 { 1 } else { THREADS / self.threads }
    }

    /// CTAs of `rows` rows.
    pub fn ctas(self, rows: u32) -> u32 {
        rows.div_ceil(self.rows_per_cta())
    }

    /// Calls `body` with the place of this thread among `rows` rows of `chunks` chunks, which are of this class. Warps beyond the
    /// last row skip it, lanes do not: a warp stays together.
    #[track_caller]
    pub fn place<'k>(
        self,
        k: &'k Builder,
        (rows, chunks): (Value<'k, u32>, Value<'k, u32>),
        body: impl FnOnce(RowPlace<'k>),
    ) {
        let (row, thread) = match self.rows_per_cta() {
            1 => (k.cta(), k.thread()),
            rows => (k.cta() * rows + k.thread() / self.threads, k.thread() % self.threads),
        };
        let (row, thread) = (row.named("row"), thread.named("thread_of_row"));
        let place = |in_rows| RowPlace { k, rows: self, row, thread, in_rows, chunks };
        match self.threads.is_multiple_of(32) {
            true => k.when(row.lt(rows), || body(place(k.constant(true)))),
            false => body(place(row.lt(rows))),
        }
    }
}

/// A thread's row, and its chunks there.
#[derive(Debug, Clone, Copy)]
pub struct RowPlace<'k> {
    k: &'k Builder,
    rows: RowPartition,
    /// The row, which may be beyond the last.
    pub row: Value<'k, u32>,
    /// The thread among those of its row.
    pub thread: Value<'k, u32>,
    /// Whether there is such a row; known where a warp has one row or less.
    pub in_rows: Value<'k, bool>,
    chunks: Value<'k, u32>,
}

/// A chunk of a thread.
#[derive(Debug, Clone, Copy)]
pub struct ChunkPlace<'k> {
    /// Its distance from the thread's first, in chunks.
    pub after_first: u32,
    /// Whether the row is there and has such a chunk.
    pub in_bounds: Value<'k, bool>,
}

impl<'k> RowPlace<'k> {
    /// The chunks of this thread.
    #[track_caller]
    pub fn chunks(self) -> Vec<ChunkPlace<'k>> {
        let place = |i: u32| {
            let after_first = i * self.rows.threads;
            let inside = (self.thread + after_first).lt(self.chunks);
            ChunkPlace { after_first, in_bounds: inside & self.in_rows }
        };
        (0..self.rows.chunks_per_thread).map(place).collect()
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

#[cfg(test)]
mod tests {
    use super::RowPartition;

    #[test]
    fn rows_fit_their_class_and_leave_few_threads_idle() {
        for chunks in 1..=RowPartition::MAX_CHUNKS {
            let rows = RowPartition::for_chunks(chunks).expect("a class");
            let capacity = rows.threads * rows.chunks_per_thread;
            assert!(chunks <= capacity, "{chunks} chunks in {rows:?}");
            let idle = capacity - chunks;
            assert!(
                idle < 128.max(capacity / 4) || capacity <= 128,
                "{chunks} chunks leave {idle} of {rows:?} idle"
            );
        }
        assert_eq!(RowPartition::for_chunks(RowPartition::MAX_CHUNKS + 1), None);
    }
}
