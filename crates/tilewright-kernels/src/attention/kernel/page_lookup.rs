//! Page-table lookup of the keys and values of a KV tile.
//!
//! Each thread looks up the location of one key's K or V. Page numbers are prefetched one KV tile ahead, because their latency is
//! that of the copy itself. Locations are written to shared memory as entries `[address, address, 1 if the key exists, scale]`,
//! which all threads that copy chunks of the row load. The scale is that of the key's page, or 0. Keys beyond the item's last are
//! not loaded; their rows are zero-filled.

use super::{cta::MmaCta, page_scales};
use crate::attention::{CacheTensorRegs, KvLayout, NONE, WorkItemRegs};
use tilewright_ptx::{Shared, Value, Var};

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

/// The page and slot, as in the tensor, of key `key` of an item, which is in page `page` of its request.
#[track_caller]
pub(crate) fn box_location<'k>(
    cta: &MmaCta<'k>,
    item: &WorkItemRegs<'k>,
    key: Value<'k, u32>,
    page: Value<'k, u32>,
) -> (Value<'k, u32>, Value<'k, u32>) {
    let params = &cta.params;
    let (ragged, blocks) = (params.has_layout(KvLayout::Ragged), cta.is_blocks());
    let (_, slot) = params.page_size.divide(key);
    let slot = slot.unless(ragged, item.kv_start + key);
    // blocks are ranges of a ragged tensor
    let slot = slot.unless(blocks, page * params.page_size.by + slot);
    (page.unless(blocks & page.ne(NONE), 0), slot)
}

impl<'k> PageLookup<'k> {
    /// Looks up `count` keys at once: threads below `count` look up K, the next `count` look up V, or the positional part of the
    /// keys in MLA. Entries are `[2][count]` at `entries`; `pending` is for prefetched pages.
    pub(crate) fn new(
        cta: &MmaCta<'k>,
        thread: Value<'k, u32>,
        count: usize,
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
            to.set(params.plan.indices.at(offset).load());
        });
    }

    /// Writes the entry of a key of `from` in `page`; `buffer` is the byte offset of its table.
    #[track_caller]
    pub(crate) fn write_entry(
        &self,
        from: KvSource<'k>,
        first: Value<'k, u32>,
        page: Value<'k, u32>,
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
            let offset = tensor.offset(page_or_0, slot, from.head);
            address.set(tensor.address + offset * self.cta.kv.size() as u64);
        };
        // strides are loaded from parameters, which saves registers
        let is_key = self.thread.lt(self.count as u32);
        let second = params.pe.map_or(params.v, |pe| pe.k);
        k.when_else(is_key, || set(&params.k), || set(&second));
        let scale = page_scales::entry_scale(&self.cta, is_key, exists, page, from.head);
        let words = [address.get().low(), address.get().high(), exists.select(1, 0), scale];
        self.entries.byte(self.thread << 4).byte(buffer).store_vector(words);
    }
}
