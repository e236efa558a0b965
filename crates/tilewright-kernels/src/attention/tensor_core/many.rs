//! An item of many query rows: 64 or 128 of them at once, 16 or 32 a warp, against KV tiles of 64 keys.
//!
//! ```text
//! ring     K of tile 0, V of tile 0, K of tile 1, ..  one slot each, copied `num_slots - 1` slots ahead
//! for each KV tile:
//!     wait for K    S = Q · Kᵀ, what rows do not see becomes -inf, P = 2^((S - max) · scale)
//!     wait for V    O = O · 2^((old max - max) · scale) + P · V
//! ```
//!
//! Each wait ends at a barrier of the CTA: behind it all copies of the slot are there, and all threads are done with the slot
//! before it, which is filled anew.

use super::{
    config::KV_TOKENS,
    cta::{Cta, Work},
    fragments::{LanePlaces, RowTile, Sums, hide},
    keys::{Copier, Finder, copy_queries},
    layout::RowFormat,
    output::store_tile,
    rows::{Plain, Rows},
    seen::{Keys, seen},
};
use tilewright_ptx::build::{Builder, Shared, Value, Var};

/// Does an item, tile of rows by tile of rows.
pub(super) fn run<'k>(cta: &Cta<'k>, work: &Work<'k>) {
    let (k, rows) = (cta.k, 64 * cta.layout.row_tiles as u32);
    k.repeat((0, work.rows), rows, |first_row| {
        let body = Many::new(cta, work, first_row);
        body.begin();
        body.attend();
        for (at, tile) in body.tiles.iter().enumerate() {
            store_tile(cta, work, tile, first_row + body.row_of_tile(at));
        }
        // the next rows' queries replace these
        k.sync_threads();
    });
}

struct Many<'c, 'k> {
    cta: &'c Cta<'k>,
    work: &'c Work<'k>,
    k: &'k Builder,
    first_row: Value<'k, u32>,
    /// KV tiles.
    count: Value<'k, u32>,
    rows: Rows<'k>,
    tiles: Vec<RowTile<'k>>,
    places: LanePlaces<'k>,
    q: Shared<'k, u32>,
    seen: Shared<'k, u64>,
    finder: Finder<'k>,
    keys: Copier<'k>,
    values: Copier<'k>,
    /// Bytes from the first slot to the one that is read next, and to the one that is filled next.
    reads: Var<'k, u32>,
    fills: Var<'k, u32>,
}

/// What a slot holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    Keys,
    Values,
}

impl<'c, 'k> Many<'c, 'k> {
    fn new(cta: &'c Cta<'k>, work: &'c Work<'k>, first_row: Value<'k, u32>) -> Self {
        let (k, layout, item) = (cta.k, &cta.layout, &work.item);
        let entries = cta.at(layout.many.entries);
        let copier = |format: RowFormat, table: usize| {
            let entries = entries.plus(table * KV_TOKENS * 4);
            Copier::new(cta, (k.thread(), 128), (format, KV_TOKENS), entries)
        };
        Self {
            cta,
            work,
            k,
            first_row,
            count: ((item.kv_end - item.kv_begin + (KV_TOKENS - 1) as u32) / KV_TOKENS as u32).named("tiles"),
            rows: Rows::new(cta),
            tiles: (0..layout.row_tiles).map(|_| RowTile::new(cta)).collect(),
            places: LanePlaces::new(k, layout),
            q: cta.at::<u32>(layout.many.q).byte(k.warp_index() * (16 * layout.q.stride) as u32),
            seen: cta.at(layout.many.seen),
            finder: Finder::new((cta, work), (k.thread(), KV_TOKENS), entries),
            keys: copier(layout.k, 0),
            values: copier(layout.v, 1),
            reads: k.var("reads", 0),
            fills: k.var("fills", 0),
        }
    }

    /// The first row of this warp's tile `at`: those of all warps lie side by side.
    fn row_of_tile(&self, at: usize) -> Value<'k, u32> {
        self.k.warp_index() * 16 + 64 * at as u32
    }

    fn first_key(&self, tile: Value<'k, u32>) -> Value<'k, u32> {
        self.work.item.kv_begin + tile * KV_TOKENS as u32
    }

    /// Which of the two tables of entries is that of a tile, in bytes.
    fn table(&self, tile: Value<'k, u32>) -> Value<'k, u32> {
        (tile & 1) * (2 * KV_TOKENS * 16) as u32
    }

    /// Starts the first copies.
    fn begin(&self) {
        let (k, zero) = (self.k, self.k.constant(0_u32));
        let rows = 64 * self.cta.layout.row_tiles;
        self.finder.ask(self.first_key(zero));
        self.rows.fill(self.cta, self.work, (self.first_row, rows));
        copy_queries(self.cta, self.work, (self.first_row, rows), self.cta.at(self.cta.layout.many.q));
        self.find(zero);
        for load in 0..self.cta.layout.many.num_slots - 1 {
            if load % 2 == 0 {
                // entries, and the table of rows, are there
                k.sync_threads();
            }
            self.load(zero, load);
        }
    }

    /// Writes the entries of a tile whose pages were asked for, and asks for those of the next.
    fn find(&self, tile: Value<'k, u32>) {
        self.finder.write(self.first_key(tile), self.table(tile));
        self.finder.ask(self.first_key(tile + 1));
    }

    /// Starts the `ahead`th copy from the keys of `tile` on.
    fn load(&self, tile: Value<'k, u32>, ahead: usize) {
        let (k, many) = (self.k, &self.cta.layout.many);
        let half = if ahead % 2 == 0 { Half::Keys } else { Half::Values };
        let tile = tile + (ahead / 2) as u32;
        k.when(tile.lt(self.count), || {
            let slot = self.cta.at::<u32>(many.slots).byte(self.fills.get());
            let copier = if half == Half::Keys { &self.keys } else { &self.values };
            copier.copy(slot, self.table(tile));
            if half == Half::Keys {
                self.find(tile + 1);
            }
        });
        k.commit_copies();
        self.advance(self.fills);
    }

    fn advance(&self, slot: Var<'k, u32>) {
        let many = &self.cta.layout.many;
        let next = slot.get() + many.slot_bytes as u32;
        slot.set(next.unless(next.eq((many.num_slots * many.slot_bytes) as u32), 0));
    }

    /// Waits for the slot that is read next, and starts to fill the one before it.
    fn next_slot(&self, tile: Value<'k, u32>, ahead: usize) -> Shared<'k, u32> {
        let many = &self.cta.layout.many;
        self.k.wait_copies(many.num_slots - 2);
        self.k.sync_threads();
        self.load(tile, ahead + many.num_slots - 1);
        let slot = self.cta.at::<u32>(many.slots).byte(self.reads.get());
        self.advance(self.reads);
        slot
    }

    fn attend(&self) {
        let k = self.k;
        let plain = self.rows.plain(self.cta, self.work);
        k.repeat((0, self.count), 1, |tile| {
            let masked = self.is_masked(plain, tile);
            k.when(masked, || self.find_seen(tile));
            let keys = self.next_slot(tile, 0);
            let logits: Vec<Vec<Sums<'k>>> =
                self.tiles.iter().map(|_| (0..KV_TOKENS / 8).map(|_| self.unset()).collect()).collect();
            let query = |tile: usize, step: usize| {
                let rows = self.q.plus(tile * 16 * self.cta.layout.q.stride);
                self.places.query(self.cta, rows, step)
            };
            self.places.multiply_keys(self.cta, query, keys, &logits);
            k.when(masked, || self.hide(&logits));
            let weighed = self.tiles.iter().zip(&logits);
            let weighed = weighed.map(|(tile, logits)| tile.weigh(self.cta, self.work.scale, logits));
            let (weights, factors): (Vec<_>, Vec<_>) = weighed.unzip();
            let values = self.next_slot(tile, 1);
            self.tiles.iter().zip(factors).for_each(|(tile, factors)| tile.rescale(factors));
            self.places.weigh_values(self.cta, &weights, values, &self.tiles);
        });
        k.wait_copies(0);
    }

    fn unset(&self) -> Sums<'k> {
        std::array::from_fn(|_| self.k.unset_var("s"))
    }

    /// Whether some row does not see all of a KV tile.
    fn is_masked(&self, plain: Plain<'k>, tile: Value<'k, u32>) -> Value<'k, bool> {
        let first = self.first_key(tile).reinterpret::<i32>();
        first.lt(plain.from) | (first + KV_TOKENS as i32).gt(plain.to)
    }

    /// Finds what this thread's row sees of a tile; to be read behind a barrier.
    fn find_seen(&self, tile: Value<'k, u32>) {
        let (k, thread) = (self.k, self.k.thread());
        k.when(thread.lt(64 * self.cta.layout.row_tiles as u32), || {
            let row = (self.first_row + thread).min(self.work.rows - 1);
            let keys = Keys { first: self.first_key(tile), width: KV_TOKENS as u32 };
            let word = seen((self.cta, self.work), row, self.rows.range(thread), keys);
            self.seen.at(thread).store(word);
        });
    }

    fn hide(&self, logits: &[Vec<Sums<'k>>]) {
        for (at, logits) in logits.iter().enumerate() {
            let row = self.row_of_tile(at) + (self.k.lane() >> 2);
            let words = [0, 8].map(|down| self.seen.at(row).plus(down).load());
            hide(self.k, words, logits);
        }
    }
}
