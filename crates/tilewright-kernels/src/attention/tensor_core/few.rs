//! Split-KV body, for items of at most 16 query rows (decoding): the warps divide the keys, 16 at a time, and reduce their states
//! at the end.
//!
//! ```text
//! warp w    keys 16 (4 i + w) .. + 16 for i = 0, 1, ..: K and V copied `num_stages - 1` stages ahead, by this warp alone
//!           S = Q · Kᵀ,  P = 2^((S - max) · scale)
//!           O = O · 2^((old max - max) · scale), where a maximum is new;  O = O + P · V
//! end       O = Σ_w O_w · 2^((max_w - max) · scale)
//! ```
//!
//! Decoding is memory-bound: warps run independently, without CTA barriers in the loop, to keep as many bytes in flight as
//! possible.

use super::{
    config::FEW_ROWS,
    cta::{Cta, Work, divide},
    factors::{self, Factors},
    fragments::{Cell, LanePlaces, RowTile, Sums, hide},
    hooked::Hooked,
    keys::{Copier, Finder, copy_queries},
    layout::{RowFormat, STAGE_KEYS, WARPS},
    output::{Total, store_chunk},
    rows::Rows,
    seen::{Keys, seen},
    softmax, special,
    wide::{Half, Wide},
};
use crate::tile::reduce;
use tilewright_ptx::build::{Builder, Shared, Value, Var};

/// Executes an item.
pub(super) fn run<'k>(cta: &Cta<'k>, work: &Work<'k>, hooks: &Hooked<'k, '_>) {
    let body = Few::new(cta, work, hooks);
    let query = body.begin();
    body.attend(&query);
    body.end();
}

struct Few<'c, 'k> {
    cta: &'c Cta<'k>,
    work: &'c Work<'k>,
    hooks: &'c Hooked<'k, 'c>,
    k: &'k Builder,
    warp: Value<'k, u32>,
    kv_begin: Value<'k, u32>,
    /// Number of this warp's stages.
    count: Value<'k, u32>,
    rows: Rows<'k>,
    tile: RowTile<'k>,
    places: LanePlaces<'k>,
    ring: Shared<'k, u32>,
    finder: Finder<'k>,
    keys: Copier<'k>,
    values: Copier<'k>,
    wide: Wide<'k>,
    /// Entries of this warp's keys and values.
    entries: Shared<'k, u32>,
    factors: Factors<'k>,
    /// Byte offsets of the next stage to read and the next stage to write.
    reads: Var<'k, u32>,
    fills: Var<'k, u32>,
}

impl<'c, 'k> Few<'c, 'k> {
    fn new(cta: &'c Cta<'k>, work: &'c Work<'k>, hooks: &'c Hooked<'k, 'c>) -> Self {
        let (k, layout, item, warp) = (cta.k, &cta.layout, work.item(), cta.k.warp_index());
        let entries = cta.at::<u32>(layout.few.entries).byte(warp * (2 * STAGE_KEYS * 16) as u32);
        let copier = |format: RowFormat, table: usize| {
            let entries = entries.plus(table * STAGE_KEYS * 4);
            Copier::new(cta, (k.lane(), 32), (format, STAGE_KEYS), entries)
        };
        let groups = divide(item.kv_end - item.kv_begin + (STAGE_KEYS - 1) as u32, STAGE_KEYS).0;
        Self {
            cta,
            work,
            hooks,
            k,
            warp,
            kv_begin: item.kv_begin,
            count: divide(groups + (WARPS - 1) as u32 - warp, WARPS).0.named("stages"),
            rows: Rows::new(cta),
            tile: RowTile::new(cta, [0, 1].map(|_| Cell::Register(k.unset_var("sum")))),
            places: LanePlaces::new(k, layout),
            ring: cta.at::<u32>(layout.few.rings).byte(warp * layout.few.ring_bytes as u32),
            finder: Finder::new((cta, work), (k.lane(), STAGE_KEYS), entries),
            keys: copier(layout.stored_k, 0),
            values: copier(layout.stored_v, 1),
            wide: Wide::new(
                cta,
                (k.lane(), 32),
                (cta.at(layout.few.wide).byte(warp * layout.few.wide_bytes as u32), STAGE_KEYS),
            ),
            factors: Factors::new(cta, STAGE_KEYS),
            entries,
            reads: k.var("reads", 0),
            fills: k.var("fills", 0),
        }
    }

    fn first_key(&self, stage: Value<'k, u32>) -> Value<'k, u32> {
        self.kv_begin + (stage * WARPS as u32 + self.warp) * STAGE_KEYS as u32
    }

    /// Starts the first copies; returns the query fragments, one per step of 16 elements.
    fn begin(&self) -> Vec<[Value<'k, u32>; 4]> {
        let (k, zero, layout) = (self.k, self.k.constant(0_u32), &self.cta.layout);
        let q = self.cta.at(layout.few.q);
        self.finder.ask(self.first_key(zero));
        copy_queries((self.cta, self.work), (zero, FEW_ROWS), (&self.cta.params.q, layout.q), q);
        k.commit_copies();
        self.rows.fill(self.cta, self.work, (zero, FEW_ROWS));
        self.hooks.fill(self.cta, self.work, (zero, FEW_ROWS));
        for stage in 0..layout.few.num_stages - 1 {
            k.sync_warp();
            self.load(k.constant(stage as u32));
        }
        k.wait_copies(layout.few.num_stages - 1);
        k.sync_threads();
        self.rows.find_plain(self.cta, self.work);
        (0..layout.q.steps()).map(|step| self.places.query(self.cta, q, step)).collect()
    }

    /// Starts the copies of a stage, whose pages were prefetched.
    fn load(&self, stage: Value<'k, u32>) {
        let (k, few) = (self.k, &self.cta.layout.few);
        k.when(stage.lt(self.count), || {
            let table = k.constant(0);
            self.finder.write(self.first_key(stage), table);
            self.finder.ask(self.first_key(stage + 1));
            k.sync_warp();
            let keys = self.ring.byte(self.fills.get());
            self.keys.copy(keys, table);
            self.values.copy(self.values_of(keys), table);
            self.factors.bring(k.lane(), self.entries, keys.plus(few.factors / 4));
        });
        k.commit_copies();
        self.advance(self.fills, few.stage_bytes);
    }

    fn values_of(&self, keys: Shared<'k, u32>) -> Shared<'k, u32> {
        keys.plus(STAGE_KEYS * self.cta.layout.stored_k.stride / 4)
    }

    fn advance(&self, stage: Var<'k, u32>, bytes: usize) {
        let next = stage.get() + bytes as u32;
        stage.set(next.unless(next.eq((self.cta.layout.few.num_stages * bytes) as u32), 0));
    }

    fn attend(&self, query: &[[Value<'k, u32>; 4]]) {
        let (k, few) = (self.k, &self.cta.layout.few);
        k.repeat((0, self.count), 1, |stage| {
            k.wait_copies(few.num_stages - 2);
            // the copies of all lanes have arrived, and all lanes have read the stage that is overwritten next
            k.sync_warp();
            self.load(stage + (few.num_stages - 1) as u32);
            let stored = self.ring.byte(self.reads.get());
            self.advance(self.reads, few.stage_bytes);
            let keys = self.wide.arrived(Half::Keys, stored);
            let logits = vec![vec![self.unset(), self.unset()]];
            self.places.multiply_keys(self.cta, |_, step| query[step], keys, &logits);
            let factors_of_keys = stored.plus(few.factors / 4).cast::<f32>();
            self.factors.scale_keys(factors_of_keys, &logits);
            let of_stage = self.keys_of(stage);
            self.hooks.logits((self.cta, self.work), of_stage, (&|| k.constant(0), &logits));
            let masked = self.hooks.is_masked(self.rows.is_masked(of_stage.first, STAGE_KEYS));
            let values = self.wide.arrived(Half::Values, self.values_of(stored));
            let special = k.var::<bool>("special", false);
            let seen = [0, 8].map(|_| k.var::<u32>("seen", 0));
            k.when(masked, || {
                self.find_seen(stage, seen);
                hide(k, seen.map(|word| word.get().to_u64()), &logits[0]);
                special.set(k.any(special::find(self.cta, self.wide.deal(&self.values), values)));
            });
            let of_values = (self.cta.layout.v, STAGE_KEYS);
            k.when(special.get(), || {
                special::encode(self.cta, (k.lane(), 32), of_values, (values, self.codes()));
                k.sync_warp();
            });
            let to = self.factors.next(factors_of_keys);
            let tiles = std::slice::from_ref(&self.tile);
            let weights = softmax::weigh(self.cta, (tiles, &logits), self.work.scale, Some(&to));
            self.places.weigh_values(self.cta, &weights, values, tiles);
            k.when(special.get(), || {
                special::add(
                    self.cta,
                    (self.codes(), STAGE_KEYS),
                    tiles,
                    &[seen.map(|word| word.get().to_u64())],
                );
            });
        });
        k.wait_copies(0);
    }

    fn keys_of(&self, stage: Value<'k, u32>) -> Keys<'k> {
        Keys { first: self.first_key(stage), width: STAGE_KEYS as u32 }
    }

    fn unset(&self) -> Sums<'k> {
        std::array::from_fn(|_| self.k.unset_var("s"))
    }

    /// Computes the visible masks of this lane's two rows for a stage: each lane computes the mask of one row, then they are
    /// shuffled.
    fn find_seen(&self, stage: Value<'k, u32>, words: [Var<'k, u32>; 2]) {
        let k = self.k;
        let row = k.lane() & (FEW_ROWS - 1) as u32;
        let keys = self.keys_of(stage);
        let item = self.work.item();
        let of_row = row.min(item.qo_len * self.cta.params.group.by - 1);
        let word = seen((self.cta, &item), of_row, self.rows.range(row), keys);
        let word = self.hooks.shown((self.cta, &item), row, keys, word).low();
        let own = k.lane() >> 2;
        words[0].set(word.of_lane(own));
        words[1].set(word.of_lane(own + 8));
    }

    /// The nonfinite masks of this warp's values.
    fn codes(&self) -> Shared<'k, u16> {
        let bytes = STAGE_KEYS * self.cta.layout.v.chunks * 2;
        self.cta.at::<u32>(self.cta.layout.few.codes).byte(self.warp * bytes as u32).cast()
    }

    /// Reduces the states of all warps and writes the result.
    fn end(&self) {
        let (k, few, lane) = (self.k, &self.cta.layout.few, self.k.lane());
        let (states, rows) = (self.cta.at::<f32>(few.entries), self.work.rows());
        // the states overwrite the key entries
        k.sync_threads();
        for half in 0..2 {
            let row = (lane >> 2) + 8 * half as u32;
            let sum = reduce::quad_sum(self.tile.sum[half].get());
            let pair = [self.tile.max[half].get() * self.work.scale, sum];
            k.when((lane & 3).eq(0), || {
                states.at((self.warp * FEW_ROWS as u32 + row) << 1).store_vector(pair);
            });
            let to = self.ring.cast::<f32>().at(row * few.sums_stride as u32 + ((lane & 3) << 1));
            k.when(row.lt(rows), || {
                for (at, o) in self.tile.o.iter().enumerate() {
                    to.plus(8 * at).store_vector([o[2 * half].get(), o[2 * half + 1].get()]);
                }
            });
        }
        k.sync_threads();
        let chunks = self.cta.layout.v.dim / 4;
        k.repeat((k.thread(), rows * chunks as u32), 128, |at| {
            let (row, chunk) = divide(at, chunks);
            let (values, total) = self.together(states, row, chunk);
            store_chunk((self.cta, self.work, self.hooks), (row, chunk), values, total);
        });
    }

    /// Four adjacent elements of a row, reduced over warps.
    fn together(
        &self,
        states: Shared<'k, f32>,
        row: Value<'k, u32>,
        chunk: Value<'k, u32>,
    ) -> ([Value<'k, f32>; 4], Total<'k>) {
        let (k, few) = (self.k, &self.cta.layout.few);
        let of_warp = |warp: usize| states.at(row << 1).plus(2 * warp * FEW_ROWS).load_vector::<2>();
        let state: Vec<_> = (0..WARPS).map(of_warp).collect();
        let max = state.iter().fold(k.constant(f32::NEG_INFINITY), |max, [of_warp, _]| max.max(*of_warp));
        let reference = max.unless(max.eq(f32::NEG_INFINITY), 0.0);
        let rings = self.cta.at::<f32>(few.rings).at(row * few.sums_stride as u32 + (chunk << 2));
        let (mut sum, mut values) = (k.constant(0.0), [k.constant(0.0); 4]);
        for (warp, [max_of_warp, sum_of_warp]) in state.into_iter().enumerate() {
            let factor = (max_of_warp - reference).exp2();
            sum = sum_of_warp.mul_add(factor, sum);
            let of_warp = rings.plus(warp * few.ring_bytes / 4).load_vector::<4>();
            let of_values = factors::reference(self.cta, k.constant(warp as u32));
            let factor = of_values.map_or(factor, |of_values| factor * of_values);
            values = std::array::from_fn(|i| of_warp[i].mul_add(factor, values[i]));
        }
        (values, Total::new(reference, sum))
    }
}
