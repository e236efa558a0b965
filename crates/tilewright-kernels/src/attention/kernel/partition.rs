//! Division of rows of 16-byte chunks among threads.

use super::layout::RowFormat;
use tilewright_ptx::{Builder, Value};

/// Threads that divide a task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadGroup<'k> {
    /// This thread among them.
    pub(crate) index: Value<'k, u32>,
    pub(crate) count: usize,
}

impl<'k> ThreadGroup<'k> {
    /// The lanes of a warp, for tasks of each warp.
    #[track_caller]
    pub(crate) fn of_warp(k: &'k Builder) -> Self {
        Self { index: k.lane(), count: 32 }
    }
}

/// Partition of rows of chunks among threads: each thread takes one chunk per row, and every `lanes`-th chunk after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadPartition<'k> {
    /// The first row of this thread.
    pub(crate) row: Value<'k, u32>,
    /// The first chunk of this thread in its rows.
    pub(crate) chunk: Value<'k, u32>,
    /// Threads per row.
    pub(crate) lanes: usize,
    /// Rows of one pass of all threads.
    pub(crate) rows_at_once: usize,
}

impl<'k> ThreadPartition<'k> {
    /// Partitions rows of `chunks` chunks.
    #[track_caller]
    pub(crate) fn new(threads: ThreadGroup<'k>, chunks: usize) -> Self {
        let lanes = 1 << chunks.trailing_zeros().min(5);
        let (row, chunk) = divide(threads.index, lanes);
        Self { row, chunk, lanes, rows_at_once: threads.count / lanes }
    }

    /// Calls `body` for each of this thread's chunks in rows from `begin` to `end`.
    #[track_caller]
    pub(crate) fn for_each_chunk(
        &self,
        begin: Value<'k, u32>,
        end: usize,
        chunks: usize,
        body: impl Fn(Value<'k, u32>, Value<'k, u32>),
    ) {
        begin.builder().repeat((begin + self.row, end as u32), self.rows_at_once as u32, |row| {
            (0..chunks).step_by(self.lanes).for_each(|chunk| body(row, self.chunk + chunk as u32));
        });
    }

    /// Calls `body` for each of this thread's rows among `rows`, relative to its first.
    #[track_caller]
    pub(crate) fn for_each_row(&self, k: &'k Builder, rows: usize, mut body: impl FnMut(usize)) {
        self.for_each_rows(k, rows, 1, |rows| rows.iter().for_each(|row| body(*row)));
    }

    /// The same, with up to `batch` rows per call.
    #[track_caller]
    pub(crate) fn for_each_rows(
        &self,
        k: &'k Builder,
        rows: usize,
        batch: usize,
        mut body: impl FnMut(&[usize]),
    ) {
        let full_passes: Vec<_> = (0..rows / self.rows_at_once).map(|at| at * self.rows_at_once).collect();
        full_passes.chunks(batch).for_each(&mut body);
        let remainder = rows % self.rows_at_once;
        if remainder > 0 {
            k.when(self.row.lt(remainder as u32), || body(&[rows - remainder]));
        }
    }
}

/// Rows of chunks in shared memory, and the chunks of this thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartitionedRows<'k> {
    pub(crate) partition: ThreadPartition<'k>,
    pub(crate) format: RowFormat,
    /// Number of rows.
    pub(crate) rows: usize,
}

/// Quotient and remainder by a constant. Assemblers do not turn divisions by powers of two into shifts.
#[track_caller]
pub(crate) fn divide(n: Value<'_, u32>, by: usize) -> (Value<'_, u32>, Value<'_, u32>) {
    match by.is_power_of_two() {
        true => (n >> by.trailing_zeros(), n & (by as u32 - 1)),
        false => (n / by as u32, n % by as u32),
    }
}
