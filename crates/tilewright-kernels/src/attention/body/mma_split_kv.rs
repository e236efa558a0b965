//! Split-KV body, for items of at most 16 query rows (decoding): the warps divide the keys, 16 at a time, and reduce their states
//! at the end.
//!
//! ```text
//! warp w    keys n (4 i + w) .. + n for i = 0, 1, .., n = 16 or 32: K and V copied `stages_ahead` stages ahead, by this warp alone
//!           copy K(i + ahead);  S = Q · K(i)ᵀ
//!           copy V(i + ahead) over K(i), if no other unit is free;  P = 2^((S - max) · scale)
//!           O = O · 2^((old max - max) · scale) on a new maximum;  O = O + P · V(i)
//! end       O = Σ_w O_w · 2^((max_w - max) · scale)
//! ```
//!
//! Decoding is memory-bound: warps run independently, without CTA barriers in the loop, to keep as many bytes in flight as
//! possible. Copies do not stop between items: with the last stages of an item, a warp copies the first ones of the next.

mod operands;
pub(super) mod ring;

use super::{MAX_SPLIT_KV_ROWS, mma::layout::SplitKvLayout};
use crate::attention::kernel::{
    cta::{CurrentItem, MmaCta},
    epilogue::{SoftmaxStats, store_chunk},
    fragments::{AccFragment, RowTile, ThreadScalar, apply_mask},
    layout::{RowFormat, WARPS},
    page_lookup::KvSource,
    page_scales::{self, PageScales},
    partition::{ThreadGroup, divide},
    queries::{LoadedQueries, SharedQueries},
    row_hooks::RowHooks,
    row_table::RowTable,
    softmax,
    stage_lookup::{PendingStage, StageLookup},
    tile_loader::TileLoader,
    visible::{KeyRange, visible_mask},
};
use crate::tile::reduce;
use operands::{QueryOperands, StageOperands};
use ring::RingCursors;
use std::ops::Range;
use tilewright_ptx::build::{Builder, Shared, Value, Var};

/// Executes an item.
pub(super) fn run<'k>(
    cta: &MmaCta<'k>,
    layout: &SplitKvLayout,
    current: &CurrentItem<'k>,
    cursors: RingCursors<'k>,
    hooks: &RowHooks<'k, '_>,
) {
    let body = SplitKvBody::new(cta, layout, current, cursors, hooks);
    let query = body.begin();
    body.attend(&query);
    body.end();
}

struct SplitKvBody<'c, 'k> {
    cta: &'c MmaCta<'k>,
    layout: &'c SplitKvLayout,
    current: &'c CurrentItem<'k>,
    hooks: &'c RowHooks<'k, 'c>,
    k: &'k Builder,
    warp: Value<'k, u32>,
    kv_begin: Value<'k, u32>,
    /// Number of this warp's stages.
    count: Value<'k, u32>,
    rows: RowTable<'k>,
    tile: RowTile<'k>,
    operands: StageOperands<'k>,
    ring: Shared<'k, u32>,
    lookup: StageLookup<'k>,
    key_loader: TileLoader<'k>,
    value_loader: TileLoader<'k>,
    /// Entries of this warp's keys and values.
    entries: Shared<'k, u32>,
    page_scales: PageScales<'k>,
    cursors: RingCursors<'k>,
}

impl<'c, 'k> SplitKvBody<'c, 'k> {
    fn new(
        cta: &'c MmaCta<'k>,
        layout: &'c SplitKvLayout,
        current: &'c CurrentItem<'k>,
        cursors: RingCursors<'k>,
        hooks: &'c RowHooks<'k, 'c>,
    ) -> Self {
        let (k, item, warp) = (cta.k, current.load(), cta.k.warp_index());
        let entries = cta.at::<u32>(layout.entries).byte(warp * layout.entry_bytes as u32);
        let loader = |format: RowFormat, table: usize| {
            let entries = entries.plus(table * layout.stage_keys * 4);
            TileLoader::new(cta, ThreadGroup::of_warp(k), format, layout.stage_keys, entries)
                .with_policy(cursors.policy)
        };
        let groups =
            divide(item.kv_end - item.kv_begin + (layout.stage_keys - 1) as u32, layout.stage_keys).0;
        let operands = StageOperands::new(cta, layout);
        let sums = [0, 1].map(|_| ThreadScalar::Register(k.unset_var("sum")));
        Self {
            cta,
            layout,
            current,
            hooks,
            k,
            warp,
            kv_begin: item.kv_begin,
            count: divide(groups + (WARPS - 1) as u32 - warp, WARPS).0.named("stages"),
            rows: RowTable::new(cta),
            tile: RowTile { columns: operands.columns(), ..RowTile::new(cta, sums) },
            operands,
            ring: cta.at::<u32>(layout.rings).byte(warp * layout.ring_bytes as u32),
            lookup: StageLookup::new(cta, entries, layout.stage_keys),
            key_loader: loader(cta.layout.stored_k, 0),
            value_loader: loader(cta.layout.stored_v, 1),
            page_scales: PageScales::new(cta, layout.stage_keys),
            entries,
            cursors,
        }
    }

    fn first_key(&self, stage: Value<'k, u32>) -> Value<'k, u32> {
        self.kv_begin + (stage * WARPS as u32 + self.warp) * self.layout.stage_keys as u32
    }

    /// Starts the first copies, unless the last item did; returns the queries.
    fn begin(&self) -> QueryOperands<'k> {
        let (k, zero, layout, cursors) = (self.k, self.k.constant(0_u32), &self.cta.layout, &self.cursors);
        let (q, item) = (self.cta.at(self.layout.q), self.current.load());
        let ahead = self.layout.stages_ahead() as u32;
        let first_keys: Vec<_> = (0..ahead).map(|stage| self.first_key(k.constant(stage))).collect();
        let last_key = self.first_key(k.constant(ahead));
        let copied = cursors.begin(&item, self.first_key(zero), self.stride());
        let is_incomplete = copied.lt(last_key);
        // all pages are requested at once
        let stages: Vec<_> =
            first_keys.iter().map(|_| PendingStage::new(k, self.layout.stage_keys)).collect();
        k.when(is_incomplete, || {
            let requests = first_keys.iter().zip(&stages);
            requests.for_each(|(first, stage)| self.lookup.request(KvSource::from(&item), *first, *stage));
        });
        let tile = SharedQueries { begin: zero, count: MAX_SPLIT_KV_ROWS, format: layout.q, to: q };
        let queries = LoadedQueries::load(self.current, &self.cta.params.q, tile);
        self.rows.fill(self.cta, self.current, zero, MAX_SPLIT_KV_ROWS);
        self.hooks.fill(self.cta, self.current, zero, MAX_SPLIT_KV_ROWS);
        k.when(is_incomplete, || {
            for (first, stage) in first_keys.iter().zip(&stages) {
                k.when(copied.le(*first), || {
                    let count = self.copy_stage(*stage, || ());
                    self.copy_values(count);
                });
            }
        });
        self.operands.store_queries(queries);
        self.current.store_next();
        k.sync_threads();
        k.when(is_incomplete, || cursors.first_key.set(last_key));
        // an item whose stages are all copied has no pending one: the first one of the next item is looked up now
        k.when(is_incomplete | cursors.pending.count().eq(0), || self.look_up());
        self.cta.fetch_merges(self.current);
        self.rows.compute_unmasked_range(self.cta, self.current);
        self.operands.load_queries()
    }

    /// Keys between the stages of a warp.
    fn stride(&self) -> u32 {
        (WARPS * self.layout.stage_keys) as u32
    }

    /// Starts the copies of a stage, or of its keys, and calls `look_up` before: assemblers do not move loads from shared memory
    /// across copies to it. Returns the number of keys.
    fn copy_stage(&self, stage: PendingStage<'k>, look_up: impl FnOnce()) -> Value<'k, u32> {
        let (k, count) = (self.k, stage.count());
        // all lanes have read the entries of the stage before, and the unit that is overwritten
        k.sync_warp();
        self.lookup.write_entries(stage);
        look_up();
        self.copy_units(0..self.layout.units_at_once(), count);
        count
    }

    /// Starts the copies of the values of a stage of `count` keys, unless [`copy_stage`](Self::copy_stage) did.
    fn copy_values(&self, count: Value<'k, u32>) {
        if !self.layout.has_whole_stages() {
            self.copy_units(1..2, count);
        }
    }

    /// Starts the copies of the units `tables` of a stage, by the entries of their tables.
    fn copy_units(&self, tables: Range<usize>, count: Value<'k, u32>) {
        let (k, layout) = (self.k, self.layout);
        k.when(count.ne(0), || {
            // all lanes have written the entries, and have read the units that are overwritten
            k.sync_warp();
            let first = self.ring.byte(self.cursors.write.get());
            let unit = |table: usize| first.plus((table - tables.start) * layout.unit_bytes / 4);
            let loaders = [&self.key_loader, &self.value_loader];
            k.when_else(
                count.ge(layout.stage_keys as u32),
                || tables.clone().for_each(|table| loaders[table].copy_all(unit(table))),
                || tables.clone().for_each(|table| loaders[table].copy(unit(table), k.constant(0))),
            );
            for table in tables.clone() {
                let entries = self.entries.plus(table * layout.stage_keys * 4);
                let (lanes, scales) = (ThreadGroup::of_warp(k), unit(table).plus(layout.scales / 4));
                self.page_scales.copy_to_stage(lanes, entries, layout.stage_keys, scales);
            }
            self.advance(self.cursors.write);
        });
        k.commit_copies();
    }

    /// Looks up the stage after the pending ones.
    fn look_up(&self) {
        let in_group = self.warp * self.layout.stage_keys as u32;
        let steps = (self.stride(), in_group, self.layout.rows_in_free_units());
        self.cursors.look_up((self.cta, self.current), &self.lookup, steps);
    }

    /// Advances a cursor by the units that are copied together.
    fn advance(&self, cursor: Var<'k, u32>) {
        let layout = self.layout;
        let next = cursor.get() + (layout.units_at_once() * layout.unit_bytes) as u32;
        cursor.set(next.unless(next.eq((layout.num_units * layout.unit_bytes) as u32), 0));
    }

    /// Waits for the units that are read next, and returns the first one.
    fn wait_for_units(&self) -> Shared<'k, u32> {
        self.k.wait_copies(self.layout.stages_ahead() * (3 - self.layout.units_at_once()));
        // the copies of all lanes have arrived
        self.k.sync_warp();
        let first = self.ring.byte(self.cursors.read.get());
        self.advance(self.cursors.read);
        first
    }

    /// The values of the stage whose keys are at `keys`; units of their own are not yet awaited.
    fn values_of(&self, keys: Shared<'k, u32>) -> Shared<'k, u32> {
        match self.layout.has_whole_stages() {
            true => keys.plus(self.layout.unit_bytes / 4),
            false => self.ring.byte(self.cursors.read.get()),
        }
    }

    fn attend(&self, query: &QueryOperands<'k>) {
        let (k, layout) = (self.k, self.layout);
        k.repeat((0, self.count), 1, |stage| {
            let count = self.copy_stage(self.cursors.pending, || self.look_up());
            let keys = self.wait_for_units();
            let logits = vec![(0..layout.stage_keys / 8).map(|_| self.unset_fragment()).collect::<Vec<_>>()];
            self.operands.multiply_keys(query, keys, &logits[0]);
            self.page_scales.scale_logits(keys.plus(layout.scales / 4).cast(), &logits);
            self.copy_values(count);
            let stage_keys = self.key_range(stage);
            self.hooks.logits(self.current, stage_keys, &|| k.constant(0), &logits);
            let masked = self.rows.needs_mask(stage_keys.first, layout.stage_keys);
            let masked = self.hooks.needs_mask(|| self.current.load(), stage_keys, masked);
            let (values, whole) = (self.values_of(keys), layout.has_whole_stages());
            let visible = [0, 8].map(|_| k.var::<u32>("seen", 0));
            let has_nonfinite = k.var::<bool>("special", false);
            k.when(masked, || {
                self.compute_visible(stage, visible);
                apply_mask(k, visible.map(|word| word.get().to_u64()), &logits[0]);
                if whole {
                    self.detect_nonfinite(values, has_nonfinite);
                }
            });
            if whole {
                self.extract_nonfinite(values, has_nonfinite);
            }
            let page_rescale = self.page_scales.update(values.plus(layout.scales / 4).cast());
            let (cta, tiles) = (&self.operands.cta, std::slice::from_ref(&self.tile));
            let scale = self.current.scale;
            let weights = softmax::online_softmax(cta, tiles, &logits, scale, Some(&page_rescale));
            if !whole {
                self.wait_for_units();
                k.when(masked, || self.detect_nonfinite(values, has_nonfinite));
                self.extract_nonfinite(values, has_nonfinite);
            }
            self.operands.multiply_values(&weights, values, &self.tile);
            k.when(has_nonfinite.get(), || {
                let visible = visible.map(|word| word.get().to_u64());
                self.operands.add_back_nonfinite(self.nonfinite_masks(), &self.tile, visible);
            });
        });
    }

    /// Sets `found` if a value of a masked stage is not finite.
    fn detect_nonfinite(&self, values: Shared<'k, u32>, found: Var<'k, bool>) {
        if let Some(of_lane) = self.operands.detect_nonfinite(&self.value_loader, values) {
            found.set(self.k.any(of_lane));
        }
    }

    /// Extracts the non-finite values of a stage, if any were found.
    fn extract_nonfinite(&self, values: Shared<'k, u32>, found: Var<'k, bool>) {
        self.k.when(found.get(), || {
            self.operands.extract_nonfinite(values, self.nonfinite_masks());
            self.k.sync_warp();
        });
    }

    fn key_range(&self, stage: Value<'k, u32>) -> KeyRange<'k> {
        KeyRange { first: self.first_key(stage), width: self.layout.stage_keys as u32 }
    }

    fn unset_fragment(&self) -> AccFragment<'k> {
        std::array::from_fn(|_| self.k.unset_var("s"))
    }

    /// Computes the visible masks of this lane's two rows for a stage: each lane computes the mask of one row, then they are
    /// shuffled.
    fn compute_visible(&self, stage: Value<'k, u32>, words: [Var<'k, u32>; 2]) {
        let k = self.k;
        let row = k.lane() & (MAX_SPLIT_KV_ROWS - 1) as u32;
        let keys = self.key_range(stage);
        let item = self.current.load();
        let of_row = row.min(item.qo_len * self.cta.params.group.by - 1);
        let word = visible_mask((self.cta, &item), of_row, self.rows.visible_range(row), keys);
        let word = self.hooks.visible_mask((self.cta, &item), row, keys, word).low();
        let own = k.lane() >> 2;
        words[0].set(word.of_lane(own));
        words[1].set(word.of_lane(own + 8));
    }

    /// The nonfinite masks of this warp's values, which overwrite the entries of their copies.
    fn nonfinite_masks(&self) -> Shared<'k, u16> {
        self.entries.cast()
    }

    /// Reduces the states of all warps and writes the result.
    fn end(&self) {
        let (k, layout, lane) = (self.k, self.layout, self.k.lane());
        let (states, rows) = (self.cta.at::<f32>(layout.states), self.current.rows());
        self.cta.wait_before_merges();
        // O overwrites the unit that was read last, or, if that is too small, the ring, which is empty then
        let sums_at = match layout.rows_in_free_units() {
            MAX_SPLIT_KV_ROWS.. => self.cursors.write.get(),
            most => self.cursors.write.get().unless(rows.gt(most as u32), 0),
        };
        k.when(lane.eq(0), || self.sums_offset(self.warp).store(sums_at));
        k.sync_warp();
        let sums = self.ring.byte(sums_at).cast::<f32>();
        for half in 0..2 {
            let row = (lane >> 2) + 8 * half as u32;
            let sum = reduce::quad_sum(self.tile.sum[half].get());
            let pair = [self.tile.max[half].get() * self.current.scale, sum];
            k.when((lane & 3).eq(0), || {
                states.at((self.warp * MAX_SPLIT_KV_ROWS as u32 + row) << 1).store_vector(pair);
            });
            k.when(row.lt(rows), || {
                self.operands.store_sums(&self.tile, half, sums.at(row * layout.sums_stride as u32));
            });
        }
        k.sync_threads();
        let chunks = self.cta.layout.v.dim / 4;
        k.repeat((k.thread(), rows * chunks as u32), 128, |at| {
            let (row, chunk) = divide(at, chunks);
            let (values, stats) = self.reduce_warps(states, row, chunk);
            store_chunk(self.current, self.hooks, (row, chunk), values, stats);
        });
    }

    /// The byte offset of a warp's O in its ring.
    fn sums_offset(&self, warp: Value<'k, u32>) -> Shared<'k, u32> {
        self.cta.at::<u32>(self.layout.states + SplitKvLayout::STATES_BYTES).at(warp)
    }

    /// Four adjacent elements of a row, reduced over warps.
    fn reduce_warps(
        &self,
        states: Shared<'k, f32>,
        row: Value<'k, u32>,
        chunk: Value<'k, u32>,
    ) -> ([Value<'k, f32>; 4], SoftmaxStats<'k>) {
        let (k, layout) = (self.k, self.layout);
        let of_warp = |warp: usize| states.at(row << 1).plus(2 * warp * MAX_SPLIT_KV_ROWS).load_vector::<2>();
        let state: Vec<_> = (0..WARPS).map(of_warp).collect();
        let state_max =
            state.iter().fold(k.constant(f32::NEG_INFINITY), |max, [of_warp, _]| max.max(*of_warp));
        let max = softmax::finite_max(state_max);
        let rings = self.cta.at::<u32>(layout.rings);
        let in_sums = row * layout.sums_stride as u32 + (chunk << 2);
        let (mut sum, mut values) = (k.constant(0.0), [k.constant(0.0); 4]);
        for (warp, [max_of_warp, sum_of_warp]) in state.into_iter().enumerate() {
            let factor = (max_of_warp - max).exp2();
            sum = sum_of_warp.mul_add(factor, sum);
            let sums = rings.plus(warp * layout.ring_bytes / 4);
            let sums = sums.byte(self.sums_offset(k.constant(warp as u32)).load()).cast::<f32>();
            let of_warp = sums.at(in_sums).load_vector::<4>();
            let running_scale = page_scales::running_scale(self.cta, k.constant(warp as u32));
            let factor = running_scale.map_or(factor, |scale| factor * scale);
            values = std::array::from_fn(|i| of_warp[i].mul_add(factor, values[i]));
        }
        (values, SoftmaxStats::new(max, sum))
    }
}
