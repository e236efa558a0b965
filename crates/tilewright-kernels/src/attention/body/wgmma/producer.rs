//! The producer warpgroup: draws runs and loads their items, queries, keys and values.
//!
//! All four warps load queries, by `cp.async`, and the boxes of KV tiles, by TMA: box `b` is loaded by lane `b / 4` of warp `b % 4`,
//! since a warp issues the copies of its lanes one after the other. A warp without boxes skips the tiles. Keys and values in pages
//! of less than 8 tokens are copied by rows, also by `cp.async`; a tile is handed over when the copies of the next one have started.
//! Warp 3, which has the fewest boxes, also draws runs, one ahead, and fetches the item of the next run while the tiles of the
//! current one are loaded. The queries of the next item are copied before the last values of the current one if consumers hold
//! theirs in registers, else when the last product of the current ones has been computed.

use super::{
    CONSUMERS, KvTile, PRODUCERS, Pages, RowMajor, RowMasks, SourceRow, Tensor, WgmmaCta, bytes,
    rows::{self, copy_rows},
};
use crate::{
    attention::{NONE, WorkItem, WorkItemRegs, kernel::query_row::QueryHead},
    tile::Cursor,
};
use tilewright_ptx::{AtomicOp, Builder, Fence, GlobalToShared, Order, Scope, Shared, Value, Var};

/// Threads of the warpgroup.
pub(crate) const THREADS: u32 = 128;
pub(crate) const WARPS: u32 = THREADS / 32;
/// The word after an item's: 1 if there is an item.
pub(crate) const PRESENT: usize = WorkItem::WORDS;
/// The word after it: 1 if non-finite values of masked keys must be found.
pub(super) const CAREFUL: usize = PRESENT + 1;
/// The words after it, one per consumer warp: not 0 if its outputs are not finite. The item is then processed again, carefully.
pub(super) const REPEAT: usize = PRESENT + 2;
/// Their number.
pub(super) const CONSUMER_WARPS: u32 = CONSUMERS / 32;

/// A warp of the producer warpgroup.
pub(super) struct Producer<'c, 'k> {
    pub(super) shared: &'c WgmmaCta<'k>,
    pub(super) k: &'k Builder,
    /// In the warpgroup.
    pub(super) thread: Value<'k, u32>,
    pub(super) warp: Value<'k, u32>,
    pub(super) keys: Cursor<'k>,
    pub(super) values: Cursor<'k>,
    /// Visible masks, if the producers compute them.
    pub(super) masks: Option<Cursor<'k>>,
    /// Values before they are transposed, if they are.
    pub(super) row_major: Option<RowMajor<'k>>,
    /// The number drawn for the run after the next one, in lane 0 of the drawing warp.
    pub(super) drawn: Var<'k, u32>,
    /// Drawn runs that this CTA of a pair has sent or received.
    pub(super) sent: Var<'k, u32>,
    /// Whether there is a next item.
    has_next: Var<'k, bool>,
    /// Whether the current item is processed again, in the drawing warp.
    repeats: Var<'k, bool>,
    /// Whether keys and values are copied by rows: boxes of less than 8 rows are not worth a TMA copy.
    pub(super) by_rows: Value<'k, bool>,
    /// Whether this warp has a part in each KV tile. A warp without boxes must not wait for empty stages: nothing waits for it, so a
    /// barrier may complete two phases before the warp tests it, and the warp would wait forever. It only copies queries, and
    /// transposes values if they are transposed.
    fills_stages: Value<'k, bool>,
    pub(super) loads_keys: Value<'k, bool>,
    /// The first key, counted in a KV tile, of each part that this lane loads: a box, or up to two rows.
    pub(super) part_begin: [Value<'k, u32>; 2],
    /// The tile of copied rows that is not yet handed over: 1 + [`Tensor`] + 4 · stage, or 0.
    pub(super) pending: Var<'k, u32>,
}

/// KV tiles of an item.
#[derive(Clone, Copy)]
struct ItemTiles<'k> {
    first: Value<'k, u32>,
    /// One past the last.
    end: Value<'k, u32>,
    /// The tile whose values are loaded next, or [`NONE`] if there are no tiles.
    tile: Var<'k, u32>,
    /// The pages of this lane's parts of it.
    pages: Pages<'k>,
}

impl<'k> ItemTiles<'k> {
    fn new(producer: &Producer<'_, 'k>, item: &WorkItemRegs<'k>) -> Self {
        let k = producer.k;
        let (first, end) = producer.shared.tiles(item.kv_begin, item.kv_end);
        let tile = k.var("tile", first.unless(end.le(first), NONE));
        Self { first, end, tile, pages: [0, 1].map(|_| k.var("page", 0)) }
    }
}

impl<'c, 'k> Producer<'c, 'k> {
    pub(super) fn new(shared: &'c WgmmaCta<'k>) -> Self {
        let k = shared.k;
        k.setmaxnreg_dec(shared.config.registers().1);
        let thread = (k.thread() - CONSUMERS).named("producer");
        let warp = (thread >> 5).of_lane(0).named("producer_warp");
        let by_rows = shared.by_rows();
        let part_begin = match shared.config.is_converted() {
            true => bytes::first_row_of_units(k.lane(), warp),
            false => {
                let number = k.lane() * WARPS + warp;
                let number = shared.pair.map_or(number, |pair| (number << 1) + pair.rank);
                by_rows.select::<u32>(thread, number << shared.box_shift)
            }
        };
        let first_box = (if shared.config.pairs { warp << 1 } else { warp }) << shared.box_shift;
        let has_parts = by_rows | first_box.lt(shared.config.kv_tokens() as u32);
        Self {
            shared,
            k,
            thread,
            warp,
            by_rows,
            fills_stages: if shared.row_major.is_some() { k.constant(true) } else { has_parts },
            loads_keys: has_parts,
            part_begin: [part_begin, part_begin + THREADS],
            pending: k.var("pending", 0),
            keys: shared.keys.1.cursor(k),
            values: shared.values.1.cursor(k),
            masks: shared.masks.map(|ring| ring.cursor(k)),
            row_major: shared.row_major.map(|(_, ring)| RowMajor::new(k, ring)),
            drawn: k.var("drawn", 0),
            sent: k.var("sent", 0),
            has_next: k.var("has_next", false),
            repeats: k.var("repeats", false),
        }
    }

    /// Loads the items of this CTA.
    pub(super) fn run(&self) {
        let (k, shared) = (self.k, self.shared);
        let (count, prepared) = (k.var("count", 0), k.var("prepared", false));
        self.in_drawing_warp(|| {
            let first = if shared.config.pairs { k.cta() >> 1 } else { k.cta() };
            let starts = first.lt(shared.started) & !shared.is_second;
            k.when(starts, || self.fetch(first));
            self.draw();
            k.when(!starts, || self.fetch_drawn());
        });
        k.loop_(|| {
            let n = count.get();
            k.when(!prepared.get(), || self.receive(n));
            let words = shared.item_words(n);
            k.break_if(words.plus(PRESENT).load().eq(0));
            let item = WorkItemRegs::load_shared(k, words);
            let tiles = ItemTiles::new(self, &item);
            let masks = self.row_masks(&item);
            self.load_last_keys(&item, &tiles, masks.is_some());
            k.when(!prepared.get(), || self.copy_queries(&item, n));
            self.in_drawing_warp(|| {
                k.when(!self.repeats.get(), || self.fetch_drawn());
                let present = self.has_next.get().select::<u32>(1, 0);
                k.when(k.lane().eq(0), || self.next_present(n + 1).store(present));
            });
            prepared.set(false);
            self.load_tiles(&item, &tiles, masks, || prepared.set(self.prepare(n + 1)));
            shared.release_item(n, k.constant(false));
            count.set(n + 1);
        });
    }

    /// Waits for item `n`, which the drawing warp writes.
    fn receive(&self, n: Value<'k, u32>) {
        self.in_drawing_warp(|| self.publish(n));
        self.shared.items.wait_full(n);
    }

    /// Copies the queries of item `n` while the values of the previous item's first tile are not yet needed. Returns whether it did:
    /// after the last run, item `n` is known when all others have been processed.
    fn prepare(&self, n: Value<'k, u32>) -> Value<'k, bool> {
        let (k, shared) = (self.k, self.shared);
        if !shared.config.has_queries_in_registers() {
            // the queries' tile is in use until the last product
            return k.constant(false);
        }
        self.hand_over_all();
        // the drawing warp has fetched it
        k.sync_named(PRODUCERS, THREADS);
        let present = self.next_present(n).load().ne(0);
        k.when(present, || {
            self.receive(n);
            self.copy_queries(&WorkItemRegs::load_shared(k, shared.item_words(n)), n);
        });
        present
    }

    fn in_drawing_warp(&self, body: impl FnOnce()) {
        self.k.when(self.warp.eq(WARPS - 1), body);
    }

    /// Starts the copy of this lane's word of the item of a run, if there is such a run.
    fn fetch(&self, run: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let present = run.lt(shared.runs);
        self.has_next.set(present);
        k.when(present & k.lane().lt(WorkItem::WORDS as u32), || {
            let item = shared.cta.params.plan.items.at_wide(run.to_u64() * WorkItem::WORDS as u64);
            k.copy_async(GlobalToShared::new(self.next_word(), item.at(k.lane()), 4), 4_u32);
        });
    }

    /// Writes item `n` to its slot: one that must be processed again, or the fetched one. The end is written after all items have been
    /// processed.
    fn publish(&self, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let (words, others) = (shared.item_words(n), shared.item_words(n + 1));
        self.wait_for_item_slot(n);
        let word = k.var("word", 0);
        k.commit_copies();
        k.wait_copies(0);
        k.when(self.has_next.get() & k.lane().lt(WorkItem::WORDS as u32), || {
            word.set(self.next_word().load());
        });
        if let Some(pair) = shared.pair {
            self.take_rows(pair, n, word);
        }
        // the items before the last one, and the last one
        let [flags, of_others] = match shared.pair {
            Some(_) => [shared.flags(n - 2), shared.flags(n - 1)],
            None => [shared.flags(n), shared.flags(n + 1)],
        };
        self.repeats.set(self.must_repeat(flags));
        k.when(self.repeats.get(), || word.set(words.at(k.lane() & 15).load()));
        if shared.pair.is_some() {
            // consumers write flags that are not 0 alone
            k.when(self.repeats.get(), || self.clear(flags));
        }
        k.when(!(self.repeats.get() | self.has_next.get()), || {
            self.wait_for_item_slot(n + 1);
            self.repeats.set(self.must_repeat(of_others));
            k.when(self.repeats.get(), || word.set(others.at(k.lane() & 15).load()));
            self.clear(of_others);
        });
        k.sync_warp();
        k.when(k.lane().lt(WorkItem::WORDS as u32), || words.at(k.lane()).store(word.get()));
        k.when(k.lane().eq(0), || {
            let repeats = self.repeats.get();
            words.plus(PRESENT).store((repeats | self.has_next.get()).select::<u32>(1, 0));
            words.plus(CAREFUL).store(repeats.select::<u32>(1, 0));
        });
        shared.items.full(n).arrive();
    }

    /// This lane's word of the next item.
    fn next_word(&self) -> Shared<'k, u32> {
        self.shared.cta.at::<u32>(self.shared.arena.next_item).at(self.k.lane())
    }

    /// Whether a consumer warp requested that the item of these flags is processed again.
    fn must_repeat(&self, flags: Shared<'k, u32>) -> Value<'k, bool> {
        let k = self.k;
        let flag = flags.at(k.lane() & (self.shared.config.consumer_warps() - 1)).load();
        k.any(flag.ne(0))
    }

    /// Draws a run. The number is used when the next item is loaded, so nothing waits for it.
    fn draw(&self) {
        let first_lane = self.k.lane().eq(0);
        let draws = self.shared.pair.map_or(first_lane, |pair| first_lane & pair.rank.eq(0));
        self.k.when(draws, || {
            self.drawn.set(self.shared.ticket.atomic(AtomicOp::AddU32, 1_u32, Order::Relaxed, Scope::Gpu));
        });
    }

    /// Fetches the item of the drawn run, and draws the run after it.
    fn fetch_drawn(&self) {
        let (k, shared) = (self.k, self.shared);
        if let Some(pair) = shared.pair {
            k.when_else(pair.rank.eq(0), || self.send_drawn(pair), || self.receive_drawn(pair));
            self.sent.set(self.sent.get() + 1);
        }
        let is_last = (self.drawn.get() + 1).eq(shared.draws);
        let resets = shared.pair.map_or(is_last, |pair| is_last & pair.rank.eq(0));
        k.when(k.lane().eq(0) & resets, || shared.ticket.store(0_u32));
        self.fetch(shared.started + self.drawn.get().of_lane(0));
        k.when(self.has_next.get(), || self.draw());
    }

    /// Loads the keys of an item's last KV tile. Warps without boxes visit the tiles only if they compute masks.
    fn load_last_keys(&self, item: &WorkItemRegs<'k>, tiles: &ItemTiles<'k>, visits_all: bool) {
        let exists = tiles.end.gt(tiles.first);
        self.k.when(exists & (self.fills_stages | self.k.constant(visits_all)), || {
            tiles.tile.set(tiles.end - 1);
        });
        self.k.when(exists & self.fills_stages, || {
            self.load_pages(item, tiles.tile.get(), &tiles.pages);
            self.load(item, Tensor::Keys, KvTile { index: tiles.tile.get(), pages: tiles.pages });
        });
    }

    /// Loads all other keys and values of an item, from the last tile to the first. Calls `prepare` before the values of the first.
    fn load_tiles(
        &self,
        item: &WorkItemRegs<'k>,
        tiles: &ItemTiles<'k>,
        masks: Option<RowMasks<'k>>,
        prepare: impl Fn(),
    ) {
        let k = self.k;
        let ItemTiles { first, tile, pages, .. } = *tiles;
        let load = |at: Value<'k, u32>| {
            let of_values = pages.map(|page| k.var("page_of_values", page.get()));
            self.load_pages(item, at - 1, &pages);
            self.load(item, Tensor::Keys, KvTile { index: at - 1, pages });
            self.load(item, Tensor::Values, KvTile { index: at, pages: of_values });
        };
        k.loop_(|| {
            let at = tile.get();
            match &masks {
                Some(masks) => {
                    k.break_if(at.eq(NONE));
                    self.compute_masks(item, masks, at);
                    k.break_if(at.eq(first));
                    k.when(self.fills_stages, || load(at));
                }
                None => {
                    k.break_if(at.eq(first) | at.eq(NONE));
                    load(at);
                }
            }
            tile.set(at - 1);
        });
        k.when(tile.get().ne(NONE), prepare);
        k.when(tile.get().ne(NONE) & self.fills_stages, || {
            self.load(item, Tensor::Values, KvTile { index: tile.get(), pages });
        });
        self.hand_over_all();
    }

    /// Whether there is a run for item `n`. Two words in turns: other warps may still read the last one.
    fn next_present(&self, n: Value<'k, u32>) -> Shared<'k, u32> {
        self.shared.cta.at::<u32>(self.shared.arena.next_present).at(n & 1)
    }

    /// Starts the copies of an item's queries; rows beyond its last are zero-filled.
    fn copy_queries(&self, item: &WorkItemRegs<'k>, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let params = &shared.cta.params;
        let (rows, row) = (item.qo_len * params.group.by, self.warp * rows::ROWS + k.lane());
        shared.queries.wait_empty(n);
        let head = QueryHead::of_row(params, item.qo_begin, item.kv_head, row.min(shared.last_row(rows)));
        let row = SourceRow {
            address: params.q.address + head.offset_in(&params.q) * shared.config.q.size() as u64,
            exists: row.lt(rows),
            dim: shared.config.words_of_row(shared.config.head_dim.qk),
        };
        let to = shared.q.from_row(self.warp * rows::ROWS);
        copy_rows(k, row, to);
        if shared.config.has_queries_in_registers() {
            return k.arrive_after_copies(shared.queries.full(n));
        }
        // products read the tile, not threads
        k.commit_copies();
        k.wait_copies(0);
        k.fence(Fence::ProxyAsyncShared);
        shared.queries.full(n).arrive();
    }
}
