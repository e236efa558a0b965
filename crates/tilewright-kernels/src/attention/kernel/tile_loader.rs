//! Asynchronous copies of rows of keys and values to shared memory, by the entries of a lookup.

use super::{MmaCta, PartitionedRows, RowFormat, ThreadGroup, ThreadPartition};
use tilewright_ptx::{Builder, CachePolicy, Global, GlobalToShared, Shared, Value};

/// Bytes per entry.
const ENTRY_BYTES: usize = 16;
/// Entries per batch of loads, four registers each.
const ENTRIES_PER_BATCH: usize = 8;

/// Copies rows from the cache by their entries. Thread offsets are recomputed at each copy to reduce register pressure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileLoader<'k> {
    cta: MmaCta<'k>,
    threads: ThreadGroup<'k>,
    format: RowFormat,
    rows: usize,
    entries: Shared<'k, u32>,
    /// The L2 cache policy of copies of rows that all exist.
    policy: Option<CachePolicy<'k>>,
}

impl<'k> TileLoader<'k> {
    /// Copies `rows` rows by `threads`.
    pub(crate) fn new(
        cta: &MmaCta<'k>,
        threads: ThreadGroup<'k>,
        format: RowFormat,
        rows: usize,
        entries: Shared<'k, u32>,
    ) -> Self {
        Self { cta: *cta, threads, format, rows, entries, policy: None }
    }

    /// The loader, with an L2 cache policy of copies of rows that all exist.
    pub(crate) fn with_policy(self, policy: CachePolicy<'k>) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// The rows, and the chunks that this thread copies.
    #[track_caller]
    pub(crate) fn partitioned_rows(&self) -> PartitionedRows<'k> {
        let format = self.format;
        if format.box_rows.is_some() {
            // lines of 128 bytes of all panels
            let (format, rows) = (RowFormat::of_boxes(64, 1), self.rows * format.panels());
            return PartitionedRows { partition: ThreadPartition::new(self.threads, 8), format, rows };
        }
        PartitionedRows { partition: self.partition(), format, rows: self.rows }
    }

    #[track_caller]
    fn partition(&self) -> ThreadPartition<'k> {
        ThreadPartition::new(self.threads, self.format.chunks)
    }

    /// Starts this thread's copies to the rows at `to`, all of which exist: without predicates, which take a third of the time.
    pub(crate) fn copy_all(&self, to: Shared<'k, u32>) {
        let (k, format) = (self.cta.k, self.format);
        if format.dim * format.size != format.chunks * 16 {
            return self.copy(to, k.constant(0));
        }
        let partition = self.partition();
        let entries = self.entries.byte(partition.row * ENTRY_BYTES as u32);
        let to = to.byte(partition.row * format.stride as u32 + (partition.chunk << 4));
        let to = if self.policy.is_some() { self.in_one_register(to) } else { to };
        let first_chunk = (partition.chunk << 4).to_u64();
        partition.for_each_rows(k, self.rows, ENTRIES_PER_BATCH, |rows| {
            let entry = |row: &usize| entries.plus(row * ENTRY_BYTES / 4).load_vector::<2>();
            let entries: Vec<_> = rows.iter().map(entry).collect();
            for (row, [low, high]) in rows.iter().zip(entries) {
                let from = Global::<u32>::new(k.pack32(low, high) + first_chunk);
                for chunk in (0..format.chunks).step_by(partition.lanes) {
                    let to = to.plus((row * format.stride + chunk * 16) / 4);
                    let copy = GlobalToShared::new(to, from.plus(chunk * 4), 16);
                    k.copy_async(copy.with_policy(self.policy), 16);
                }
            }
        });
    }

    /// The same address as the result of an exclusive or with 0, which assemblers do not know. They would add a uniform register to the
    /// address of a copy; with a cache policy, that is an illegal instruction on an H100 (ptxas 13.0).
    fn in_one_register(&self, to: Shared<'k, u32>) -> Shared<'k, u32> {
        // there are fewer than 2^24 heads
        Shared::new(to.address() ^ (self.cta.params.qo_heads >> 24))
    }

    /// Starts this thread's copies to the rows at `to`.
    #[track_caller]
    pub(crate) fn copy(&self, to: Shared<'k, u32>, buffer: Value<'k, u32>) {
        let (k, format) = (self.cta.k, self.format);
        let partition = self.partition();
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
                let from = Global::<u32>::new(k.pack32(low, high) + first_chunk);
                for (at, present) in present.iter().enumerate() {
                    let (chunk, absent) = (at * partition.lanes, exists.eq(0) | !*present);
                    let to = to.plus((row * format.stride + chunk * 16) / 4);
                    k.copy_async_unless(absent, to, from.plus(chunk * 4), 16);
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
