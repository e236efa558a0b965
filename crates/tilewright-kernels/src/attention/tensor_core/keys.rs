//! Where keys and values of a segment lie, and how they come to shared memory.
//!
//! A thread finds the place of one key's K or V: the number of its page is asked for long before it is used, since its load takes as
//! long as the copy itself. Places become entries in shared memory, `[address, address, 1 if it exists, factor]`, which are read by
//! all threads that copy chunks of that row; the factor is that of its page, or 0. Of keys beyond the item's last nothing is read,
//! and they become 0.

use super::{
    cta::{Cta, Deal, Work},
    factors,
    layout::RowFormat,
};
use crate::attention::call::{CacheParams, KvLayout, RowParams};
use tilewright_ptx::build::{Builder, Global, Shared, Value, Var};

/// Finds places of keys, one key at a time for this thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finder<'k> {
    cta: Cta<'k>,
    work: Work<'k>,
    thread: Value<'k, u32>,
    /// Keys that are found at once, a power of two.
    count: usize,
    entries: Shared<'k, u32>,
    /// The page of the key that is found next.
    pending: Var<'k, u32>,
}

/// Bytes of an entry.
const ENTRY: usize = 16;
/// Entries that a thread loads together, in four registers each.
const AT_ONCE: usize = 8;

impl<'k> Finder<'k> {
    /// `count` keys are found at once: by threads below `count` where their keys lie, by as many further where their values lie,
    /// or the part that latent keys have beside. Entries are `[2][count]` from `entries` on.
    pub(super) fn new(
        (cta, work): (&Cta<'k>, &Work<'k>),
        (thread, count): (Value<'k, u32>, usize),
        entries: Shared<'k, u32>,
    ) -> Self {
        Self { cta: *cta, work: *work, thread, count, entries, pending: cta.k.var("pending_page", 0) }
    }

    /// This thread's key of those from `first` on.
    #[track_caller]
    fn key(&self, first: Value<'k, u32>) -> Value<'k, u32> {
        first + (self.thread & (self.count as u32 - 1))
    }

    /// Asks for the page of this thread's key of those from `first` on.
    #[track_caller]
    pub(super) fn ask(&self, first: Value<'k, u32>) {
        let (params, item) = (&self.cta.params, self.work.item());
        let key = self.key(first);
        let exists = key.lt(item.kv_end) & params.layout.ne(KvLayout::Ragged.word());
        self.cta.k.when(exists, || {
            let place = item.kv_start + params.page_size.quotient(key);
            self.pending.set(params.indices.at(place).load());
        });
    }

    /// Writes the entry of the key that was asked for; `buffer` says which of several tables, in bytes.
    #[track_caller]
    pub(super) fn write(&self, first: Value<'k, u32>, buffer: Value<'k, u32>) {
        let (k, params, item) = (self.cta.k, &self.cta.params, self.work.item());
        let key = self.key(first);
        let (_, slot) = params.page_size.divide(key);
        let slot = slot.unless(params.is(KvLayout::Ragged), item.kv_start + key);
        let exists = key.lt(self.work.kv_end);
        // nothing is read behind the last key, but the address is one inside
        let [page, slot] = [self.pending.get(), slot].map(|at| at.unless(!exists, 0).to_u64());
        let address = k.unset_var::<u64>("address");
        let set = |tensor: &CacheParams<'k>| {
            let place = page * tensor.page + slot * tensor.token + item.kv_head.to_u64() * tensor.head;
            address.set(tensor.address + place * self.cta.kv.size() as u64);
        };
        // strides come from parameters, not from registers
        let is_key = self.thread.lt(self.count as u32);
        let beside = params.pe.map_or(params.v, |(_, keys)| keys);
        k.when_else(is_key, || set(&params.k), || set(&beside));
        let factor = factors::of_key(&self.cta, (is_key, exists), (self.pending.get(), item.kv_head));
        let words = [address.get().low(), address.get().high(), exists.select(1, 0), factor];
        self.entries.byte(self.thread << 4).byte(buffer).store_vector(words);
    }
}

/// Copies rows whose entries are there. What it needs of the thread is computed where it copies, which spares registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copier<'k> {
    cta: Cta<'k>,
    thread: Value<'k, u32>,
    threads: usize,
    format: RowFormat,
    rows: usize,
    entries: Shared<'k, u32>,
}

impl<'k> Copier<'k> {
    /// `rows` rows, by `threads` threads of which this is `thread`.
    pub(super) fn new(
        cta: &Cta<'k>,
        (thread, threads): (Value<'k, u32>, usize),
        (format, rows): (RowFormat, usize),
        entries: Shared<'k, u32>,
    ) -> Self {
        Self { cta: *cta, thread, threads, format, rows, entries }
    }

    /// How chunks are dealt to threads.
    #[track_caller]
    pub(super) fn deal(&self) -> (Deal<'k>, RowFormat, usize) {
        (Deal::new(self.thread, self.threads, self.format.chunks), self.format, self.rows)
    }

    /// Starts the copies of this thread to the rows at `to`.
    #[track_caller]
    pub(super) fn copy(&self, to: Shared<'k, u32>, buffer: Value<'k, u32>) {
        let (k, format) = (self.cta.k, self.format);
        let (deal, ..) = self.deal();
        let entries = self.entries.byte(deal.row * ENTRY as u32).byte(buffer);
        let to = to.byte(deal.row * format.stride as u32 + (deal.chunk << 4));
        let first_chunk = (deal.chunk << 4).to_u64();
        let there =
            (0..format.chunks).step_by(deal.lanes).map(|chunk| exists(k, format, deal.chunk + chunk as u32));
        let there: Vec<_> = there.collect();
        deal.each_rows(k, self.rows, AT_ONCE, |rows| {
            // all loads first: they do not pass copies to shared memory, and each would be waited for
            let entry = |row: &usize| entries.plus(row * ENTRY / 4).load_vector::<4>();
            let entries: Vec<_> = rows.iter().map(entry).collect();
            for (row, [low, high, exists, _]) in rows.iter().zip(entries) {
                let from = Global::new(k.pack32(low, high) + first_chunk);
                for (at, there) in there.iter().enumerate() {
                    let (chunk, absent) = (at * deal.lanes, exists.eq(0) | !*there);
                    self.cta.copy_chunk((to, row * format.stride + chunk * 16), (from, chunk * 16), absent);
                }
            }
        });
    }
}

/// Whether rows in global memory have such a chunk.
fn exists<'k>(k: &'k Builder, format: RowFormat, chunk: Value<'k, u32>) -> Value<'k, bool> {
    let chunks = format.dim * format.size / 16;
    if chunks == format.chunks { k.constant(true) } else { chunk.lt(chunks as u32) }
}

/// Starts copying the queries of `count` rows from `begin` on, which are in `q`, to `to`; rows beyond the item's last become 0.
pub(super) fn copy_queries<'k>(
    (cta, work): (&Cta<'k>, &Work<'k>),
    (begin, count): (Value<'k, u32>, usize),
    (q, format): (&RowParams<'k>, RowFormat),
    to: Shared<'k, u32>,
) {
    let (k, item) = (cta.k, work.item());
    let rows = item.qo_len * cta.params.group.by;
    let deal = Deal::new(k.thread(), cta.threads, format.chunks);
    let to = to.byte(deal.row * format.stride as u32 + (deal.chunk << 4));
    deal.each_row(k, count, |first| {
        let row = begin + deal.row + first as u32;
        let row_exists = row.lt(rows);
        let from = cta.query(q, cta.head(&item, row.min(rows - 1))).at(deal.chunk << 3).cast();
        for chunk in (0..format.chunks).step_by(deal.lanes) {
            let there = row_exists & exists(k, format, deal.chunk + chunk as u32);
            cta.copy_chunk((to, first * format.stride + chunk * 16), (from, chunk * 16), !there);
        }
    });
}
