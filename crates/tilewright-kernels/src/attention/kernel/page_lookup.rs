//! Page-table lookup of keys and values, and their asynchronous copies to shared memory.
//!
//! Each thread looks up the location of one key's K or V. Page numbers are prefetched one KV tile ahead, because their latency is
//! that of the copy itself. Locations are written to shared memory as entries `[address, address, 1 if the key exists, scale]`,
//! which all threads that copy chunks of the row load. The scale is that of the key's page, or 0. Keys beyond the item's last are
//! not loaded; their rows are zero-filled.

use super::{
    cta::{CurrentItem, MmaCta, ThreadPartition},
    layout::RowFormat,
    page_scales,
};
use crate::attention::{
    items::WorkItemRegs,
    params::{CacheTensorRegs, KvLayout, RowTensorRegs},
};
use tilewright_ptx::build::{Builder, Global, Shared, Value, Var};

/// Page-table lookup, one key per thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageLookup<'k> {
    cta: MmaCta<'k>,
    thread: Value<'k, u32>,
    /// Keys per lookup, a power of two.
    count: usize,
    entries: Shared<'k, u32>,
    /// The prefetched page of the next key.
    pending: Var<'k, u32>,
}

/// The location of the keys of an item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvSource<'k> {
    /// The first entry of the segment in the page indices or, in a ragged tensor, its first token.
    pub(crate) start: Value<'k, u32>,
    /// One past the item's last key.
    pub(crate) end: Value<'k, u32>,
    /// The KV head.
    pub(crate) head: Value<'k, u32>,
}

impl<'k> From<&WorkItemRegs<'k>> for KvSource<'k> {
    fn from(item: &WorkItemRegs<'k>) -> Self {
        Self { start: item.kv_start, end: item.kv_end, head: item.kv_head }
    }
}

/// Bytes per entry.
const ENTRY_BYTES: usize = 16;
/// Entries per batch of loads, four registers each.
const ENTRIES_PER_BATCH: usize = 8;

impl<'k> PageLookup<'k> {
    /// Looks up `count` keys at once: threads below `count` look up K, the next `count` look up V, or the positional part of the
    /// keys in MLA. Entries are `[2][count]` at `entries`; `pending` is for prefetched pages.
    pub(crate) fn new(
        cta: &MmaCta<'k>,
        (thread, count): (Value<'k, u32>, usize),
        entries: Shared<'k, u32>,
        pending: Var<'k, u32>,
    ) -> Self {
        Self { cta: *cta, thread, count, entries, pending }
    }

    /// This thread's key of the tile at `first`.
    #[track_caller]
    fn key(&self, first: Value<'k, u32>) -> Value<'k, u32> {
        first + (self.thread & (self.count as u32 - 1))
    }

    /// Prefetches the page of this thread's key of the tile of `from` at `first`.
    #[track_caller]
    pub(crate) fn prefetch(&self, from: KvSource<'k>, first: Value<'k, u32>) {
        self.load_page(from, first, self.pending);
    }

    /// The prefetched page.
    #[track_caller]
    pub(crate) fn prefetched(&self) -> Value<'k, u32> {
        self.pending.get()
    }

    #[track_caller]
    fn load_page(&self, from: KvSource<'k>, first: Value<'k, u32>, to: Var<'k, u32>) {
        let params = &self.cta.params;
        let key = self.key(first);
        let exists = key.lt(from.end) & params.layout.ne(KvLayout::Ragged.code());
        self.cta.k.when(exists, || {
            let offset = from.start + params.page_size.quotient(key);
            to.set(params.indices.at(offset).load());
        });
    }

    /// Writes the entry of a key of `from` in `page`; `buffer` is the byte offset of its table.
    #[track_caller]
    pub(crate) fn write_entry(
        &self,
        from: KvSource<'k>,
        (first, page): (Value<'k, u32>, Value<'k, u32>),
        buffer: Value<'k, u32>,
    ) {
        let (k, params) = (self.cta.k, &self.cta.params);
        let key = self.key(first);
        let (_, slot) = params.page_size.divide(key);
        let slot = slot.unless(params.has_layout(KvLayout::Ragged), from.start + key);
        let exists = key.lt(from.end);
        // the address must be valid even though nothing is loaded after the last key
        let [page_or_0, slot] = [page, slot].map(|at| at.unless(!exists, 0).to_u64());
        let address = k.unset_var::<u64>("address");
        let set = |tensor: &CacheTensorRegs<'k>| {
            let offset = tensor.offset((page_or_0, slot), from.head);
            address.set(tensor.address + offset * self.cta.kv.size() as u64);
        };
        // strides are loaded from parameters, which saves registers
        let is_key = self.thread.lt(self.count as u32);
        let second = params.pe.map_or(params.v, |(_, keys)| keys);
        k.when_else(is_key, || set(&params.k), || set(&second));
        let scale = page_scales::entry_scale(&self.cta, (is_key, exists), (page, from.head));
        let words = [address.get().low(), address.get().high(), exists.select(1, 0), scale];
        self.entries.byte(self.thread << 4).byte(buffer).store_vector(words);
    }
}

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
fn exists<'k>(k: &'k Builder, format: RowFormat, chunk: Value<'k, u32>) -> Value<'k, bool> {
    let chunks = format.dim * format.size / 16;
    if chunks == format.chunks { k.constant(true) } else { chunk.lt(chunks as u32) }
}

/// Starts the copies of `count` query rows of `q` from `begin` on to `to`; rows beyond the item's last are zero-filled.
pub(crate) fn copy_queries<'k>(
    (cta, current): (&MmaCta<'k>, &CurrentItem<'k>),
    (begin, count): (Value<'k, u32>, usize),
    (q, format): (&RowTensorRegs<'k>, RowFormat),
    to: Shared<'k, u32>,
) {
    let (k, item) = (cta.k, current.load());
    let rows = item.qo_len * cta.params.group.by;
    let partition = ThreadPartition::new(k.thread(), cta.threads, format.chunks);
    let to = to.byte(partition.row * format.stride as u32 + (partition.chunk << 4));
    partition.for_each_row(k, count, |first| {
        let row = begin + partition.row + first as u32;
        let row_exists = row.lt(rows);
        let head = cta.query_head(&item, row.min(rows - 1));
        let from = Global::<u16>::new(q.address).at_wide(head.offset_in(q)).at(partition.chunk << 3).cast();
        for chunk in (0..format.chunks).step_by(partition.lanes) {
            let present = row_exists & exists(k, format, partition.chunk + chunk as u32);
            cta.copy_chunk((to, first * format.stride + chunk * 16), (from, chunk * 16), !present);
        }
    });
}

/// Lookup of the keys and values of a warp's stages, each in two steps: the page number is requested long before it is used. Lanes
/// below 16 look up keys, the others values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageLookup<'k> {
    cta: MmaCta<'k>,
    entries: Shared<'k, u32>,
    /// Unless registers are short.
    tensor: Option<LaneTensor<'k>>,
}

/// Address of this lane's tensor, and strides of heads, pages and tokens, in bytes.
#[derive(Debug, Clone, Copy)]
struct LaneTensor<'k> {
    address: Value<'k, u64>,
    head: Value<'k, u64>,
    page: Value<'k, u64>,
    token: Value<'k, u64>,
}

impl<'k> LaneTensor<'k> {
    fn new(cta: &MmaCta<'k>) -> Self {
        let (k, v, is_key) = (cta.params.k, cta.params.v, cta.k.lane().lt(STAGE_KEYS));
        let bytes = |key: Value<'k, u64>, value: Value<'k, u64>| {
            is_key.select::<u64>(key, value) * cta.kv.size() as u64
        };
        Self {
            address: is_key.select(k.address, v.address),
            head: bytes(k.head, v.head),
            page: bytes(k.page, v.page),
            token: bytes(k.token, v.token),
        }
    }
}

/// A stage that is looked up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingStage<'k> {
    /// The page of this lane's key.
    page: Var<'k, u32>,
    /// The address of the key in page 0.
    address: Var<'k, u64>,
    /// The number of keys that exist, beginning with the first, and from bit [`HEAD_SHIFT`] on the KV head.
    keys: Var<'k, u32>,
}

impl<'k> PendingStage<'k> {
    pub(crate) fn new(k: &'k Builder) -> Self {
        Self { page: k.var("page", 0), address: k.var("key_address", 0), keys: k.var("keys", 0) }
    }

    /// The number of keys that exist, beginning with the first.
    pub(crate) fn count(&self) -> Value<'k, u32> {
        self.keys.get() & ((1 << HEAD_SHIFT) - 1)
    }

    /// Becomes `other`.
    pub(crate) fn set(&self, other: Self) {
        self.page.set(other.page.get());
        self.address.set(other.address.get());
        self.keys.set(other.keys.get());
    }

    /// Becomes a stage of no keys.
    pub(crate) fn clear(&self) {
        [self.page, self.keys].iter().for_each(|word| word.set(0));
        self.address.set(0);
    }
}

/// Keys per stage.
const STAGE_KEYS: u32 = 16;
/// Bits of a number of keys.
const HEAD_SHIFT: u32 = STAGE_KEYS.ilog2() + 1;
/// Maximum elements of a value with which strides and several stages stay in registers.
pub(crate) const MAX_HOISTED_DIM: usize = 128;

impl<'k> StageLookup<'k> {
    /// Writes entries `[2][16]` to `entries`.
    pub(crate) fn new(cta: &MmaCta<'k>, entries: Shared<'k, u32>) -> Self {
        let tensor = (cta.layout.v.dim <= MAX_HOISTED_DIM).then(|| LaneTensor::new(cta));
        Self { cta: *cta, entries, tensor }
    }

    fn tensor(&self) -> LaneTensor<'k> {
        self.tensor.unwrap_or_else(|| LaneTensor::new(&self.cta))
    }

    /// Requests the pages of the stage of `from` at key `first`.
    #[track_caller]
    pub(crate) fn request(&self, from: KvSource<'k>, first: Value<'k, u32>, to: PendingStage<'k>) {
        let (k, params) = (self.cta.k, &self.cta.params);
        let in_stage = k.lane() & (STAGE_KEYS - 1);
        let key = first + in_stage;
        let is_ragged = params.has_layout(KvLayout::Ragged);
        let (page, slot) = params.page_size.divide(key);
        let slot = slot.unless(is_ragged, from.start + key);
        let count = (from.end - first).min(STAGE_KEYS).unless(first.ge(from.end), 0);
        to.keys.set(count | (from.head << HEAD_SHIFT));
        to.page.set(0);
        k.when(key.lt(from.end) & !is_ragged, || {
            to.page.set(params.indices.at(from.start + page).load());
        });
        // the address must be valid even though nothing is loaded after the last key
        let slot = slot.unless(key.ge(from.end), 0);
        let tensor = self.tensor();
        to.address.set(tensor.address + from.head.to_u64() * tensor.head + slot.to_u64() * tensor.token);
    }

    /// Writes the entries of a stage.
    #[track_caller]
    pub(crate) fn write_entries(&self, stage: PendingStage<'k>) {
        let k = self.cta.k;
        let exists = (k.lane() & (STAGE_KEYS - 1)).lt(stage.count());
        let address = stage.address.get() + stage.page.get().to_u64() * self.tensor().page;
        let is_key = k.lane().lt(STAGE_KEYS);
        let at = (stage.page.get(), stage.keys.get() >> HEAD_SHIFT);
        let scale = page_scales::entry_scale(&self.cta, (is_key, exists), at);
        let words = [address.low(), address.high(), exists.select(1, 0), scale];
        self.entries.byte(k.lane() << 4).store_vector(words);
    }
}

/// Query rows in registers, on their way to shared memory.
pub(crate) struct LoadedQueries<'k> {
    to: Shared<'k, u32>,
    /// Byte offsets and words of this thread's chunks.
    chunks: Vec<(usize, [Var<'k, u32>; 4])>,
    is_in_tile: Value<'k, bool>,
}

impl<'k> LoadedQueries<'k> {
    /// Loads the first `count` query rows of an item for `to`; rows beyond the item's last are 0. In contrast to [`copy_queries`]
    /// it does not use the groups of asynchronous copies.
    pub(crate) fn load(
        (cta, current): (&MmaCta<'k>, &CurrentItem<'k>),
        count: usize,
        (q, format): (&RowTensorRegs<'k>, RowFormat),
        to: Shared<'k, u32>,
    ) -> Self {
        let (k, item) = (cta.k, current.load());
        let rows = item.qo_len * cta.params.group.by;
        let partition = ThreadPartition::new(k.thread(), cta.threads, format.chunks);
        let mut chunks = Vec::new();
        for first in (0..count).step_by(partition.rows_at_once) {
            let row = partition.row + first as u32;
            let head = cta.query_head(&item, row.min(rows - 1));
            let from = Global::<u16>::new(q.address).at_wide(head.offset_in(q)).at(partition.chunk << 3);
            for chunk in (0..format.chunks).step_by(partition.lanes) {
                let words = std::array::from_fn(|_| k.var::<u32>("query", 0));
                k.when(row.lt(rows) & exists(k, format, partition.chunk + chunk as u32), || {
                    let loaded = from.cast::<u32>().plus(chunk * 4).load_vector::<4>();
                    words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
                });
                chunks.push((first * format.stride + chunk * 16, words));
            }
        }
        let to = to.byte(partition.row * format.stride as u32 + (partition.chunk << 4));
        Self { to, chunks, is_in_tile: partition.row.lt(count as u32) }
    }

    /// Stores the rows; valid after a barrier.
    pub(crate) fn store(self, k: &'k Builder) {
        k.when(self.is_in_tile, || {
            for (byte, words) in self.chunks {
                self.to.plus(byte / 4).store_vector(words.map(|word| word.get()));
            }
        });
    }
}
