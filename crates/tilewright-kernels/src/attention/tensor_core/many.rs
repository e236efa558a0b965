//! Split-Q body, for items of more than 16 query rows (prefill): 64 or 128 rows at once, 16 or 32 per warp, against KV tiles of
//! 64 keys.
//!
//! ```text
//! ring     K of tile 0, V of tile 0, K of tile 1, ..  one stage each, copied `num_stages - 1` stages ahead
//! for each KV tile:
//!     wait for K    S = Q · Kᵀ, masked to -inf, P = 2^((S - max) · scale);
//!                   where a maximum is new, O = O · 2^((old max - max) · scale)
//!     wait for V    O = O + P · V
//! ```
//!
//! Each wait ends with a CTA barrier. After it all copies of the stage have arrived, and all threads have read the previous
//! stage, which is overwritten next.

use super::{
    config::KV_TOKENS,
    cta::{Cta, Work, divide},
    factors::Factors,
    fragments::{Cell, LanePlaces, RowTile, Sums, hide},
    hooked::Hooked,
    keys::{Copier, Finder, copy_queries},
    layout::RowFormat,
    output::store_tile,
    rows::Rows,
    seen::{Keys, seen},
    softmax, special,
    wide::{Half, Wide},
};
use tilewright_ptx::build::{Builder, Shared, Value, Var};

/// Executes an item, one tile of rows after the other.
pub(super) fn run<'k>(cta: &Cta<'k>, work: &Work<'k>, hooks: &Hooked<'k, '_>) {
    let (k, rows) = (cta.k, 64 * cta.layout.row_tiles as u32);
    k.when(k.thread().eq(0), || work.first_row().store(0_u32));
    k.sync_threads();
    k.forever(|| {
        let body = Many::new(cta, work, hooks);
        body.begin();
        body.attend();
        let first = work.first_row().load();
        for (at, tile) in body.tiles.iter().enumerate() {
            store_tile((cta, work, hooks), tile, (first, body.row_of_tile(at)));
        }
        // the next tile overwrites the queries
        k.sync_threads();
        k.leave_when((first + rows).ge(work.rows()));
        k.when(k.thread().eq(0), || work.first_row().store(first + rows));
        k.sync_threads();
    });
}

/// Offset of [`SplitQBody::nonfinite_warps`] in the control words.
const SPECIAL: usize = 96;

struct Many<'c, 'k> {
    cta: &'c Cta<'k>,
    work: &'c Work<'k>,
    hooks: &'c Hooked<'k, 'c>,
    k: &'k Builder,
    rows: Rows<'k>,
    tiles: Vec<RowTile<'k>>,
    places: LanePlaces<'k>,
    q: Shared<'k, u32>,
    seen: Shared<'k, u64>,
    finder: Finder<'k>,
    keys: Copier<'k>,
    values: Copier<'k>,
    wide: Wide<'k>,
    factors: Factors<'k>,
    /// Byte offset of the next stage to write; the stage after it is the next to read.
    fills: Var<'k, u32>,
}

fn keys_of(first: Value<'_, u32>) -> Keys<'_> {
    Keys { first, width: KV_TOKENS as u32 }
}

impl<'c, 'k> Many<'c, 'k> {
    fn new(cta: &'c Cta<'k>, work: &'c Work<'k>, hooks: &'c Hooked<'k, 'c>) -> Self {
        let (k, layout) = (cta.k, &cta.layout);
        let entries = cta.at(layout.many.entries);
        let copier = |format: RowFormat, table: usize| {
            let entries = entries.plus(table * KV_TOKENS * 4);
            Copier::new(cta, (k.thread(), 128), (format, KV_TOKENS), entries)
        };
        let sums = cta.at::<f32>(layout.many.sums).at(k.thread() << 2);
        let tile = |at: usize| RowTile::new(cta, [0, 1].map(|half| Cell::Memory(sums.plus(2 * at + half))));
        Self {
            cta,
            work,
            hooks,
            k,
            rows: Rows::new(cta),
            tiles: (0..layout.row_tiles).map(tile).collect(),
            places: LanePlaces::new(k, layout),
            q: cta.at::<u32>(layout.many.q).byte(k.warp_index() * (16 * layout.q.stride) as u32),
            seen: cta.at(layout.many.seen),
            finder: Finder::new((cta, work), (k.thread(), KV_TOKENS), entries),
            keys: copier(layout.stored_k, 0),
            values: copier(layout.stored_v, 1),
            wide: Wide::new(cta, (k.thread(), 128), (cta.at(layout.many.wide), KV_TOKENS)),
            factors: Factors::new(cta, KV_TOKENS),
            fills: k.var("fills", 0),
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
        let (k, first) = (self.k, self.work.item().kv_begin);
        let (first_row, rows) = (self.work.first_row().load(), 64 * self.cta.layout.row_tiles);
        self.finder.ask(first);
        self.rows.fill(self.cta, self.work, (first_row, rows));
        self.hooks.fill(self.cta, self.work, (first_row, rows));
        let (q, to) = (&self.cta.params.q, self.cta.at(self.cta.layout.many.q));
        copy_queries((self.cta, self.work), (first_row, rows), (q, self.cta.layout.q), to);
        self.find(first);
        for load in 0..self.cta.layout.many.num_slots - 1 {
            if load.is_multiple_of(2) {
                // the entries and the row table are written
                k.sync_threads();
            }
            self.load(first, load);
        }
    }

    /// Writes the entries of the tile at `first`, and prefetches the pages of the next tile.
    fn find(&self, first: Value<'k, u32>) {
        self.finder.write(first, self.table(first));
        self.finder.ask(first + KV_TOKENS as u32);
    }

    /// Starts copy `ahead`, counted from the keys of the tile at `first`.
    fn load(&self, first: Value<'k, u32>, ahead: usize) {
        let (k, many) = (self.k, &self.cta.layout.many);
        let half = if ahead.is_multiple_of(2) { Half::Keys } else { Half::Values };
        let first = first + (ahead / 2 * KV_TOKENS) as u32;
        k.when(first.lt(self.work.kv_end), || {
            let slot = self.cta.at::<u32>(many.slots).byte(self.fills.get());
            let copier = if half == Half::Keys { &self.keys } else { &self.values };
            if half == Half::Keys {
                // into the other table, and before the copies, which loads from shared memory cannot pass
                self.find(first + KV_TOKENS as u32);
                let entries = self.cta.at::<u32>(many.entries).byte(self.table(first));
                self.factors.bring(k.thread(), entries, slot.plus(many.factors / 4));
            }
            copier.copy(slot, self.table(first));
        });
        k.commit_copies();
        self.fills.set(self.next(self.fills.get()));
    }

    /// The stage after `stage`.
    fn next(&self, slot: Value<'k, u32>) -> Value<'k, u32> {
        let many = &self.cta.layout.many;
        let next = slot + many.slot_bytes as u32;
        next.unless(next.eq((many.num_slots * many.slot_bytes) as u32), 0)
    }

    /// Waits for the next stage and starts to overwrite the previous one. Returns the MMA operand and the stage. `inspect` is
    /// called once this thread's own copies have arrived.
    fn next_slot(
        &self,
        first: Value<'k, u32>,
        half: Half,
        look: impl FnOnce(Shared<'k, u32>),
    ) -> [Shared<'k, u32>; 2] {
        let many = &self.cta.layout.many;
        let slots = self.cta.at::<u32>(many.slots);
        self.k.wait_copies(many.num_slots - 2);
        let arrived = self.wide.arrived(half, slots.byte(self.next(self.fills.get())));
        look(arrived);
        self.k.sync_threads();
        self.load(first, usize::from(half == Half::Values) + many.num_slots - 1);
        let slot = slots.byte(self.fills.get());
        [if self.cta.kv.size() == 1 { arrived } else { slot }, slot]
    }

    fn attend(&self) {
        self.rows.find_plain(self.cta, self.work);
        self.work.for_each_tile(KV_TOKENS, |first| self.attend_tile(first));
        self.k.wait_copies(0);
    }

    /// Processes the KV tile at key `first`.
    fn attend_tile(&self, first: Value<'k, u32>) {
        let k = self.k;
        let masked = self.hooks.is_masked(self.rows.is_masked(first, KV_TOKENS));
        k.when(masked, || self.find_seen(first));
        let [keys, slot] = self.next_slot(first, Half::Keys, |_| {});
        let logits: Vec<Vec<Sums<'k>>> =
            self.tiles.iter().map(|_| (0..KV_TOKENS / 8).map(|_| self.unset()).collect()).collect();
        let query = |tile: usize, step: usize| {
            let rows = self.q.plus(tile * 16 * self.cta.layout.q.stride);
            self.places.query(self.cta, rows, step)
        };
        self.places.multiply_keys(self.cta, query, keys, &logits);
        let factors_of_keys = slot.plus(self.cta.layout.many.factors / 4).cast::<f32>();
        self.factors.scale_keys(factors_of_keys, &logits);
        self.hooks.logits((self.cta, self.work), keys_of(first), (&|| self.row_of_tile(0), &logits));
        k.when(masked, || self.hide(&logits));
        let to = self.factors.next(factors_of_keys);
        let weights = softmax::weigh(self.cta, (&self.tiles, &logits), self.work.scale, Some(&to));
        let look = |values| k.when(masked, || self.find_special(values));
        let [values, _] = self.next_slot(first, Half::Values, look);
        k.when(masked, || self.encode_special(values));
        self.places.weigh_values(self.cta, &weights, values, &self.tiles);
        k.when(masked, || self.add_special());
    }

    fn codes(&self) -> Shared<'k, u16> {
        self.cta.at(self.cta.layout.many.codes)
    }

    /// Flags of warps that found non-finite values.
    fn special(&self) -> Shared<'k, u32> {
        self.cta.at(self.cta.layout.words + SPECIAL)
    }

    /// Detects non-finite values; the flags are valid after a barrier.
    fn find_special(&self, values: Shared<'k, u32>) {
        let k = self.k;
        let found = k.ballot(special::find(self.cta, self.wide.deal(&self.values), values));
        k.when(k.lane().eq(0), || self.special().at(k.thread() >> 5).store(found));
    }

    fn any_special(&self) -> Value<'k, bool> {
        let found = self.special().load_vector::<4>();
        (found[0] | found[1] | found[2] | found[3]).ne(0)
    }

    /// Replaces non-finite values by 0 and writes their masks.
    fn encode_special(&self, values: Shared<'k, u32>) {
        let k = self.k;
        k.when(self.any_special(), || {
            let of_values = (self.cta.layout.v, KV_TOKENS);
            special::encode(self.cta, (k.thread(), 128), of_values, (values, self.codes()));
            k.sync_threads();
        });
    }

    /// Adds the non-finite values back.
    fn add_special(&self) {
        let k = self.k;
        k.when(self.any_special(), || {
            let seen: Vec<_> = (0..self.tiles.len()).map(|at| self.seen_by(at)).collect();
            special::add(self.cta, (self.codes(), KV_TOKENS), &self.tiles, &seen);
            // the next tile overwrites the visible masks
            k.sync_threads();
        });
    }

    /// The visible masks of this thread's rows of a tile.
    fn seen_by(&self, at: usize) -> [Value<'k, u64>; 2] {
        let row = self.row_of_tile(at) + (self.k.lane() >> 2);
        [0, 8].map(|down| self.seen.at(row).plus(down).load())
    }

    fn unset(&self) -> Sums<'k> {
        std::array::from_fn(|_| self.k.unset_var("s"))
    }

    /// Computes the visible mask of this thread's row for a KV tile; valid after a barrier.
    fn find_seen(&self, first: Value<'k, u32>) {
        let (k, thread) = (self.k, self.k.thread());
        k.when(thread.lt(64 * self.cta.layout.row_tiles as u32), || {
            let item = self.work.item();
            let row = (self.work.first_row().load() + thread).min(item.qo_len * self.cta.params.group.by - 1);
            let word = seen((self.cta, &item), row, self.rows.range(thread), keys_of(first));
            let word = self.hooks.shown((self.cta, &item), thread, keys_of(first), word);
            self.seen.at(thread).store(word);
        });
    }

    fn hide(&self, logits: &[Vec<Sums<'k>>]) {
        for (at, logits) in logits.iter().enumerate() {
            hide(self.k, self.seen_by(at), logits);
        }
    }
}
