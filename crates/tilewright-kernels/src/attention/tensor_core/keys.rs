//! Where keys and values of a segment lie, and how they come to shared memory.
//!
//! A thread finds the place of one key's K or V: the number of its page is asked for long before it is used, since its load takes as
//! long as the copy itself. Places become entries in shared memory, `[address, address, bytes to read, 0]`, which are read by
//! all threads that copy chunks of that row. Of keys beyond the item's last nothing is read, and they become 0.

use super::{
    cta::{Cta, Deal, Work},
    layout::RowFormat,
};
use crate::attention::call::{CacheParams, KvLayout};
use tilewright_ptx::build::{Global, Shared, Value, Var};

/// Finds places of keys, one key at a time for this thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finder<'k> {
    cta: Cta<'k>,
    work: Work<'k>,
    /// This thread's key among those that are found at once.
    key: Value<'k, u32>,
    entry: Shared<'k, u32>,
    /// The address of the head in page 0, and bytes between pages and tokens.
    base: Value<'k, u64>,
    page: Value<'k, u64>,
    token: Value<'k, u64>,
    /// The page of the key that is found next.
    pending: Var<'k, u32>,
}

/// Bytes of an entry.
const ENTRY: usize = 16;

impl<'k> Finder<'k> {
    /// `count` keys are found at once: by threads below `count` where their keys lie, by as many further where their values lie.
    /// Entries are `[2][count]` from `entries` on.
    pub(super) fn new(
        (cta, work): (&Cta<'k>, &Work<'k>),
        (thread, count): (Value<'k, u32>, usize),
        entries: Shared<'k, u32>,
    ) -> Self {
        let (params, head) = (&cta.params, work.item.kv_head.to_u64());
        let of_keys = thread.lt(count as u32);
        let select =
            |of: fn(&CacheParams<'k>) -> Value<'k, u64>| of_keys.select(of(&params.k), of(&params.v));
        let size = cta.layout.k.size as u64;
        let base = select(|tensor| tensor.address) + head * select(|tensor| tensor.head) * size;
        Self {
            cta: *cta,
            work: *work,
            key: (thread & (count as u32 - 1)).named("key_of_thread"),
            entry: entries.byte(thread * ENTRY as u32),
            base,
            page: select(|tensor| tensor.page) * size,
            token: select(|tensor| tensor.token) * size,
            pending: cta.k.var("pending_page", 0),
        }
    }

    /// Asks for the page of this thread's key of those from `first` on.
    #[track_caller]
    pub(super) fn ask(&self, first: Value<'k, u32>) {
        let (params, item) = (&self.cta.params, &self.work.item);
        let key = first + self.key;
        let exists = key.lt(item.kv_end) & params.layout.ne(KvLayout::Ragged.word());
        self.cta.k.when(exists, || {
            let place = item.kv_start + params.page_size.quotient(key);
            self.pending.set(params.indices.at(place).load());
        });
    }

    /// Writes the entry of the key that was asked for; `buffer` says which of several tables, in bytes.
    #[track_caller]
    pub(super) fn write(&self, first: Value<'k, u32>, buffer: Value<'k, u32>) {
        let (params, item) = (&self.cta.params, &self.work.item);
        let key = first + self.key;
        let (_, slot) = params.page_size.divide(key);
        let slot = slot.unless(params.is(KvLayout::Ragged), item.kv_start + key);
        let place = self.base + self.pending.get().to_u64() * self.page + slot.to_u64() * self.token;
        let exists = key.lt(item.kv_end);
        let (address, read) = (place.unless(!exists, self.base), exists.select::<u32>(16, 0));
        let words = [address.low(), address.high(), read, self.cta.k.constant(0)];
        self.entry.byte(buffer).store_vector(words);
    }
}

/// Copies rows whose entries are there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copier<'k> {
    cta: Cta<'k>,
    deal: Deal<'k>,
    format: RowFormat,
    rows: usize,
    entries: Shared<'k, u32>,
    /// Bytes from the first row to this thread's first chunk.
    to: Value<'k, u32>,
    from: Value<'k, u64>,
}

impl<'k> Copier<'k> {
    /// `rows` rows, by `threads` threads of which this is `thread`.
    pub(super) fn new(
        cta: &Cta<'k>,
        (thread, threads): (Value<'k, u32>, usize),
        (format, rows): (RowFormat, usize),
        entries: Shared<'k, u32>,
    ) -> Self {
        let deal = Deal::new(thread, threads, format.chunks);
        Self {
            cta: *cta,
            deal,
            format,
            rows,
            entries: entries.byte(deal.row * ENTRY as u32),
            to: deal.row * format.stride as u32 + (deal.chunk << 4),
            from: (deal.chunk << 4).to_u64(),
        }
    }

    /// Starts the copies of this thread to the rows at `to`.
    #[track_caller]
    pub(super) fn copy(&self, to: Shared<'k, u32>, buffer: Value<'k, u32>) {
        let (entries, to) = (self.entries.byte(buffer), to.byte(self.to));
        self.each_row(|row| {
            let [low, high, read, _] = entries.plus(row * ENTRY / 4).load_vector::<4>();
            let from = Global::new(self.cta.k.pack32(low, high) + self.from);
            self.each_chunk(|chunk| {
                let there = self.exists(chunk);
                let read = read.unless(!there, 0);
                self.cta.copy_chunk((to, row * self.format.stride + chunk * 16), (from, chunk * 16), read);
            });
        });
    }

    /// Calls `body` with each of this thread's rows, less its first.
    fn each_row(&self, mut body: impl FnMut(usize)) {
        for first in (0..self.rows).step_by(self.deal.rows_at_once) {
            let all = first + self.deal.rows_at_once <= self.rows;
            let there = match all {
                true => self.cta.k.constant(true),
                false => (self.deal.row + first as u32).lt(self.rows as u32),
            };
            self.cta.k.when(there, || body(first));
        }
    }

    /// Calls `body` with each of this thread's chunks, less its first.
    fn each_chunk(&self, body: impl FnMut(usize)) {
        (0..self.format.chunks).step_by(self.deal.lanes).for_each(body);
    }

    /// Whether the row has such a chunk in global memory.
    fn exists(&self, chunk: usize) -> Value<'k, bool> {
        let chunks = self.format.dim * self.format.size / 16;
        match chunks == self.format.chunks {
            true => self.cta.k.constant(true),
            false => (self.deal.chunk + chunk as u32).lt(chunks as u32),
        }
    }
}

/// Starts copying the queries of `count` rows from `begin` on to `to`; rows beyond the item's last become 0.
pub(super) fn copy_queries<'k>(
    cta: &Cta<'k>,
    work: &Work<'k>,
    (begin, count): (Value<'k, u32>, usize),
    to: Shared<'k, u32>,
) {
    let (k, format) = (cta.k, cta.layout.q);
    let deal = Deal::new(k.thread(), 128, format.chunks);
    let to = to.byte(deal.row * format.stride as u32 + (deal.chunk << 4));
    let chunks = format.dim * format.size / 16;
    for first in (0..count).step_by(deal.rows_at_once) {
        let body = || {
            let row = begin + deal.row + first as u32;
            let exists = row.lt(work.rows);
            let from = cta.query(cta.head(work, row.min(work.rows - 1))).at(deal.chunk << 3).cast();
            for chunk in (0..format.chunks).step_by(deal.lanes) {
                let there = exists & (deal.chunk + chunk as u32).lt(chunks as u32);
                let read = there.select::<u32>(16, 0);
                cta.copy_chunk((to, first * format.stride + chunk * 16), (from, chunk * 16), read);
            }
        };
        let all = first + deal.rows_at_once <= count;
        let there = if all { k.constant(true) } else { deal.row.lt((count - first) as u32) };
        k.when(there, body);
    }
}
