//! Body of the MLA kernel: 16 rows per group, tile of rows by tile of rows, against KV tiles in a ring.
//!
//! Two CTA barriers per KV tile. After the first all copies of the tile have arrived, and all threads have read the previous tile
//! and its logits, which are overwritten next. After the second all logits, visible masks and flags of non-finite values are
//! written.

use super::{
    config::THREADS,
    layout::{Body as BodyLayout, Layout, WARPS},
    logits::Logits,
};
use crate::attention::tensor_core::{
    cta::{Cta, Deal, Work, divide},
    fragments::{Cell, LanePlaces, RowTile, hide},
    hooked::Hooked,
    keys::{Copier, Finder, copy_queries},
    output::{Columns, store_columns},
    rows::Rows,
    seen::{Keys, seen},
    softmax, special,
};
use tilewright_ptx::build::{Builder, Shared, Value, Var};

/// The rows and the elements of O of a warp.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'k> {
    /// The group of 16 rows.
    pub(super) group: Value<'k, u32>,
    /// The part of the elements of O.
    pub(super) column: Value<'k, u32>,
}

/// The CTA, the current item and the hooks.
type Given<'c, 'k> = (&'c Cta<'k>, &'c Work<'k>, &'c Hooked<'k, 'c>);

/// Executes an item.
pub(super) fn run<'k>(given: Given<'_, 'k>, layout: &Layout, body: BodyLayout) {
    let (cta, work, _) = given;
    let (k, rows) = (cta.k, 16 * body.groups as u32);
    k.when(k.thread().eq(0), || work.first_row().store(0_u32));
    k.sync_threads();
    k.forever(|| {
        let body = Body::new(given, layout, body);
        body.begin();
        body.attend();
        body.end();
        let first = work.first_row().load();
        // the next tile overwrites the queries
        k.sync_threads();
        k.leave_when((first + rows).ge(work.rows()));
        k.when(k.thread().eq(0), || work.first_row().store(first + rows));
        k.sync_threads();
    });
}

struct Body<'c, 'k> {
    cta: &'c Cta<'k>,
    work: &'c Work<'k>,
    hooks: &'c Hooked<'k, 'c>,
    k: &'k Builder,
    layout: &'c Layout,
    body: BodyLayout,
    place: Place<'k>,
    rows: Rows<'k>,
    tile: RowTile<'k>,
    places: LanePlaces<'k>,
    logits: Logits<'k>,
    seen: Shared<'k, u64>,
    finder: Finder<'k>,
    copiers: [Copier<'k>; 2],
    /// Byte offset of the next stage to write; the stage after it is the next to read.
    fills: Var<'k, u32>,
}

impl<'c, 'k> Body<'c, 'k> {
    fn new((cta, work, hooks): Given<'c, 'k>, layout: &'c Layout, body: BodyLayout) -> Self {
        let (k, keys) = (cta.k, layout.keys);
        let (column, group) = divide(k.warp_index(), body.groups);
        let place = Place { group, column };
        let entries = cta.at(layout.entries);
        let copier = |part: usize| {
            let entries = entries.plus(part * keys * 4);
            Copier::new(cta, (k.thread(), THREADS as usize), (layout.parts[part], keys), entries)
        };
        let sum = [0, 1].map(|_| Cell::Register(k.unset_var("sum")));
        Self {
            cta,
            work,
            hooks,
            k,
            layout,
            body,
            place,
            rows: Rows::new(cta),
            tile: RowTile::of_columns(cta, cta.layout.v.steps() / body.columns(), sum),
            places: LanePlaces::new(k, &cta.layout),
            logits: Logits::new(cta, place, (layout, body)),
            seen: cta.at(layout.seen),
            finder: Finder::new((cta, work), (k.thread(), keys), entries),
            copiers: [copier(0), copier(1)],
            fills: k.var("fills", 0),
        }
    }

    /// Query rows per tile.
    fn num_rows(&self) -> usize {
        16 * self.body.groups
    }

    /// Starts the first copies.
    fn begin(&self) {
        let (k, first) = (self.k, self.work.item().kv_begin);
        let rows = (self.work.first_row().load(), self.num_rows());
        self.finding(|| self.finder.ask(first));
        // four warps fill the row table, as in the other bodies
        k.when(k.thread().lt(128), || self.rows.fill(self.cta, self.work, rows));
        self.copy_queries(rows);
        self.find(first);
        for ahead in 0..self.body.num_stages - 1 {
            // the entries and the row table are written
            k.sync_threads();
            self.load(first + (ahead * self.layout.keys) as u32);
        }
    }

    fn copy_queries(&self, rows: (Value<'k, u32>, usize)) {
        let params = &self.cta.params;
        let (to, parts) = (self.cta.at::<u32>(self.body.q), self.layout.parts);
        let at = (self.cta, self.work);
        copy_queries(at, rows, (&params.q, parts[0]), to);
        if let Some((q, _)) = &params.pe {
            copy_queries(at, rows, (q, parts[1]), to.plus(parts[0].chunks * 4));
        }
    }

    /// Runs `body` in the threads that look up pages.
    fn finding(&self, body: impl FnOnce()) {
        self.k.when(self.k.thread().lt(2 * self.layout.keys as u32), body);
    }

    /// Byte offset of the entry table of the KV tile that begins at key `first`.
    fn table(&self, first: Value<'k, u32>) -> Value<'k, u32> {
        let keys = self.layout.keys;
        (divide(first, keys).0 & 1) * (2 * keys * 16) as u32
    }

    /// Writes the entries of the KV tile at `first`, and prefetches the pages of the next tile.
    fn find(&self, first: Value<'k, u32>) {
        self.finding(|| {
            self.finder.write(first, self.table(first));
            self.finder.ask(first + self.layout.keys as u32);
        });
    }

    /// Starts the copies of the KV tile at `first`, if it exists.
    fn load(&self, first: Value<'k, u32>) {
        let k = self.k;
        k.when(first.lt(self.work.kv_end), || {
            let to = self.cta.at::<u32>(self.body.stages).byte(self.fills.get());
            let table = self.table(first);
            // into the other table, and before the copies, which loads from shared memory cannot pass
            self.find(first + self.layout.keys as u32);
            self.copiers[0].copy(to, table);
            self.copiers[1].copy(to.plus(self.layout.parts[0].chunks * 4), table);
        });
        k.commit_copies();
        let bytes = self.layout.keys * self.cta.layout.k.stride;
        let next = self.fills.get() + bytes as u32;
        self.fills.set(next.unless(next.eq((self.body.num_stages * bytes) as u32), 0));
    }

    /// Waits for the KV tile at `first` and starts to overwrite the previous stage; returns the tile.
    fn next_tile(&self, first: Value<'k, u32>) -> Shared<'k, u32> {
        let ahead = self.body.num_stages - 1;
        self.k.wait_copies(ahead - 1);
        self.k.sync_threads();
        self.load(first + (ahead * self.layout.keys) as u32);
        self.cta.at::<u32>(self.body.stages).byte(self.fills.get())
    }

    fn attend(&self) {
        self.rows.find_plain(self.cta, self.work);
        self.work.for_each_tile(self.layout.keys, |first| self.attend_tile(first));
        self.k.wait_copies(0);
    }

    /// Processes the KV tile at key `first`.
    fn attend_tile(&self, first: Value<'k, u32>) {
        let k = self.k;
        let masked = self.rows.is_masked(first, self.layout.keys);
        let tile = self.next_tile(first);
        k.when(masked, || {
            self.find_seen(first);
            self.find_special(tile);
        });
        self.logits.multiply(&self.places, tile);
        k.sync_threads();
        let logits = [self.logits.load()];
        k.when(masked, || hide(k, self.seen_by(), &logits[0]));
        let tiles = std::slice::from_ref(&self.tile);
        let weights = softmax::weigh(self.cta, (tiles, &logits), self.work.scale, None);
        k.when(masked, || self.encode_special(tile));
        let values = tile.byte(self.first_column() << 1);
        self.places.weigh_values(self.cta, &weights, values, tiles);
        k.when(masked, || self.add_special());
    }

    /// The first element of this warp's part of O.
    fn first_column(&self) -> Value<'k, u32> {
        self.place.column * (self.cta.layout.v.dim / self.body.columns()) as u32
    }

    /// Computes the visible mask of this thread's row for a KV tile; valid after a barrier.
    fn find_seen(&self, first: Value<'k, u32>) {
        let (k, thread) = (self.k, self.k.thread());
        k.when(thread.lt(self.num_rows() as u32), || {
            let item = self.work.item();
            let row = (self.work.first_row().load() + thread).min(self.work.rows() - 1);
            let keys = Keys { first, width: self.layout.keys as u32 };
            let word = seen((self.cta, &item), row, self.rows.range(thread), keys);
            self.seen.at(thread).store(word);
        });
    }

    /// The visible masks of this thread's rows.
    fn seen_by(&self) -> [Value<'k, u64>; 2] {
        let row = (self.place.group << 4) + (self.k.lane() >> 2);
        [0, 8].map(|down| self.seen.at(row).plus(down).load())
    }

    /// Flags of warps that found non-finite values.
    fn special(&self) -> Shared<'k, u32> {
        self.cta.at(self.layout.special)
    }

    /// Nonfinite masks; they overwrite the logits once all warps have read them.
    fn codes(&self) -> Shared<'k, u16> {
        self.cta.at(self.body.logits)
    }

    /// Detects non-finite values; the flags are valid after a barrier.
    fn find_special(&self, tile: Shared<'k, u32>) {
        let (k, format) = (self.k, self.cta.layout.v);
        let deal = Deal::new(k.thread(), THREADS as usize, format.chunks);
        let found = k.ballot(special::find(self.cta, (deal, format, self.layout.keys), tile));
        k.when(k.lane().eq(0), || self.special().at(k.thread() >> 5).store(found));
    }

    fn any_special(&self) -> Value<'k, bool> {
        let four = |at: usize| self.special().plus(at).load_vector::<4>();
        let words = (0..WARPS).step_by(4).flat_map(four);
        words.reduce(|a, b| a | b).unwrap_or_else(|| self.k.constant(0)).ne(0)
    }

    /// Replaces non-finite values by 0 and writes their masks.
    fn encode_special(&self, tile: Shared<'k, u32>) {
        let k = self.k;
        k.when(self.any_special(), || {
            // all warps have read the logits
            k.sync_threads();
            let of_values = (self.cta.layout.v, self.layout.keys);
            special::encode(self.cta, (k.thread(), THREADS as usize), of_values, (tile, self.codes()));
            k.sync_threads();
        });
    }

    /// Adds the non-finite values back.
    fn add_special(&self) {
        self.k.when(self.any_special(), || {
            let codes = self.codes().at(self.first_column() >> 3);
            let tiles = std::slice::from_ref(&self.tile);
            special::add(self.cta, (codes, self.layout.keys), tiles, &[self.seen_by()]);
        });
    }

    /// Writes outputs or partial states.
    fn end(&self) {
        let columns = Columns { first: self.first_column(), with_lse: self.place.column.eq(0) };
        let rows = (self.work.first_row().load(), self.place.group << 4);
        store_columns((self.cta, self.work, self.hooks), &self.tile, rows, columns);
    }
}
