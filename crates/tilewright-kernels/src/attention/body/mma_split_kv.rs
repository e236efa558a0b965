//! Split-KV body, for items of at most 16 query rows (decoding), or 32 (verified drafts): the warps divide the keys, 16 at a time, and
//! reduce their states at the end, one row tile of 16 rows after the other.
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
//! possible. Copies do not stop between items: with the last stages of an item, a warp copies the first ones of the next. Rows are
//! copied by `cp.async`; on Hopper, TMA loads [boxes] of 16-bit caches.

pub(super) mod boxes;
mod epilogue;
mod operands;
pub(super) mod ring;

use super::mma::layout::SplitKvLayout;
use crate::attention::kernel::{
    AccFragment, BoxCorner, CurrentItem, KeyRange, KvSource, LoadedQueries, MmaCta, PageScales, PendingStage,
    RowFormat, RowHooks, RowTable, RowTile, SharedQueries, StageLookup, ThreadGroup, ThreadScalar,
    TileLoader, WARPS, fragments::apply_mask, partition::divide, softmax, visible::visible_mask,
};
use operands::{QueryOperands, StageOperands};
use ring::RingCursors;
use std::ops::Range;
use tilewright_ptx::{Builder, Shared, Value, Var};

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
    tiles: Vec<RowTile<'k>>,
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

/// A stage, or a part of one, of which copies have started.
#[derive(Clone, Copy)]
struct CopiedStage<'k> {
    /// Its number of keys.
    count: Value<'k, u32>,
    /// The corner of this lane's box, if TMA loads it.
    corner: Option<BoxCorner<'k>>,
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
        let sums: Vec<_> = (0..layout.row_tiles)
            .map(|_| [0, 1].map(|_| ThreadScalar::Register(k.unset_var("sum"))))
            .collect();
        let tile = |sums| RowTile { columns: operands.columns(), ..RowTile::new(cta, sums) };
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
            tiles: sums.into_iter().map(tile).collect(),
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
        let copied = cursors.begin(&item, self.first_key(zero), self.layout.stride());
        let is_incomplete = copied.lt(last_key);
        // all pages are requested at once
        let another = |_| cursors.pending.another(k, self.layout.stage_keys, layout.stored_k);
        let stages: Vec<_> = first_keys.iter().map(another).collect();
        k.when(is_incomplete, || {
            cursors.pending.restart();
            let requests = first_keys.iter().zip(&stages);
            requests.for_each(|(first, stage)| self.lookup.request(KvSource::from(&item), *first, *stage));
        });
        let tile = SharedQueries { begin: zero, count: self.layout.rows(), format: layout.q, to: q };
        let queries = LoadedQueries::load(self.current, &self.cta.params.q, tile);
        self.rows.fill(self.cta, self.current, zero, self.layout.rows());
        self.hooks.fill(self.current, zero, self.layout.rows());
        k.when(is_incomplete, || {
            for (first, stage) in first_keys.iter().zip(&stages) {
                k.when(copied.le(*first), || {
                    let stage = self.copy_stage(*stage, || ());
                    self.copy_values(stage);
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

    /// Starts the copies of a stage, or of its keys, and calls `look_up` before: assemblers do not move loads from shared memory
    /// across copies to it.
    fn copy_stage(&self, stage: PendingStage<'k>, look_up: impl FnOnce()) -> CopiedStage<'k> {
        let copied = CopiedStage { count: stage.count(), corner: self.lookup.corner(stage) };
        // all lanes have read the entries of the stage before, and the unit that is overwritten
        self.k.sync_warp();
        if copied.corner.is_none() {
            self.lookup.write_entries(stage);
        }
        look_up();
        self.copy_units(0..self.layout.units_at_once(), copied);
        copied
    }

    /// Starts the copies of the values of a stage, unless [`copy_stage`](Self::copy_stage) did.
    fn copy_values(&self, stage: CopiedStage<'k>) {
        if !self.layout.has_whole_stages() {
            self.copy_units(1..2, stage);
        }
    }

    /// Starts the copies of the units `tables` of a stage.
    fn copy_units(&self, tables: Range<usize>, CopiedStage { count, corner }: CopiedStage<'k>) {
        match (self.cursors.boxes, corner) {
            (Some(boxes), Some(corner)) => self.k.when(count.ne(0), || {
                // all lanes have read the units that are overwritten
                self.k.sync_warp();
                let first = self.cursors.write.get();
                for table in tables.clone() {
                    let unit = first + ((table - tables.start) * self.layout.unit_bytes) as u32;
                    boxes.load(table, corner, unit, self.cursors.policy);
                }
                self.advance(self.cursors.write);
            }),
            _ => self.copy_rows_of_units(tables, count),
        }
    }

    /// The same by rows, by the entries of their tables.
    fn copy_rows_of_units(&self, tables: Range<usize>, count: Value<'k, u32>) {
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
        self.cursors.look_up(self.layout, self.current, self.warp, &self.lookup);
    }

    /// Advances a cursor by the units that are copied together.
    fn advance(&self, cursor: Var<'k, u32>) {
        let layout = self.layout;
        let next = cursor.get() + (layout.units_at_once() * layout.unit_bytes) as u32;
        cursor.set(next.unless(next.eq((layout.num_units * layout.unit_bytes) as u32), 0));
    }

    /// Waits for the units that are read next, and returns the first one.
    fn wait_for_units(&self) -> Shared<'k, u32> {
        let (layout, read) = (self.layout, self.cursors.read.get());
        match self.cursors.boxes {
            Some(boxes) => {
                let units = 0..layout.units_at_once();
                units.for_each(|unit| boxes.wait(read + (unit * layout.unit_bytes) as u32));
            }
            None => {
                self.k.wait_copies(layout.stages_ahead() * (3 - layout.units_at_once()));
                // the copies of all lanes have arrived
                self.k.sync_warp();
            }
        }
        let first = self.ring.byte(read);
        self.advance(self.cursors.read);
        if let Some(boxes) = self.cursors.boxes {
            boxes.advance(self.cursors.read.get());
        }
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
            let copied = self.copy_stage(self.cursors.pending, || self.look_up());
            let keys = self.wait_for_units();
            let of_tile = |_| (0..layout.stage_keys / 8).map(|_| self.unset_fragment()).collect();
            let logits: Vec<Vec<AccFragment<'k>>> = (0..layout.row_tiles).map(of_tile).collect();
            self.operands.multiply_keys(query, keys, &logits);
            self.page_scales.scale_logits(keys.plus(layout.scales / 4).cast(), &logits);
            self.copy_values(copied);
            let stage_keys = self.key_range(stage);
            for (tile, logits) in logits.iter().enumerate() {
                let row = || k.constant(16 * tile as u32);
                self.hooks.logits(self.current, stage_keys, &row, std::slice::from_ref(logits));
            }
            let masked = self.rows.needs_mask(stage_keys.first, layout.stage_keys);
            let masked = self.hooks.needs_mask(|| self.current.load(), stage_keys, masked);
            let (values, whole) = (self.values_of(keys), layout.has_whole_stages());
            let visible: Vec<_> = logits.iter().map(|_| [0, 8].map(|_| k.var::<u32>("visible", 0))).collect();
            let visible_of = |words: &[Var<'k, u32>; 2]| words.map(|word| word.get().to_u64());
            let has_nonfinite = k.var::<bool>("has_nonfinite", false);
            k.when(masked, || {
                self.compute_visible(stage, &visible);
                visible
                    .iter()
                    .zip(&logits)
                    .for_each(|(words, logits)| apply_mask(k, visible_of(words), logits));
                if whole {
                    self.detect_nonfinite(values, has_nonfinite);
                }
            });
            if whole {
                self.extract_nonfinite(values, has_nonfinite);
            }
            let page_rescale = self.page_scales.update(values.plus(layout.scales / 4).cast());
            let (cta, scale) = (&self.operands.cta, self.current.scale);
            let weights = softmax::online_softmax(cta, &self.tiles, &logits, scale, Some(&page_rescale));
            if !whole {
                self.wait_for_units();
                k.when(masked, || self.detect_nonfinite(values, has_nonfinite));
                self.extract_nonfinite(values, has_nonfinite);
            }
            self.operands.multiply_values(&weights, values, &self.tiles);
            k.when(has_nonfinite.get(), || {
                let visible: Vec<_> = visible.iter().map(visible_of).collect();
                self.operands.add_back_nonfinite(self.nonfinite_masks(), &self.tiles, &visible);
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

    /// Computes the visible masks of this lane's two rows of each tile for a stage: each lane computes the mask of one row, then they
    /// are shuffled.
    fn compute_visible(&self, stage: Value<'k, u32>, words: &[[Var<'k, u32>; 2]]) {
        let k = self.k;
        let row = k.lane() & (self.layout.rows() - 1) as u32;
        let keys = self.key_range(stage);
        let item = self.current.load();
        let of_row = row.min(item.qo_len * self.cta.params.group.by - 1);
        let word = visible_mask(self.cta, &item, of_row, self.rows.visible_range(row), keys);
        let word = self.hooks.visible_mask(&item, row, keys, word).low();
        let own = k.lane() >> 2;
        for (to, row) in words.iter().flatten().zip((0..).step_by(8)) {
            to.set(word.of_lane(if row == 0 { own } else { own + row }));
        }
    }

    /// The nonfinite masks of this warp's values, which overwrite the entries of their copies.
    fn nonfinite_masks(&self) -> Shared<'k, u16> {
        self.entries.cast()
    }
}
