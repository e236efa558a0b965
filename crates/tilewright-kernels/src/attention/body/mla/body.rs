//! Body of the MLA kernel: 16 rows per group, tile of rows by tile of rows, against KV tiles in a ring.
//!
//! Two CTA barriers per KV tile. After the first all copies of the tile have arrived, and all threads have read the previous tile
//! and its logits, which are overwritten next. After the second all logits, visible masks and flags of non-finite values are
//! written.

use super::{
    layout::{MlaBodyLayout, MlaLayout, WARPS},
    logits::LogitExchange,
};
use crate::attention::kernel::{
    CurrentItem, FragmentLoader, KeyRange, KvSource, MmaCta, NonfiniteFlags, NonfiniteMasks, PageLookup,
    PartitionedRows, RowHooks, RowTable, RowTile, SharedQueries, ThreadPartition, ThreadScalar, TileLoader,
    TilePosition, epilogue::store_tile, fragments::apply_mask, nonfinite, partition::divide,
    queries::copy_queries, softmax, visible::visible_mask,
};
use tilewright_ptx::{Builder, Shared, Value, Var};

/// The rows and the elements of O of a warp.
#[derive(Debug, Clone, Copy)]
pub(super) struct WarpTile<'k> {
    /// The group of 16 rows.
    pub(super) group: Value<'k, u32>,
    /// The part of the elements of O.
    pub(super) column: Value<'k, u32>,
}

type BodyContext<'c, 'k> = (&'c MmaCta<'k>, &'c CurrentItem<'k>, &'c RowHooks<'k, 'c>);

/// Executes an item.
pub(super) fn run<'k>(context: BodyContext<'_, 'k>, layout: &MlaLayout, body: MlaBodyLayout) {
    let (cta, current, _) = context;
    let (k, rows) = (cta.k, 16 * body.groups as u32);
    k.when(k.thread().eq(0), || current.first_row().store(0_u32));
    current.store_next();
    cta.fetch_merges(current);
    k.sync_threads();
    k.loop_(|| {
        let body = MlaBody::new(context, layout, body);
        body.begin();
        body.attend();
        body.end();
        let first = current.first_row().load();
        // the next tile overwrites the queries
        k.sync_threads();
        k.break_if((first + rows).ge(current.rows()));
        k.when(k.thread().eq(0), || current.first_row().store(first + rows));
        k.sync_threads();
    });
}

struct MlaBody<'c, 'k> {
    cta: &'c MmaCta<'k>,
    current: &'c CurrentItem<'k>,
    hooks: &'c RowHooks<'k, 'c>,
    k: &'k Builder,
    layout: &'c MlaLayout,
    body: MlaBodyLayout,
    warp_tile: WarpTile<'k>,
    rows: RowTable<'k>,
    tile: RowTile<'k>,
    fragments: FragmentLoader<'k>,
    logits: LogitExchange<'k>,
    visible: Shared<'k, u64>,
    page_lookup: PageLookup<'k>,
    loaders: [TileLoader<'k>; 2],
    /// Byte offset of the next stage to write; the stage after it is the next to read.
    write_stage: Var<'k, u32>,
}

impl<'c, 'k> MlaBody<'c, 'k> {
    fn new((cta, current, hooks): BodyContext<'c, 'k>, layout: &'c MlaLayout, body: MlaBodyLayout) -> Self {
        let (k, keys) = (cta.k, layout.keys);
        let (column, group) = divide(k.warp_index(), body.groups);
        let warp_tile = WarpTile { group, column };
        let entries = cta.at(layout.entries);
        let loader = |part: usize| {
            let entries = entries.plus(part * keys * 4);
            TileLoader::new(cta, cta.thread_group(), layout.parts[part], keys, entries)
        };
        let sum = [0, 1].map(|_| ThreadScalar::Register(k.unset_var("sum")));
        Self {
            cta,
            current,
            hooks,
            k,
            layout,
            body,
            warp_tile,
            rows: RowTable::new(cta),
            tile: RowTile::of_columns(cta, cta.layout.v.steps() / body.columns(), sum),
            fragments: FragmentLoader::new(k, &cta.layout),
            logits: LogitExchange::new(cta, warp_tile, layout, body),
            visible: cta.at(layout.visible),
            page_lookup: PageLookup::new(cta, k.thread(), keys, entries, k.var("pending_page", 0)),
            loaders: [loader(0), loader(1)],
            write_stage: k.var("fills", 0),
        }
    }

    /// Query rows per tile.
    fn num_rows(&self) -> usize {
        16 * self.body.groups
    }

    /// Starts the first copies.
    fn begin(&self) {
        let (k, first) = (self.k, self.current.load().kv_begin);
        let first_row = self.current.first_row().load();
        self.in_lookup_threads(|| self.page_lookup.prefetch(KvSource::from(&self.current.load()), first));
        // four warps fill the row table, as in the other bodies
        k.when(k.thread().lt(128), || self.rows.fill(self.cta, self.current, first_row, self.num_rows()));
        self.copy_queries(first_row);
        self.look_up(first);
        for ahead in 0..self.body.num_stages - 1 {
            // the entries and the row table are written
            k.sync_threads();
            self.load(first + (ahead * self.layout.keys) as u32);
        }
    }

    fn copy_queries(&self, first_row: Value<'k, u32>) {
        let params = &self.cta.params;
        let (to, parts) = (self.cta.at::<u32>(self.body.q), self.layout.parts);
        let tile = SharedQueries { begin: first_row, count: self.num_rows(), format: parts[0], to };
        copy_queries(self.current, &params.q, tile);
        if let Some(pe) = &params.pe {
            let to = to.plus(parts[0].chunks * 4);
            copy_queries(self.current, &pe.q, SharedQueries { format: parts[1], to, ..tile });
        }
    }

    /// Runs `body` in the threads that look up pages.
    fn in_lookup_threads(&self, body: impl FnOnce()) {
        self.k.when(self.k.thread().lt(2 * self.layout.keys as u32), body);
    }

    /// Byte offset of the entry table of the KV tile that begins at key `first`.
    fn table(&self, first: Value<'k, u32>) -> Value<'k, u32> {
        let keys = self.layout.keys;
        (divide(first, keys).0 & 1) * (2 * keys * 16) as u32
    }

    /// Writes the entries of the KV tile at `first`, and prefetches the pages of the next tile.
    fn look_up(&self, first: Value<'k, u32>) {
        self.in_lookup_threads(|| {
            let from = KvSource::from(&self.current.load());
            self.page_lookup.write_entry(from, first, self.page_lookup.prefetched(), self.table(first));
            self.page_lookup.prefetch(from, first + self.layout.keys as u32);
        });
    }

    /// Starts the copies of the KV tile at `first`, if it exists.
    fn load(&self, first: Value<'k, u32>) {
        let k = self.k;
        k.when(first.lt(self.current.kv_end), || {
            let to = self.cta.at::<u32>(self.body.stages).byte(self.write_stage.get());
            let table = self.table(first);
            // into the other table, and before the copies, which loads from shared memory cannot pass
            self.look_up(first + self.layout.keys as u32);
            self.loaders[0].copy(to, table);
            self.loaders[1].copy(to.plus(self.layout.parts[0].chunks * 4), table);
        });
        k.commit_copies();
        let bytes = self.layout.keys * self.cta.layout.k.stride;
        let next = self.write_stage.get() + bytes as u32;
        self.write_stage.set(next.unless(next.eq((self.body.num_stages * bytes) as u32), 0));
    }

    /// Waits for the KV tile at `first` and starts to overwrite the previous stage; returns the tile.
    fn next_tile(&self, first: Value<'k, u32>) -> Shared<'k, u32> {
        let ahead = self.body.num_stages - 1;
        self.k.wait_copies(ahead - 1);
        self.k.sync_threads();
        self.load(first + (ahead * self.layout.keys) as u32);
        self.cta.at::<u32>(self.body.stages).byte(self.write_stage.get())
    }

    fn attend(&self) {
        self.rows.compute_unmasked_range(self.cta, self.current);
        self.current.for_each_tile(self.layout.keys, |first| self.attend_tile(first));
        self.k.wait_copies(0);
    }

    /// Processes the KV tile at key `first`.
    fn attend_tile(&self, first: Value<'k, u32>) {
        let k = self.k;
        let masked = self.rows.needs_mask(first, self.layout.keys);
        let tile = self.next_tile(first);
        k.when(masked, || {
            self.compute_visible(first);
            self.detect_nonfinite(tile);
        });
        self.logits.multiply(&self.fragments, tile);
        k.sync_threads();
        let logits = [self.logits.load()];
        k.when(masked, || apply_mask(k, self.visible_of_rows(), &logits[0]));
        let tiles = std::slice::from_ref(&self.tile);
        let weights = softmax::online_softmax(self.cta, tiles, &logits, self.current.scale, None);
        k.when(masked, || self.extract_nonfinite(tile));
        let values = tile.byte(self.first_column() << 1);
        self.fragments.multiply_values(self.cta, &weights, values, tiles);
        k.when(masked, || self.add_back_nonfinite());
    }

    /// The first element of this warp's part of O.
    fn first_column(&self) -> Value<'k, u32> {
        self.warp_tile.column * (self.cta.layout.v.dim / self.body.columns()) as u32
    }

    /// Computes the visible mask of this thread's row for a KV tile; valid after a barrier.
    fn compute_visible(&self, first: Value<'k, u32>) {
        let (k, thread) = (self.k, self.k.thread());
        k.when(thread.lt(self.num_rows() as u32), || {
            let item = self.current.load();
            let row = (self.current.first_row().load() + thread).min(self.current.rows() - 1);
            let keys = KeyRange { first, width: self.layout.keys as u32 };
            let word = visible_mask(self.cta, &item, row, self.rows.visible_range(thread), keys);
            self.visible.at(thread).store(word);
        });
    }

    /// The visible masks of this thread's rows.
    fn visible_of_rows(&self) -> [Value<'k, u64>; 2] {
        let row = (self.warp_tile.group << 4) + (self.k.lane() >> 2);
        [0, 8].map(|down| self.visible.at(row).plus(down).load())
    }

    fn nonfinite_flags(&self) -> NonfiniteFlags<'k> {
        NonfiniteFlags { words: self.cta.at(self.layout.nonfinite_warps), warps: WARPS }
    }

    /// Nonfinite masks; they overwrite the logits once all warps have read them.
    fn nonfinite_masks(&self) -> NonfiniteMasks<'k> {
        let masks = self.cta.at(self.body.logits);
        NonfiniteMasks { masks, chunks: self.cta.layout.v.chunks, keys: self.layout.keys }
    }

    /// Detects non-finite values; the flags are valid after a barrier.
    fn detect_nonfinite(&self, tile: Shared<'k, u32>) {
        let (k, format) = (self.k, self.cta.layout.v);
        let partition = ThreadPartition::new(self.cta.thread_group(), format.chunks);
        let rows = PartitionedRows { partition, format, rows: self.layout.keys };
        let found = nonfinite::detect(self.cta, rows, tile);
        self.nonfinite_flags().store(k, found);
    }

    /// Replaces non-finite values by 0 and writes their masks.
    fn extract_nonfinite(&self, tile: Shared<'k, u32>) {
        let k = self.k;
        k.when(self.nonfinite_flags().any(k), || {
            // all warps have read the logits
            k.sync_threads();
            nonfinite::extract(self.cta, self.cta.thread_group(), tile, self.nonfinite_masks());
            k.sync_threads();
        });
    }

    /// Adds the non-finite values back.
    fn add_back_nonfinite(&self) {
        self.k.when(self.nonfinite_flags().any(self.k), || {
            let all = self.nonfinite_masks();
            let masks = NonfiniteMasks { masks: all.masks.at(self.first_column() >> 3), ..all };
            let tiles = std::slice::from_ref(&self.tile);
            nonfinite::add_back(self.cta, masks, tiles, &[self.visible_of_rows()]);
        });
    }

    /// Writes outputs or partial states.
    fn end(&self) {
        let (first_column, with_lse) = (self.first_column(), self.warp_tile.column.eq(0));
        let (tile_begin, in_tile) = (self.current.first_row().load(), self.warp_tile.group << 4);
        let at = TilePosition { tile_begin, in_tile, first_column, with_lse };
        store_tile(self.current, self.hooks, &self.tile, at);
    }
}
