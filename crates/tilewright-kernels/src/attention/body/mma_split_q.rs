//! Split-Q body, for items of more than 16 query rows (prefill): 64 or 128 rows at once, 16 or 32 per warp, against KV tiles of
//! 64 keys.
//!
//! ```text
//! ring     K of tile 0, V of tile 0, K of tile 1, ..  one stage each, copied `num_stages - 1` stages ahead
//! for each KV tile:
//!     wait for K    S = Q · Kᵀ, masked to -inf, P = 2^((S - max) · scale);
//!                   on a new maximum, O = O · 2^((old max - max) · scale)
//!     wait for V    O = O + P · V
//! ```
//!
//! Each wait ends with a CTA barrier. After it all copies of the stage have arrived, and all threads have read the previous
//! stage, which is overwritten next.

use super::mma::{KV_TOKENS, layout::MmaLayout};
use crate::attention::kernel::{
    AccFragment, CurrentItem, Dequantizer, FragmentLoader, KeyRange, KvSource, LoadedQueries, MmaCta,
    NonfiniteFlags, NonfiniteMasks, PageLookup, PageScales, RowFormat, RowHooks, RowTable, RowTile,
    SharedQueries, ThreadScalar, TileHalf, TileLoader, TilePosition, WARPS, epilogue::store_tile,
    fragments::apply_mask, nonfinite, partition::divide, queries::copy_queries, softmax,
    visible::visible_mask,
};
use tilewright_ptx::{Builder, Shared, Value, Var};

/// Executes an item, one tile of rows after the other.
pub(super) fn run<'k>(
    cta: &MmaCta<'k>,
    layout: &MmaLayout,
    current: &CurrentItem<'k>,
    hooks: &RowHooks<'k, '_>,
) {
    let (k, rows) = (cta.k, 64 * layout.row_tiles as u32);
    k.when(k.thread().eq(0), || current.first_row().store(0_u32));
    current.store_next();
    cta.fetch_merges(current);
    k.sync_threads();
    k.loop_(|| {
        let body = SplitQBody::new(cta, layout, current, hooks);
        body.begin();
        body.attend();
        let first = current.first_row().load();
        for (at, tile) in body.tiles.iter().enumerate() {
            store_tile(current, hooks, tile, TilePosition::all_columns(k, first, body.row_of_tile(at)));
        }
        // the next tile overwrites the queries
        k.sync_threads();
        k.break_if((first + rows).ge(current.rows()));
        k.when(k.thread().eq(0), || current.first_row().store(first + rows));
        k.sync_threads();
    });
}

/// Offset of [`NonfiniteFlags`] in the control words.
const NONFINITE_OFFSET: usize = 96;

struct SplitQBody<'c, 'k> {
    cta: &'c MmaCta<'k>,
    layout: &'c MmaLayout,
    current: &'c CurrentItem<'k>,
    hooks: &'c RowHooks<'k, 'c>,
    k: &'k Builder,
    rows: RowTable<'k>,
    tiles: Vec<RowTile<'k>>,
    fragments: FragmentLoader<'k>,
    q: Shared<'k, u32>,
    visible: Shared<'k, u64>,
    page_lookup: PageLookup<'k>,
    key_loader: TileLoader<'k>,
    value_loader: TileLoader<'k>,
    dequantizer: Dequantizer<'k>,
    page_scales: PageScales<'k>,
    /// Byte offset of the next stage to write; the stage after it is the next to read.
    write_stage: Var<'k, u32>,
}

fn key_range(first: Value<'_, u32>) -> KeyRange<'_> {
    KeyRange { first, width: KV_TOKENS as u32 }
}

impl<'c, 'k> SplitQBody<'c, 'k> {
    fn new(
        cta: &'c MmaCta<'k>,
        layout: &'c MmaLayout,
        current: &'c CurrentItem<'k>,
        hooks: &'c RowHooks<'k, 'c>,
    ) -> Self {
        let k = cta.k;
        let entries = cta.at(layout.split_q.entries);
        let loader = |format: RowFormat, table: usize| {
            let entries = entries.plus(table * KV_TOKENS * 4);
            TileLoader::new(cta, cta.thread_group(), format, KV_TOKENS, entries)
        };
        let sums = cta.at::<f32>(layout.split_q.sums).at(k.thread() << 2);
        let tile =
            |at: usize| RowTile::new(cta, [0, 1].map(|half| ThreadScalar::Memory(sums.plus(2 * at + half))));
        Self {
            cta,
            layout,
            current,
            hooks,
            k,
            rows: RowTable::new(cta),
            tiles: (0..layout.row_tiles).map(tile).collect(),
            fragments: FragmentLoader::new(k, &cta.layout),
            q: cta.at::<u32>(layout.split_q.q).byte(k.warp_index() * (16 * cta.layout.q.stride) as u32),
            visible: cta.at(layout.split_q.visible),
            page_lookup: PageLookup::new(cta, k.thread(), KV_TOKENS, entries, k.var("pending_page", 0)),
            key_loader: loader(cta.layout.stored_k, 0),
            value_loader: loader(cta.layout.stored_v, 1),
            dequantizer: Dequantizer::new(cta, KV_TOKENS, cta.at(layout.split_q.dequantized)),
            page_scales: PageScales::new(cta, KV_TOKENS),
            write_stage: k.var("fills", 0),
        }
    }

    /// The first row of this warp's tile `at`; the tiles of all warps with one `at` are adjacent.
    fn row_of_tile(&self, at: usize) -> Value<'k, u32> {
        self.k.warp_index() * 16 + 64 * at as u32
    }

    /// Byte offset of the entry table of the KV tile that begins at key `first`.
    fn table(&self, first: Value<'k, u32>) -> Value<'k, u32> {
        (divide(first, KV_TOKENS).0 & 1) * (2 * KV_TOKENS * 16) as u32
    }

    /// Starts the first copies.
    fn begin(&self) {
        let (k, first) = (self.k, self.current.load().kv_begin);
        let (first_row, rows) = (self.current.first_row().load(), 64 * self.layout.row_tiles);
        self.page_lookup.prefetch(KvSource::from(&self.current.load()), first);
        self.rows.fill(self.cta, self.current, first_row, rows);
        self.hooks.fill(self.current, first_row, rows);
        let (q, to) = (&self.cta.params.q, self.cta.at(self.layout.split_q.q));
        let tile = SharedQueries { begin: first_row, count: rows, format: self.cta.layout.q, to };
        match self.cta.q.size() {
            1 => LoadedQueries::load(self.current, q, tile).store(self.cta),
            _ => copy_queries(self.current, q, tile),
        }
        self.look_up(first);
        for load in 0..self.layout.split_q.num_stages - 1 {
            if load.is_multiple_of(2) {
                // the entries and the row table are written
                k.sync_threads();
            }
            self.load(first, load);
        }
    }

    /// Writes the entries of the tile at `first`, and prefetches the pages of the next tile.
    fn look_up(&self, first: Value<'k, u32>) {
        let from = KvSource::from(&self.current.load());
        self.page_lookup.write_entry(from, first, self.page_lookup.prefetched(), self.table(first));
        self.page_lookup.prefetch(from, first + KV_TOKENS as u32);
    }

    /// Starts copy `ahead`, counted from the keys of the tile at `first`.
    fn load(&self, first: Value<'k, u32>, ahead: usize) {
        let (k, split_q) = (self.k, &self.layout.split_q);
        let half = if ahead.is_multiple_of(2) { TileHalf::Keys } else { TileHalf::Values };
        let first = first + (ahead / 2 * KV_TOKENS) as u32;
        k.when(first.lt(self.current.kv_end), || {
            let stage = self.cta.at::<u32>(split_q.stages).byte(self.write_stage.get());
            let loader = if half == TileHalf::Keys { &self.key_loader } else { &self.value_loader };
            if half == TileHalf::Keys {
                // into the other table, and before the copies, which loads from shared memory cannot pass
                self.look_up(first + KV_TOKENS as u32);
                let entries = self.cta.at::<u32>(split_q.entries).byte(self.table(first));
                let (threads, scales) = (self.cta.thread_group(), stage.plus(split_q.scales / 4));
                self.page_scales.copy_to_stage(threads, entries, 2 * KV_TOKENS, scales);
            }
            loader.copy(stage, self.table(first));
        });
        k.commit_copies();
        self.write_stage.set(self.next(self.write_stage.get()));
    }

    /// The stage after `stage`.
    fn next(&self, stage: Value<'k, u32>) -> Value<'k, u32> {
        let split_q = &self.layout.split_q;
        let next = stage + split_q.stage_bytes as u32;
        next.unless(next.eq((split_q.num_stages * split_q.stage_bytes) as u32), 0)
    }

    /// Waits for the next stage and starts to overwrite the previous one. Returns the MMA operand and the stage. `inspect` is
    /// called once this thread's own copies have arrived.
    fn next_stage(
        &self,
        first: Value<'k, u32>,
        half: TileHalf,
        inspect: impl FnOnce(Shared<'k, u32>),
    ) -> [Shared<'k, u32>; 2] {
        let split_q = &self.layout.split_q;
        let stages = self.cta.at::<u32>(split_q.stages);
        self.k.wait_copies(split_q.num_stages - 2);
        let operand = self.dequantizer.operand(half, stages.byte(self.next(self.write_stage.get())));
        inspect(operand);
        self.k.sync_threads();
        self.load(first, usize::from(half == TileHalf::Values) + split_q.num_stages - 1);
        let stage = stages.byte(self.write_stage.get());
        [if self.cta.kv.size() == 1 { operand } else { stage }, stage]
    }

    fn attend(&self) {
        self.rows.compute_unmasked_range(self.cta, self.current);
        self.current.for_each_tile(KV_TOKENS, |first| self.attend_tile(first));
        self.k.wait_copies(0);
    }

    /// Whether the KV tile at key `first` needs a mask.
    fn needs_mask(&self, first: Value<'k, u32>) -> Value<'k, bool> {
        let masked = self.rows.needs_mask(first, KV_TOKENS);
        self.hooks.needs_mask(|| self.current.load(), key_range(first), masked)
    }

    /// Processes the KV tile at key `first`.
    fn attend_tile(&self, first: Value<'k, u32>) {
        let k = self.k;
        let masked = self.needs_mask(first);
        k.when(masked, || self.compute_visible(first));
        let [keys, stage] = self.next_stage(first, TileHalf::Keys, |_| {});
        let logits: Vec<Vec<AccFragment<'k>>> =
            self.tiles.iter().map(|_| (0..KV_TOKENS / 8).map(|_| self.unset_fragment()).collect()).collect();
        let query = |tile: usize, step: usize| {
            let rows = self.q.plus(tile * 16 * self.cta.layout.q.stride);
            self.fragments.query(self.cta, rows, step)
        };
        self.fragments.multiply_keys(self.cta, query, keys, &logits);
        let key_scales = stage.plus(self.layout.split_q.scales / 4).cast::<f32>();
        self.page_scales.scale_logits(key_scales, &logits);
        self.hooks.logits(self.current, key_range(first), &|| self.row_of_tile(0), &logits);
        k.when(masked, || self.apply_mask(&logits));
        let page_rescale = self.page_scales.update(key_scales.plus(KV_TOKENS));
        let weights =
            softmax::online_softmax(self.cta, &self.tiles, &logits, self.current.scale, Some(&page_rescale));
        let inspect = |values| k.when(masked, || self.detect_nonfinite(values));
        let [values, _] = self.next_stage(first, TileHalf::Values, inspect);
        k.when(masked, || self.extract_nonfinite(values));
        self.fragments.multiply_values(self.cta, &weights, values, &self.tiles);
        k.when(masked, || self.add_back_nonfinite());
    }

    fn nonfinite_masks(&self) -> NonfiniteMasks<'k> {
        let masks = self.cta.at(self.layout.split_q.nonfinite_masks);
        NonfiniteMasks { masks, chunks: self.cta.layout.v.chunks, keys: KV_TOKENS }
    }

    fn nonfinite_flags(&self) -> NonfiniteFlags<'k> {
        NonfiniteFlags { words: self.cta.at(self.cta.layout.control + NONFINITE_OFFSET), warps: WARPS }
    }

    /// Detects non-finite values; the flags are valid after a barrier.
    fn detect_nonfinite(&self, values: Shared<'k, u32>) {
        let rows = self.dequantizer.partitioned_values(&self.value_loader);
        self.nonfinite_flags().store(self.k, nonfinite::detect(self.cta, rows, values));
    }

    /// Replaces non-finite values by 0 and writes their masks.
    fn extract_nonfinite(&self, values: Shared<'k, u32>) {
        let k = self.k;
        k.when(self.nonfinite_flags().any(k), || {
            nonfinite::extract(self.cta, self.cta.thread_group(), values, self.nonfinite_masks());
            k.sync_threads();
        });
    }

    /// Adds the non-finite values back.
    fn add_back_nonfinite(&self) {
        let k = self.k;
        k.when(self.nonfinite_flags().any(k), || {
            let visible: Vec<_> = (0..self.tiles.len()).map(|at| self.visible_of_rows(at)).collect();
            nonfinite::add_back(self.cta, self.nonfinite_masks(), &self.tiles, &visible);
            // the next tile overwrites the visible masks
            k.sync_threads();
        });
    }

    /// The visible masks of this thread's rows of a tile.
    fn visible_of_rows(&self, at: usize) -> [Value<'k, u64>; 2] {
        let row = self.row_of_tile(at) + (self.k.lane() >> 2);
        [0, 8].map(|down| self.visible.at(row).plus(down).load())
    }

    fn unset_fragment(&self) -> AccFragment<'k> {
        std::array::from_fn(|_| self.k.unset_var("s"))
    }

    /// Computes the visible mask of this thread's row for a KV tile; valid after a barrier.
    fn compute_visible(&self, first: Value<'k, u32>) {
        let (k, thread) = (self.k, self.k.thread());
        k.when(thread.lt(64 * self.layout.row_tiles as u32), || {
            let item = self.current.load();
            let row =
                (self.current.first_row().load() + thread).min(item.qo_len * self.cta.params.group.by - 1);
            let word = visible_mask(self.cta, &item, row, self.rows.visible_range(thread), key_range(first));
            let word = self.hooks.visible_mask(&item, thread, key_range(first), word);
            self.visible.at(thread).store(word);
        });
    }

    fn apply_mask(&self, logits: &[Vec<AccFragment<'k>>]) {
        for (at, logits) in logits.iter().enumerate() {
            apply_mask(self.k, self.visible_of_rows(at), logits);
        }
    }
}
