//! Asynchronous copies of rows of keys and values to shared memory, by the entries of a lookup.

use super::{
    cta::{MmaCta, ThreadPartition},
    layout::RowFormat,
};
use tilewright_ptx::build::{Builder, Global, Shared, Value};

/// Bytes per entry.
const ENTRY_BYTES: usize = 16;
/// Entries per batch of loads, four registers each.
const ENTRIES_PER_BATCH: usize = 8;

/// Copies rows from the cache by their entries. Thread offsets are recomputed at each copy to reduce register pressure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileLoader<'k> {
    cta: MmaCta<'k>,
    thread: Value<'k, u32>,
    threads: usize,
    format: RowFormat,
    rows: usize,
    entries: Shared<'k, u32>,
}

impl<'k> TileLoader<'k> {
    /// Copies `rows` rows by `threads` threads, of which this is `thread`.
    pub(crate) fn new(
        cta: &MmaCta<'k>,
        (thread, threads): (Value<'k, u32>, usize),
        (format, rows): (RowFormat, usize),
        entries: Shared<'k, u32>,
    ) -> Self {
        Self { cta: *cta, thread, threads, format, rows, entries }
    }

    /// The partition of chunks among threads.
    #[track_caller]
    pub(crate) fn partition(&self) -> (ThreadPartition<'k>, RowFormat, usize) {
        (ThreadPartition::new(self.thread, self.threads, self.format.chunks), self.format, self.rows)
    }

    /// Starts this thread's copies to the rows at `to`, all of which exist: without predicates, which take a third of the time.
    pub(crate) fn copy_all(&self, to: Shared<'k, u32>) {
        let (k, format) = (self.cta.k, self.format);
        if format.dim * format.size != format.chunks * 16 {
            return self.copy(to, k.constant(0));
        }
        let (partition, ..) = self.partition();
        let entries = self.entries.byte(partition.row * ENTRY_BYTES as u32);
        let to = to.byte(partition.row * format.stride as u32 + (partition.chunk << 4));
        let first_chunk = (partition.chunk << 4).to_u64();
        partition.for_each_rows(k, self.rows, ENTRIES_PER_BATCH, |rows| {
            let entry = |row: &usize| entries.plus(row * ENTRY_BYTES / 4).load_vector::<2>();
            let entries: Vec<_> = rows.iter().map(entry).collect();
            for (row, [low, high]) in rows.iter().zip(entries) {
                let from = Global::<u32>::new(k.pack32(low, high) + first_chunk);
                for chunk in (0..format.chunks).step_by(partition.lanes) {
                    let to = to.plus((row * format.stride + chunk * 16) / 4);
                    k.copy_async(to, from.plus(chunk * 4), 16, 16);
                }
            }
        });
    }

    /// Starts this thread's copies to the rows at `to`.
    #[track_caller]
    pub(crate) fn copy(&self, to: Shared<'k, u32>, buffer: Value<'k, u32>) {
        let (k, format) = (self.cta.k, self.format);
        let (partition, ..) = self.partition();
        let entries = self.entries.byte(partition.row * ENTRY_BYTES as u32).byte(buffer);
        let to = to.byte(partition.row * format.stride as u32 + (partition.chunk << 4));
        let first_chunk = (partition.chunk << 4).to_u64();
        let present = (0..format.chunks)
            .step_by(partition.lanes)
            .map(|chunk| exists(k, format, partition.chunk + chunk as u32));
        let present: Vec<_> = present.collect();
        partition.for_each_rows(k, self.rows, ENTRIES_PER_BATCH, |rows| {
            // all loads first: assemblers do not move loads from shared memory across copies to it, so each would stall
            let entry = |row: &usize| entries.plus(row * ENTRY_BYTES / 4).load_vector::<4>();
            let entries: Vec<_> = rows.iter().map(entry).collect();
            for (row, [low, high, exists, _]) in rows.iter().zip(entries) {
                let from = Global::new(k.pack32(low, high) + first_chunk);
                for (at, present) in present.iter().enumerate() {
                    let (chunk, absent) = (at * partition.lanes, exists.eq(0) | !*present);
                    self.cta.copy_chunk((to, row * format.stride + chunk * 16), (from, chunk * 16), absent);
                }
            }
        });
    }
}

/// Whether rows in global memory have this chunk.
pub(crate) fn exists<'k>(k: &'k Builder, format: RowFormat, chunk: Value<'k, u32>) -> Value<'k, bool> {
    let chunks = format.dim * format.size / 16;
    if chunks == format.chunks { k.constant(true) } else { chunk.lt(chunks as u32) }
}
