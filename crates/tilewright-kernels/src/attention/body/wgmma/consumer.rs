//! A consumer warpgroup: logits, weights and outputs of 64 rows of each item.

use super::{
    EXPONENTIALS, ONE_CONSUMER, WgmmaCta,
    producer::{CAREFUL, CONSUMER_WARPS, PRESENT, REPEAT},
};
use crate::{
    attention::{
        items::NONE,
        kernel::{
            cta::{CurrentItem, ThreadPartition},
            fragments::{AccFragment, RowTile, ThreadScalar, apply_mask},
            nonfinite::{self, NonfiniteMasks},
            row_hooks::RowHooks,
            row_table::{row_position, visible_range_at},
            visible::{KeyRange, range_mask, visible_mask},
        },
    },
    tile::{Cursor, SharedTile, sums},
};
use tilewright::attention::variant::Hook;
use tilewright_ptx::{
    build::{Barrier, Builder, Shared, Value, Var, WgmmaLeft, WgmmaOperands},
    isa::{
        matrix::{Elements, Major},
        sync::Fence,
    },
};

/// Registers per thread.
const REGISTERS: u32 = 232;
/// Threads that process items.
const THREADS: u32 = super::CONSUMERS;

/// Whether tiles may need a mask.
#[derive(Clone, Copy, PartialEq)]
enum Masked {
    /// They do not.
    No,
    /// It depends on the tile.
    Any,
}

impl Masked {
    /// Whether a tile needs a mask.
    #[track_caller]
    fn holds<'k>(self, consumer: &Consumer<'_, 'k>, tile: Value<'k, u32>) -> Value<'k, bool> {
        if self == Self::No { consumer.k.constant(false) } else { consumer.needs_mask(tile) }
    }
}

/// A consumer warpgroup. The registers of its current item are `Var`s.
pub(super) struct Consumer<'c, 'k> {
    pub(super) shared: &'c WgmmaCta<'k>,
    pub(super) hooks: &'c RowHooks<'k, 'c>,
    pub(super) k: &'k Builder,
    /// 0 or 1.
    pub(super) number: Value<'k, u32>,
    /// Fragments of queries, if they are in registers.
    queries: Vec<[Var<'k, u32>; 4]>,
    pub(super) logits: Vec<AccFragment<'k>>,
    /// Four words per 16 keys.
    pub(super) weights: Vec<Var<'k, u32>>,
    /// Accumulators, references of the logits, and sums of weights.
    pub(super) state: RowTile<'k>,
    pub(super) sum: [Var<'k, f32>; 2],
    /// Sums of the rounding errors of the largest weights.
    pub(super) error: [Var<'k, f32>; 2],
    /// The first and the end of the KV tiles that all rows of the item see in full.
    unmasked: [Var<'k, u32>; 2],
    /// Whether the item is processed again, because outputs were not finite.
    careful: Var<'k, u32>,
    keys: Cursor<'k>,
    values: Cursor<'k>,
}

impl<'c, 'k> Consumer<'c, 'k> {
    pub(super) fn new(shared: &'c WgmmaCta<'k>, hooks: &'c RowHooks<'k, 'c>) -> Self {
        let (k, config) = (shared.k, &shared.config);
        k.setmaxnreg_inc(REGISTERS);
        let sum = [0, 1].map(|_| k.var("sum", 0.0));
        let fragment = |_| std::array::from_fn(|_| k.unset_var("s"));
        let steps = if config.has_queries_in_registers() { config.qk() / 16 } else { 0 };
        Self {
            shared,
            hooks,
            k,
            number: (k.thread() >> 7).of_lane(0).named("consumer"),
            queries: (0..steps).map(|_| [0; 4].map(|_| k.unset_var("q"))).collect(),
            logits: (0..config.kv_tokens() / 8).map(fragment).collect(),
            weights: (0..config.kv_tokens() / 4).map(|_| k.unset_var("p")).collect(),
            state: RowTile::of_columns(&shared.cta, config.vo() / 16, sum.map(ThreadScalar::Register)),
            sum,
            error: [0, 1].map(|_| k.var("error", 0.0)),
            unmasked: [0, 1].map(|_| k.var("unmasked", 0)),
            careful: k.var("careful", 0),
            keys: shared.keys.1.cursor(k),
            values: shared.values.1.cursor(k),
        }
    }

    /// Processes the items of this CTA.
    pub(super) fn run(&self) {
        let (k, shared) = (self.k, self.shared);
        let (count, scale) = (k.var("count", 0), k.var("scale_of_item", 0.0));
        // the first consumer computes exponentials first
        k.when(self.number.eq(0), || k.arrive_named(EXPONENTIALS, THREADS));
        k.loop_(|| {
            let n = count.get();
            shared.items.wait_full(n);
            let words = shared.item_words(n);
            k.break_if(words.plus(PRESENT).load().eq(0));
            self.careful.set(words.plus(CAREFUL).load());
            let current = CurrentItem::new(&shared.cta, self.hooks, words, scale);
            self.fill_row_values(&current);
            self.compute_ranges(&current);
            shared.queries.wait_full(n);
            self.process(&current, shared.queries.empty(n));
            self.request_repetition(words.plus(REPEAT));
            self.store(&current);
            if self.queries.is_empty() {
                self.release_from_warp(shared.queries.empty(n));
            }
            self.merge(&current, words.plus(REPEAT));
            self.release_from_warp(shared.items.empty(n));
            count.set(n + 1);
        });
        // the other consumer's last arrival
        k.when(self.number.eq(0), || k.sync_named(EXPONENTIALS, THREADS));
    }

    /// Fills the stored values of hooks, which both consumers share.
    fn fill_row_values(&self, current: &CurrentItem<'k>) {
        if self.hooks.has_row_values() {
            self.shared.cta.sync();
            self.hooks.fill(&self.shared.cta, current, (self.k.constant(0), super::Q_ROWS));
            self.shared.cta.sync();
        }
    }

    /// Computes and stores the rows of an item.
    fn process(&self, current: &CurrentItem<'k>, queries: Barrier<'k>) {
        let k = self.k;
        let item = current.load();
        let (first, end) = self.shared.tiles(item.kv_begin, current.kv_end);
        self.sum.iter().chain(&self.error).for_each(|sum| sum.set(0.0));
        self.state.max.iter().for_each(|max| max.set(f32::NEG_INFINITY));
        self.state.o.iter().flatten().for_each(|o| o.set(0.0));
        self.load_queries(queries);
        k.when(end.gt(first), || {
            let tile = k.var("tile", end - 1);
            self.keys.wait_full();
            self.multiply_keys();
            k.wgmma_wait(0);
            self.release(self.keys);
            self.mask(current, tile.get(), Masked::Any);
            self.softmax(current, || ());
            k.loop_(|| {
                k.break_if(tile.get().eq(first));
                let masked = self.needs_mask(tile.get()) | self.needs_mask(tile.get() - 1);
                k.when(masked, || self.next_tile(current, tile, Masked::Any));
                self.unmasked_tiles(current, tile, first);
            });
            self.multiply_values(current, tile.get(), Masked::Any);
            k.wgmma_wait(0);
            self.release(self.values);
        });
    }

    /// Requests that the item is processed carefully, if an output is not finite. A sum of outputs that overflows does no harm.
    fn request_repetition(&self, repeat: Shared<'k, u32>) {
        let k = self.k;
        let sum = |i: usize| {
            let column = self.state.o.iter().map(|fragment| fragment[i].get());
            column.reduce(|sum, o| sum + o).unwrap_or_else(|| k.constant(0.0))
        };
        let sum = (sum(0) + sum(1)) + (sum(2) + sum(3));
        let request = !sum.abs().lt(f32::INFINITY) & self.careful.get().eq(0);
        let of_warp = k.ballot(request);
        k.when(k.lane().eq(0), || repeat.at(k.thread() >> 5).store(of_warp));
    }

    /// Arrives at the merges of an item, unless it is processed again.
    fn merge(&self, current: &CurrentItem<'k>, repeat: Shared<'k, u32>) {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        k.when(item.merge_deps_begin.lt(item.merge_deps_end), || {
            cta.sync();
            let flags = (0..CONSUMER_WARPS as usize).map(|warp| repeat.plus(warp).load());
            let any = flags.reduce(|a, b| a | b).unwrap_or_else(|| k.constant(0));
            k.when(any.eq(0), || cta.arrive_and_merge(current, self.hooks));
        });
    }

    /// Processes tiles as long as neither needs a mask: a loop of its own, so that its instructions are adjacent.
    fn unmasked_tiles(&self, current: &CurrentItem<'k>, tile: Var<'k, u32>, first: Value<'k, u32>) {
        if self.hooks.is_live(Hook::Mask) {
            return;
        }
        let [begin, end] = self.unmasked.map(Var::get);
        let last = begin.max(first);
        self.k.loop_(|| {
            self.k.break_if(tile.get().le(last) | tile.get().ge(end));
            self.next_tile(current, tile, Masked::No);
        });
    }

    /// Starts the logits of the tile before `tile`, adds the values of `tile`, and computes the weights of the former.
    fn next_tile(&self, current: &CurrentItem<'k>, tile: Var<'k, u32>, masked: Masked) {
        let k = self.k;
        self.keys.wait_full();
        self.multiply_keys();
        self.multiply_values(current, tile.get(), masked);
        tile.set(tile.get() - 1);
        k.wgmma_wait(1);
        self.release(self.keys);
        self.mask(current, tile.get(), masked);
        self.softmax(current, || self.release(self.values));
    }

    /// The tile rows of this consumer.
    fn query_tile(&self) -> SharedTile<'k> {
        self.shared.q.from_row(self.number << 6)
    }

    /// Loads the queries into registers, if they fit, and releases their tile.
    fn load_queries(&self, queries: Barrier<'k>) {
        if self.queries.is_empty() {
            return;
        }
        let (k, tile) = (self.k, self.query_tile());
        let row = (((k.thread() >> 5) & 3) << 4) + (k.lane() & 15);
        for (step, fragment) in self.queries.iter().enumerate() {
            let at = tile.chunk(row, (k.lane() >> 4) + 2 * step as u32);
            fragment.iter().zip(k.load_matrix::<4, _>(at, false)).for_each(|(to, word)| to.set(word));
        }
        self.release_from_warp(queries);
    }

    fn elements(&self) -> (Elements, Elements) {
        (self.shared.cta.elements, self.shared.cta.elements)
    }

    /// Starts `S = Q · Kᵀ`.
    fn multiply_keys(&self) {
        let k = self.k;
        let keys = self.shared.keys.0.stage(self.keys.stage()).rows_descriptor();
        let logits: Vec<_> = self.logits.iter().flatten().copied().collect();
        k.wgmma_fence();
        let q = self.queries.is_empty().then(|| self.query_tile().rows_descriptor());
        for step in 0..self.shared.config.qk() / 16 {
            let left = match q {
                Some(q) => WgmmaLeft::Shared(q.depth_step(step), Major::K),
                None => WgmmaLeft::Registers(self.queries[step].map(Var::get)),
            };
            let right = keys.depth_step(step);
            let operands = WgmmaOperands { elements: self.elements(), left, right, right_major: Major::K };
            k.wgmma(&logits, operands, step > 0);
        }
        k.wgmma_commit();
    }

    /// Starts `O += P · V` of KV tile `tile`.
    fn multiply_values(&self, current: &CurrentItem<'k>, tile: Value<'k, u32>, masked: Masked) {
        let k = self.k;
        self.values.wait_full();
        k.when(masked.holds(self, tile), || self.clean_values(current, tile));
        let values = self.shared.values.0.stage(self.values.stage()).columns_descriptor();
        let o: Vec<_> = self.state.o.iter().flatten().copied().collect();
        k.wgmma_fence();
        for step in 0..self.shared.config.kv_tokens() / 16 {
            let left = WgmmaLeft::Registers(std::array::from_fn(|i| self.weights[4 * step + i].get()));
            let right = values.row_step(step);
            let operands = WgmmaOperands { elements: self.elements(), left, right, right_major: Major::Mn };
            k.wgmma(&o, operands, true);
        }
        k.wgmma_commit();
    }

    /// One thread of the warpgroup releases the stage.
    fn release(&self, cursor: Cursor<'k>) {
        let k = self.k;
        k.when((k.thread() & 127).eq(0), || cursor.release());
        cursor.advance();
    }

    /// One thread of the warp arrives, after all its lanes.
    fn release_from_warp(&self, empty: Barrier<'k>) {
        let k = self.k;
        k.sync_warp();
        k.when(k.lane().eq(0), || empty.arrive());
    }

    #[track_caller]
    fn first_key(&self, tile: Value<'k, u32>) -> Value<'k, u32> {
        tile * self.shared.config.kv_tokens() as u32
    }

    /// Computes the ranges of keys that this thread's rows and all rows of the item see.
    fn compute_ranges(&self, current: &CurrentItem<'k>) {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        let (last, lane) = (current.rows() - 1, k.lane());
        // lanes 0 to 15: the rows of this warp; 16 and 17: the first and the last of the item
        let row = (self.number << 6) + (((k.thread() >> 5) & 3) << 4) + lane;
        let of_lane = lane.eq(16).select(0, row.unless(lane.ge(16), last).min(last));
        let (first, end) = visible_range_at(cta, &item, row_position(cta, &item, of_lane));
        // a warp reads the ranges of its own rows
        k.sync_warp();
        k.when(lane.lt(16), || self.range_table(row).store_vector([first, end]));
        k.sync_warp();
        // positions ascend with the rows of a request
        let (first, end) = (first.of_lane(17), end.of_lane(16));
        let mask_begin = (item.kv_len - item.mask_columns).reinterpret::<i32>();
        let mixed = item.request.eq(NONE);
        // block positions: all keys or none
        let all = first.le(0) & end.eq(i32::MAX);
        let of_blocks = all.select::<i32>(current.kv_end.reinterpret::<i32>(), 0);
        let end = cta.is_blocks().select::<i32>(of_blocks, end);
        let keys = self.shared.config.kv_tokens() as u32;
        let end = end.min(mask_begin.unless(item.mask_columns.eq(0), i32::MAX));
        let [first, end] = [first.unless(mixed, i32::MAX), end].map(|at| at.max(0).reinterpret::<u32>());
        self.unmasked[0].set((first + (keys - 1)) / keys);
        self.unmasked[1].set(end / keys);
    }

    /// The range of keys of a row of the item, in shared memory.
    fn range_table(&self, row: Value<'k, u32>) -> Shared<'k, i32> {
        self.shared.cta.at::<i32>(self.shared.arena.ranges).at(row << 1)
    }

    /// Whether any row may not see all keys of a tile.
    #[track_caller]
    fn needs_mask(&self, tile: Value<'k, u32>) -> Value<'k, bool> {
        let [begin, end] = self.unmasked.map(Var::get);
        self.hooks.needs_mask(tile.lt(begin) | tile.ge(end))
    }

    /// Applies the logits hook, and the mask in a tile that needs it.
    fn mask(&self, current: &CurrentItem<'k>, tile: Value<'k, u32>, masked: Masked) {
        let (k, first) = (self.k, self.first_key(tile));
        let keys = KeyRange { first, width: self.shared.config.kv_tokens() as u32 };
        let row = || (self.number << 6) + (((k.thread() >> 5) & 3) << 4);
        self.hooks.logits((&self.shared.cta, current), keys, (&row, std::slice::from_ref(&self.logits)));
        k.when(masked.holds(self, tile), || {
            if !self.shared.config.any_mask {
                return self.mask_by_range(first);
            }
            let by_words = current.load().mask_columns.gt(0) | self.shared.cta.is_blocks();
            let by_words = by_words | k.constant(self.hooks.is_live(Hook::Mask));
            k.when_else(by_words, || self.mask_by_words(current, first), || self.mask_by_range(first));
        });
    }

    /// Masks logits outside of the rows' ranges.
    fn mask_by_range(&self, first: Value<'k, u32>) {
        let column = (first + sums::first_column(self.k.thread())).reinterpret::<i32>();
        let row = (self.number << 6) + sums::first_row(self.k.thread());
        let ranges =
            [0, 1].map(|half| self.range_table(row).plus(16 * half).load_vector::<2>().map(|at| at - column));
        let mask = |is_masked: &dyn Fn(usize, i32) -> Value<'k, bool>| {
            for (fragment, logits) in self.logits.iter().enumerate() {
                for (i, logit) in logits.iter().enumerate() {
                    let is_masked = is_masked(i / 2, (8 * fragment + i % 2) as i32);
                    logit.set(logit.get().unless(is_masked, f32::NEG_INFINITY));
                }
            }
        };
        // causal masks have no first key: half as many comparisons
        let [first, second] = ranges.map(|[from, _]| from.gt(0));
        self.k.when_else(
            self.k.any(first | second),
            || mask(&|half, at| ranges[half][0].gt(at) | ranges[half][1].le(at)),
            || mask(&|half, at| ranges[half][1].le(at)),
        );
    }

    /// Masks logits by visible masks.
    fn mask_by_words(&self, current: &CurrentItem<'k>, first: Value<'k, u32>) {
        self.compute_visible(current, first);
        for (part, logits) in self.logits.chunks(8).enumerate() {
            apply_mask(self.k, self.visible_of_rows(self.k.constant(part as u32)), logits);
        }
    }

    /// Computes the visible masks of this consumer's rows for the KV tile at `first`.
    fn compute_visible(&self, current: &CurrentItem<'k>, first: Value<'k, u32>) {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        let parts = self.shared.config.kv_tokens() / 64;
        let (thread, barrier) = (k.thread() & 127, self.number + ONE_CONSUMER);
        // previous masks have been read, and the ranges are written
        k.sync_named(barrier, 128);
        k.repeat((thread, 64 * parts as u32), 128, |at| {
            let (row, part) = ((self.number << 6) + (at & 63), at >> 6);
            let [from, to] = self.range_table(row).load_vector::<2>();
            let keys = KeyRange { first: first + (part << 6), width: 64 };
            if !self.shared.config.any_mask {
                return self.visible(row, part).store(range_mask(k, keys, (from, to)));
            }
            let of_item = row.min(current.rows() - 1);
            let word = k.var::<u64>("visible", 0);
            // the end of a tile may begin after the last key, where there are no mask bits
            k.when(keys.first.lt(current.kv_end), || {
                let seen = visible_mask((cta, &item), of_item, (from, to), keys);
                word.set(self.hooks.visible_mask((cta, &item), row, keys, seen));
            });
            self.visible(row, part).store(word.get());
        });
        k.sync_named(barrier, 128);
    }

    fn visible(&self, row: Value<'k, u32>, part: Value<'k, u32>) -> Shared<'k, u64> {
        let parts = self.shared.config.kv_tokens() / 64;
        self.shared.cta.at::<u64>(self.shared.arena.visible).at(row * parts as u32 + part)
    }

    /// The visible masks of this thread's rows for 64 keys.
    fn visible_of_rows(&self, part: Value<'k, u32>) -> [Value<'k, u64>; 2] {
        let row = (self.number << 6) + sums::first_row(self.k.thread());
        [0, 8].map(|down| self.visible(row + down, part).load())
    }

    /// Zeroes values after the segment's last key. In an item that is processed carefully, replaces non-finite values, and adds them to the rows
    /// that see them.
    fn clean_values(&self, current: &CurrentItem<'k>, tile: Value<'k, u32>) {
        let first = self.first_key(tile);
        let (k, cta, config) = (self.k, &self.shared.cta, &self.shared.config);
        let (keys, chunks) = (config.kv_tokens(), config.vo() / 8);
        let values = self.shared.values.0.stage(self.values.stage());
        let at = |row: Value<'k, u32>, chunk: Value<'k, u32>| values.chunk(row, chunk).cast::<u32>();
        // slots after the segment's last key have any content; keys after the item's last are those of the cache
        let present = (current.load().kv_len - first).min(keys as u32);
        k.when(present.lt(keys as u32), || {
            let (partition, zero) =
                (ThreadPartition::new(k.thread(), cta.threads, chunks), k.constant(0_u32));
            k.repeat((present + partition.row, keys as u32), partition.rows_at_once as u32, |row| {
                let of_row = (0..chunks).step_by(partition.lanes);
                of_row.for_each(|chunk| at(row, partition.chunk + chunk as u32).store_vector([zero; 4]));
            });
            k.fence(Fence::ProxyAsyncShared);
            cta.sync();
        });
        k.when(self.careful.get().ne(0), || {
            // masks of the previous tile have been read
            cta.sync();
            let masks = cta.at(self.shared.arena.nonfinite_masks);
            nonfinite::extract_chunks(cta, (k.thread(), cta.threads), (chunks, keys), (at, masks));
            k.fence(Fence::ProxyAsyncShared);
            cta.sync();
            self.compute_visible(current, first);
            // not unrolled: rarely executed
            k.repeat((0, keys as u32 / 64), 1, |part| {
                let masks = NonfiniteMasks { masks: masks.at(part * (64 * chunks) as u32), chunks, keys: 64 };
                let visible = [self.visible_of_rows(part)];
                nonfinite::add_back(cta, masks, std::slice::from_ref(&self.state), &visible);
            });
        });
    }
}
