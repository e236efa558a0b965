//! Partitions of chunked rows, and of tokens, among threads.
//!
//! Thread `t` of a row owns the chunks `t + i · threads`, so loads are coalesced:
//!
//! 1. Up to 32 chunks: a power of two of threads per row, no barriers.
//! 2. Up to 128 chunks: one warp per row, no barriers.
//! 3. Beyond: one CTA per row and four chunks per thread. This keeps 64 bytes per thread in flight in few enough
//!    registers for about 1000 threads per SM.
//!
//! The number of chunks is a launch parameter; only a length class is compiled in ([`RowPartition::for_chunks`]).

use super::reduce;
use tilewright_ptx::{Builder, Shared, Value};

/// Threads of a CTA with several rows.
const THREADS: u32 = 128;
/// Chunks per thread, except for short rows.
const CHUNKS_PER_THREAD: u32 = 4;
/// CTA sizes for one row per CTA: few classes, dense enough to leave few threads idle.
const CLASSES: [u32; 15] = [64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024];

/// Partition of one length class of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowPartition {
    threads: u32,
    chunks_per_thread: u32,
}

impl RowPartition {
    /// Maximum row length, in chunks.
    pub const MAX_CHUNKS: u32 = 1024 * CHUNKS_PER_THREAD;

    /// Partition for rows of `chunks` chunks; `None` beyond [`RowPartition::MAX_CHUNKS`].
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

    /// Part of kernel names: threads per row and chunks per thread.
    pub fn name(self) -> String {
        format!("{}x{}", self.threads, self.chunks_per_thread)
    }

    pub(crate) fn cta_threads(self) -> u32 {
        if self.threads > 32 { self.threads } else { THREADS }
    }

    pub(crate) fn rows_per_cta(self) -> u32 {
        if self.threads > 32 { 1 } else { THREADS / self.threads }
    }

    pub(crate) fn ctas(self, rows: u32) -> u32 {
        rows.div_ceil(self.rows_per_cta())
    }

    /// Calls `body` with the row of this thread, among `rows` rows of `chunks` chunks of this class. Only full warps
    /// are skipped beyond the last row, so warps stay convergent.
    #[track_caller]
    pub fn place<'k>(
        self,
        k: &'k Builder,
        rows: Value<'k, u32>,
        chunks: Value<'k, u32>,
        body: impl FnOnce(RowPlace<'k>),
    ) {
        let (row, thread) = match self.rows_per_cta() {
            1 => (k.cta(), k.thread()),
            rows => (k.cta() * rows + k.thread() / self.threads, k.thread() % self.threads),
        };
        let (row, thread) = (row.named("row"), thread.named("thread_of_row"));
        let place = |in_rows| RowPlace { rows: self, row, thread, in_rows, chunks };
        match self.threads.is_multiple_of(32) {
            true => k.when(row.lt(rows), || body(place(k.constant(true)))),
            false => body(place(row.lt(rows))),
        }
    }
}

/// Row of a thread, and its chunks there.
#[derive(Debug, Clone, Copy)]
pub struct RowPlace<'k> {
    rows: RowPartition,
    /// Row index, may be out of range.
    pub row: Value<'k, u32>,
    /// Thread index in the row.
    pub thread: Value<'k, u32>,
    /// Whether the row exists; constant if a warp has at most one row.
    pub in_rows: Value<'k, bool>,
    chunks: Value<'k, u32>,
}

/// One chunk of a thread.
#[derive(Debug, Clone, Copy)]
pub struct ChunkPlace<'k> {
    /// Offset from the first chunk of the thread, in chunks.
    pub after_first: u32,
    /// Whether the row and the chunk exist.
    pub in_bounds: Value<'k, bool>,
}

impl<'k> RowPlace<'k> {
    /// Chunks of this thread.
    #[track_caller]
    pub fn chunks(self) -> Vec<ChunkPlace<'k>> {
        let place = |i: u32| {
            let after_first = i * self.rows.threads;
            let inside = (self.thread + after_first).lt(self.chunks);
            ChunkPlace { after_first, in_bounds: inside & self.in_rows }
        };
        (0..self.rows.chunks_per_thread).map(place).collect()
    }

    /// Sum over all threads of the row, the same in all of them; `memory` holds one value per warp of the CTA.
    #[track_caller]
    pub fn sum(self, memory: Shared<'k, f32>, x: Value<'k, f32>) -> Value<'k, f32> {
        let threads = self.rows.threads;
        if threads > 32 {
            return reduce::over_cta(memory, threads, x, |x| reduce::warp_sum(x), |a, b| a + b);
        }
        let masks = (0..5).rev().map(|bit| 1 << bit).filter(|mask| *mask < threads);
        masks.fold(x, |x, mask: u32| x + x.shuffle_xor(mask))
    }
}

/// Partition of tokens: every token has the same number of threads, without synchronization.
///
/// A CTA holds as many full tokens as fit. A token of more than [`TokenPartition::THREADS`] threads spans several CTAs in the second
/// grid dimension. Threads per token are a launch parameter: a thread computes its token in 32-bit arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenPartition {
    threads: u32,
}

impl TokenPartition {
    /// Threads per CTA.
    pub(crate) const THREADS: u32 = 256;

    /// Assigns `threads` threads to each token.
    pub(crate) fn new(threads: u32) -> Self {
        Self { threads: threads.max(1) }
    }

    /// First two grid dimensions for `tokens` tokens.
    pub(crate) fn ctas(self, tokens: u32) -> [u32; 2] {
        let tokens_per_cta = (Self::THREADS / self.threads).max(1);
        [tokens.div_ceil(tokens_per_cta), self.threads.div_ceil(Self::THREADS)]
    }

    /// Token of this thread, its index among the `threads` of the token, and whether both are in range.
    #[track_caller]
    pub(crate) fn locate<'k>(
        k: &'k Builder,
        tokens: Value<'k, u32>,
        threads: Value<'k, u32>,
    ) -> (Value<'k, u32>, Value<'k, u32>, Value<'k, bool>) {
        let tokens_per_cta = (k.constant(Self::THREADS) / threads).max(1);
        let shares_cta = tokens_per_cta.gt(1);
        let in_cta = shares_cta.select(k.thread() / threads, k.constant(0));
        let token = (k.cta() * tokens_per_cta + in_cta).named("token");
        let thread = (k.cta_y() * Self::THREADS + k.thread() - in_cta * threads).named("thread_of_token");
        (token, thread, in_cta.lt(tokens_per_cta) & thread.lt(threads) & token.lt(tokens))
    }
}
