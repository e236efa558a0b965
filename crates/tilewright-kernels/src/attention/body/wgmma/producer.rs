//! The producer warpgroup: draws runs and loads their items, queries, keys and values.
//!
//! All four warps load queries, by `cp.async`, and the boxes of KV tiles, by TMA: box `b` is loaded by lane `b / 4` of warp `b % 4`,
//! since a warp issues the copies of its lanes one after the other. Warp 3, which has the fewest boxes, also draws runs, one run
//! ahead, and fetches the item of the next run while the tiles of the current one are loaded.

use super::{CONSUMERS, Q_ROWS, WgmmaCta};
use crate::{
    attention::{
        items::{NONE, WorkItem, WorkItemRegs},
        kernel::{cta::ThreadPartition, query_row::QueryHead},
        params::KvLayout,
    },
    tile::{Cursor, SharedTile},
};
use tilewright_ptx::{
    build::{Builder, Global, Value, Var},
    isa::{
        memory::{AtomicOp, Order, Scope},
        sync::Fence,
    },
};

/// Registers per thread.
const REGISTERS: u32 = 40;
/// Threads of the warpgroup.
pub(super) const THREADS: u32 = 128;
/// Its warps.
pub(super) const WARPS: u32 = THREADS / 32;
/// The word after an item's: 1 if there is an item.
pub(super) const PRESENT: usize = WorkItem::WORDS;

/// A warp of the producer warpgroup.
pub(super) struct Producer<'c, 'k> {
    shared: &'c WgmmaCta<'k>,
    k: &'k Builder,
    /// In the warpgroup.
    thread: Value<'k, u32>,
    warp: Value<'k, u32>,
    keys: Cursor<'k>,
    values: Cursor<'k>,
    /// The number drawn for the run after the next one, in lane 0 of the drawing warp.
    drawn: Var<'k, u32>,
    /// This lane's word of the next item, in the drawing warp.
    next_word: Var<'k, u32>,
    /// Whether there is a next item.
    has_next: Var<'k, bool>,
}

impl<'c, 'k> Producer<'c, 'k> {
    pub(super) fn new(shared: &'c WgmmaCta<'k>) -> Self {
        let k = shared.k;
        k.setmaxnreg_dec(REGISTERS);
        let thread = (k.thread() - CONSUMERS).named("producer");
        Self {
            shared,
            k,
            thread,
            warp: (thread >> 5).of_lane(0).named("producer_warp"),
            keys: shared.keys.1.cursor(k),
            values: shared.values.1.cursor(k),
            drawn: k.var("drawn", 0),
            next_word: k.var("next_word", 0),
            has_next: k.var("has_next", false),
        }
    }

    /// Loads the items of this CTA.
    pub(super) fn run(&self) {
        let (k, shared) = (self.k, self.shared);
        let count = k.var("count", 0);
        self.in_drawing_warp(|| {
            self.fetch(k.cta());
            self.draw();
        });
        k.loop_(|| {
            let n = count.get();
            self.in_drawing_warp(|| self.publish(n));
            shared.items.wait_full(n);
            let words = shared.item_words(n);
            let present = words.plus(PRESENT).load();
            k.break_if(present.eq(0));
            let item = WorkItemRegs::load_shared(k, words);
            k.sync_warp();
            k.when(k.lane().eq(0), || shared.items.empty(n).arrive());
            self.load_item(&item, n);
            count.set(n + 1);
        });
    }

    fn in_drawing_warp(&self, body: impl FnOnce()) {
        self.k.when(self.warp.eq(WARPS - 1), body);
    }

    /// Loads this lane's word of the item of a run, if there is such a run.
    fn fetch(&self, run: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let present = run.lt(shared.runs);
        self.has_next.set(present);
        k.when(present & k.lane().lt(WorkItem::WORDS as u32), || {
            let item = shared.cta.params.items.at_wide(run.to_u64() * WorkItem::WORDS as u64);
            self.next_word.set(item.at(k.lane()).load());
        });
    }

    /// Writes the fetched item to the slot of item `n`.
    fn publish(&self, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let words = shared.item_words(n);
        shared.items.wait_empty(n);
        k.when(k.lane().lt(WorkItem::WORDS as u32), || words.at(k.lane()).store(self.next_word.get()));
        k.when(k.lane().eq(0), || words.plus(PRESENT).store(self.has_next.get().select::<u32>(1, 0)));
        shared.items.full(n).arrive();
    }

    /// Draws a run. The number is used when the next item is loaded, so nothing waits for it.
    fn draw(&self) {
        let order = (Order::Relaxed, Scope::Gpu);
        self.k.when(self.k.lane().eq(0), || {
            self.drawn.set(self.shared.ticket.atomic(AtomicOp::AddU32, 1_u32, order));
        });
    }

    /// Fetches the item of the drawn run, and draws the run after it.
    fn fetch_drawn(&self) {
        let (k, shared) = (self.k, self.shared);
        // each CTA draws until it draws no run, so there are as many draws as runs
        k.when(k.lane().eq(0) & (self.drawn.get() + 1).eq(shared.runs), || shared.ticket.store(0_u32));
        self.fetch(k.ctas() + self.drawn.get().of_lane(0));
        k.when(self.has_next.get(), || self.draw());
    }

    /// Loads the queries and KV tiles of item `n`, from the last tile to the first, and fetches the next item.
    fn load_item(&self, item: &WorkItemRegs<'k>, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let (first, end) = shared.tiles(item.kv_begin, item.kv_end);
        let (tile, page) = (k.var("tile", end), k.var("page", 0));
        let keys = (shared.maps[0], shared.keys.0, self.keys);
        k.when(end.gt(first), || {
            tile.set(end - 1);
            self.load_page(item, tile.get(), page);
            self.load(item, keys, (tile.get(), page.get()));
        });
        self.copy_queries(item, n);
        self.in_drawing_warp(|| self.fetch_drawn());
        k.loop_(|| {
            let (at, of_values) = (tile.get(), page.get());
            k.break_if(at.eq(end));
            let has_more = at.gt(first);
            k.when(has_more, || {
                self.load_page(item, at - 1, page);
                self.load(item, keys, (at - 1, page.get()));
            });
            self.load(item, (shared.maps[1], shared.values.0, self.values), (at, of_values));
            tile.set(has_more.select(at - 1, end));
        });
    }

    /// Starts the copies of an item's queries; rows beyond its last are zero-filled.
    fn copy_queries(&self, item: &WorkItemRegs<'k>, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let params = &shared.cta.params;
        let rows = item.qo_len * params.group.by;
        let chunks = shared.config.qk() / 8;
        let partition = ThreadPartition::new(self.thread, THREADS as usize, chunks);
        shared.queries.wait_empty(n);
        k.repeat((partition.row, Q_ROWS as u32), partition.rows_at_once as u32, |row| {
            let head = QueryHead::of_row(params, (item.qo_begin, item.kv_head), row.min(rows - 1));
            let from = Global::<u16>::new(params.q.address).at_wide(head.offset_in(&params.q));
            for at in (0..chunks).step_by(partition.lanes) {
                let chunk = partition.chunk + at as u32;
                let absent = row.ge(rows) | chunk.ge((shared.config.head_dim.qk / 8) as u32);
                let to = shared.q.chunk(row, chunk).cast::<u32>();
                k.copy_async_unless(absent, to, from.at(chunk << 3).cast::<u32>(), 16);
            }
        });
        if shared.config.has_queries_in_registers() {
            return k.arrive_after_copies(shared.queries.full(n));
        }
        // products read the tile, not threads
        k.commit_copies();
        k.wait_copies(0);
        k.fence(Fence::ProxyAsyncShared);
        shared.queries.full(n).arrive();
    }

    /// Sets `page` to that of this lane's box of a KV tile: 0 in a ragged tensor, and [`NONE`] for a box after the last key.
    fn load_page(&self, item: &WorkItemRegs<'k>, tile: Value<'k, u32>, page: Var<'k, u32>) {
        let (k, params) = (self.k, &self.shared.cta.params);
        let is_paged = params.layout.ne(KvLayout::Ragged.code());
        page.set(is_paged.select::<u32>(NONE, 0));
        let key = self.first_key(tile);
        k.when(is_paged & self.has_box() & key.lt(item.kv_end), || {
            page.set(params.indices.at(item.kv_start + params.page_size.quotient(key)).load());
        });
    }

    /// Loads keys or values of a KV tile into the next stage. Boxes of page [`NONE`] are outside the tensor and arrive as zeros.
    fn load(
        &self,
        item: &WorkItemRegs<'k>,
        (map, tile, cursor): (Value<'k, u64>, SharedTile<'k>, Cursor<'k>),
        (index, page): (Value<'k, u32>, Value<'k, u32>),
    ) {
        let (shared, k) = (self.shared, self.k);
        let params = &shared.cta.params;
        let (ragged, blocks) = (params.has_layout(KvLayout::Ragged), shared.cta.is_blocks());
        cursor.wait_empty();
        let full = cursor.full();
        // boxes of other warps may arrive before the bytes are expected
        k.when(self.thread.eq(0), || full.arrive_expecting(tile.bytes()));
        k.when(self.has_box(), || {
            let key = self.first_key(index);
            let (_, slot) = params.page_size.divide(key);
            let slot = slot.unless(ragged, item.kv_start + key);
            // blocks are ranges of a ragged tensor
            let slot = slot.unless(blocks, page * params.page_size.by + slot);
            let page = page.unless(blocks & page.ne(NONE), 0);
            let to = tile.stage(cursor.stage()).from_row(self.box_number() << shared.box_shift);
            to.load(k, map, &[slot, item.kv_head, page], full);
        });
        cursor.advance();
    }

    /// The number of this lane's box in each panel of a KV tile.
    fn box_number(&self) -> Value<'k, u32> {
        self.k.lane() * WARPS + self.warp
    }

    /// Whether a tile has that box.
    fn has_box(&self) -> Value<'k, bool> {
        let boxes = self.k.constant(self.shared.config.kv_tokens() as u32) >> self.shared.box_shift;
        self.box_number().lt(boxes)
    }

    /// The first key of this lane's box of a KV tile.
    fn first_key(&self, tile: Value<'k, u32>) -> Value<'k, u32> {
        tile * self.shared.config.kv_tokens() as u32 + (self.box_number() << self.shared.box_shift)
    }
}
