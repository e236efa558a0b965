//! The producer warpgroup: loads items, queries and keys.
//!
//! Keys arrive as boxes, by TMA: box `b` of a tile is loaded by lane `b / 4` of warp `b % 4`. In pages of less than 8 tokens they are
//! copied by rows, by `cp.async`: warps 0 and 1 the first half of 32 rows each, warps 2 and 3 the second. Warp 0 also writes the
//! items. The queries of the first item are copied before its keys; those of other items after two tiles, which do not wait for the
//! end of the item before.

pub(super) use crate::attention::body::wgmma::producer::{PRESENT, THREADS, WARPS};

use super::{
    CONSUMERS, MlaWgmmaCta,
    config::{KEYS, PANEL, Q_ROWS},
};
use crate::{
    attention::{
        body::wgmma::rows::{self, SourceRow, copy_rows},
        items::{WorkItem, WorkItemRegs},
        kernel::query_row::QueryHead,
    },
    tile::release_from_warp,
};
use tilewright_ptx::{
    build::{Builder, CachePolicy, Global, Value, Var},
    isa::{memory::Eviction, sync::Fence},
};

/// Registers per thread.
const REGISTERS: u32 = 40;
/// Bytes of a cache line.
const LINE: usize = 128;

/// A warp of the producer warpgroup.
pub(super) struct MlaProducer<'c, 'k> {
    pub(super) shared: &'c MlaWgmmaCta<'k>,
    pub(super) k: &'k Builder,
    /// In the warpgroup.
    pub(super) thread: Value<'k, u32>,
    pub(super) warp: Value<'k, u32>,
    /// Whether keys are copied by rows: boxes of less than 8 rows are not worth a TMA copy.
    pub(super) by_rows: Value<'k, bool>,
    /// Whether this warp has a part in each tile. A warp without boxes must not wait for empty stages: nothing waits for it, so a
    /// barrier may complete two phases before the warp tests it, and the warp would wait forever.
    pub(super) fills_stages: Value<'k, bool>,
    /// The first key, counted in a KV tile, that this lane loads: of a box, or a row.
    pub(super) part_begin: Value<'k, u32>,
    /// The page of this lane's part of the next tile: 0 in a ragged tensor, and [`NONE`](crate::attention::items::NONE) after the
    /// last key.
    pub(super) page: Var<'k, u32>,
    /// Tiles loaded so far.
    pub(super) count: Var<'k, u32>,
    /// Whether the last tile of copied rows is not yet handed over.
    pub(super) pending: Var<'k, bool>,
    /// This lane's word of the next item, in warp 0.
    words: Var<'k, u32>,
    /// The L2 cache policy of keys, so that partial states stay there until they are merged.
    pub(super) policy: CachePolicy<'k>,
}

impl<'c, 'k> MlaProducer<'c, 'k> {
    pub(super) fn new(shared: &'c MlaWgmmaCta<'k>) -> Self {
        let k = shared.k;
        k.setmaxnreg_dec(REGISTERS);
        let thread = (k.thread() - CONSUMERS).named("producer");
        let warp = (thread >> 5).of_lane(0).named("producer_warp");
        let by_rows = shared.by_rows();
        let row = thread & (2 * rows::ROWS - 1);
        let part_begin = by_rows.select::<u32>(row, (k.lane() * WARPS + warp) << shared.box_shift);
        Self {
            shared,
            k,
            thread,
            warp,
            by_rows,
            fills_stages: by_rows | (warp << shared.box_shift).lt(KEYS as u32),
            part_begin,
            page: k.var("page", 0),
            count: k.var("tiles_loaded", 0),
            pending: k.var("pending", false),
            words: k.var("item_word", 0),
            policy: k.cache_policy(Eviction::First),
        }
    }

    /// Loads the items of this CTA. The first item, which no kernel writes, is loaded before the previous kernel has completed.
    pub(super) fn run(&self) {
        let (k, shared) = (self.k, self.shared);
        let params = &shared.cta.params;
        let worker = params.plan.worker_indptr.at(k.cta() / shared.cta.ctas_per_item);
        let (begin, end) = (worker.load(), worker.plus(1).load());
        self.load_words(begin, end);
        shared.begin();
        k.repeat((begin, end), 1, |index| {
            let n = index - begin;
            self.publish(n, true);
            self.load_words(index + 1, end);
            shared.items.wait_full(n);
            self.load_item(n);
            release_from_warp(k, shared.items.empty(n));
        });
        self.publish((end.max(begin)) - begin, false);
    }

    /// Loads the words of item `index` of the items before `end`, if it exists.
    fn load_words(&self, index: Value<'k, u32>, end: Value<'k, u32>) {
        let k = self.k;
        let loads = self.warp.eq(0) & k.lane().lt(WorkItem::WORDS as u32) & index.lt(end);
        k.when(loads, || {
            let item = self.shared.cta.params.plan.items.at_wide(index.to_u64() * WorkItem::WORDS as u64);
            self.words.set(item.at(k.lane()).load());
        });
    }

    /// Writes the loaded item, or the end, to the slot of this CTA's `n`-th item.
    fn publish(&self, n: Value<'k, u32>, exists: bool) {
        let (k, shared) = (self.k, self.shared);
        k.when(self.warp.eq(0), || {
            let words = shared.item_words(n);
            shared.items.wait_empty(n);
            if exists {
                k.when(k.lane().lt(WorkItem::WORDS as u32), || words.at(k.lane()).store(self.words.get()));
            }
            k.when(k.lane().eq(0), || words.plus(PRESENT).store(u32::from(exists)));
            shared.items.full(n).arrive();
        });
    }

    /// Loads the tiles and the queries of this CTA's `n`-th item. Its words are reloaded at their point of use to reduce register
    /// pressure.
    fn load_item(&self, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let item = || WorkItemRegs::load_shared(k, shared.item_words(n));
        let of_item = item();
        let (first, end) = shared.tiles(of_item.kv_begin, of_item.kv_end);
        let tile = k.var("tile", first);
        let with_queries = (first + 2).min(end);
        let copy_begins = n.eq(0).select(first, with_queries);
        self.load_page(&item(), first);
        k.when(n.ne(0), || self.prefetch_queries(&item()));
        k.loop_(|| {
            k.when(tile.get().eq(copy_begins), || self.copy_queries(&item(), n));
            k.when(tile.get().eq(with_queries), || {
                k.commit_copies();
                k.wait_copies(0);
                // products read the tile, not only threads
                k.fence(Fence::ProxyAsyncShared);
                shared.queries.full(n).arrive();
            });
            k.break_if(tile.get().eq(end));
            self.load(&item(), tile.get());
            // a warp without a part in any tile only copies queries
            let next = tile.get() + 1;
            tile.set(next.unless(next.gt(with_queries) & !self.fills_stages, end));
            self.load_page(&item(), tile.get());
        });
        self.hand_over();
    }

    /// Prefetches an item's queries into the L2 cache, half a row per thread. The copy waits for the end of the item before, and
    /// would then wait for the keys that are loaded ahead.
    fn prefetch_queries(&self, item: &WorkItemRegs<'k>) {
        let (k, params, config) = (self.k, &self.shared.cta.params, &self.shared.config);
        let row = self.shared.first_row() + (self.thread & (Q_ROWS as u32 - 1));
        k.when(row.lt(item.qo_len * params.group.by), || {
            let head = QueryHead::of_row(params, item.qo_begin, item.kv_head, row);
            let bytes = 2 * config.half();
            let first = ((self.thread >> 6) * bytes as u32).to_u64();
            let half = Global::<u32>::new(params.q.address + head.offset_in(&params.q) * 2 + first);
            (0..bytes).step_by(LINE).for_each(|at| half.plus(at / 4).prefetch());
            if let Some(pe) = params.pe {
                let row = Global::<u32>::new(pe.q.address + head.offset_in(&pe.q) * 2);
                let bytes = 2 * (config.head_dim.qk - config.head_dim.vo);
                (0..bytes).step_by(LINE).for_each(|at| row.plus(at / 4).prefetch());
            }
        });
    }

    /// Starts the copies of an item's queries; rows beyond its last are zero-filled.
    fn copy_queries(&self, item: &WorkItemRegs<'k>, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let (params, config) = (&shared.cta.params, &shared.config);
        let half = self.warp >> 1;
        let begin = (self.warp & 1) * rows::ROWS;
        let (rows, row) = (item.qo_len * params.group.by, shared.first_row() + begin + k.lane());
        // the tiles before the queries cannot be consumed without them
        self.hand_over();
        shared.queries.wait_empty(n);
        let head = QueryHead::of_row(params, item.qo_begin, item.kv_head, row.min(rows - 1));
        let source = |address, dim| SourceRow { address, exists: row.lt(rows), dim };
        let to = shared.q.from_row(begin);
        let address = params.q.address + head.offset_in(&params.q) * 2;
        let middle = config.value_panels() / 2;
        k.when_else(
            half.eq(0),
            || copy_rows(k, source(address, config.half()), to.panels(0..middle)),
            || {
                let second = address + 2 * config.half() as u64;
                let panels = to.panels(middle..config.value_panels());
                copy_rows(k, source(second, config.half()), panels);
                if let Some(pe) = params.pe {
                    let dim = config.head_dim.qk - config.head_dim.vo;
                    let address = pe.q.address + head.offset_in(&pe.q) * 2;
                    let panels = to.panels(config.value_panels()..config.panels());
                    copy_rows(k, source(address, dim), panels);
                }
            },
        );
    }
}

const _: () = assert!(Q_ROWS as u32 == 2 * rows::ROWS && PANEL == 64, "a pair of warps copies all rows");
