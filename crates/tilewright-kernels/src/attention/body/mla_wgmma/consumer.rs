//! A consumer warpgroup: its state, the items of the CTA, and its products.

use super::{
    CONSUMERS, MlaWgmmaCta, ONE_CONSUMER,
    config::{KEYS, PANEL, REGISTER_PANELS},
    producer::PRESENT,
};
use crate::{
    attention::kernel::{
        cta::CurrentItem,
        fragments::{AccFragment, RowTile, ThreadScalar},
        row_hooks::RowHooks,
        row_table::RowTable,
    },
    tile::{SharedTile, release_from_warp},
};
use tilewright_ptx::{
    build::{Builder, Shared, Value, Var, WgmmaLeft, WgmmaOperands},
    isa::matrix::Major,
};

/// Registers per thread.
const REGISTERS: u32 = 232;

/// A consumer warpgroup. The registers of its current item are `Var`s.
pub(super) struct MlaConsumer<'c, 'k> {
    pub(super) shared: &'c MlaWgmmaCta<'k>,
    pub(super) hooks: &'c RowHooks<'k, 'c>,
    pub(super) k: &'k Builder,
    /// 0, the leader, or 1, the follower.
    pub(super) number: Value<'k, u32>,
    /// Fragments of the last panels of the queries, without the last one, which is in shared memory for lack of registers.
    queries: Vec<[Var<'k, u32>; 4]>,
    pub(super) logits: Vec<AccFragment<'k>>,
    /// Four words per 16 keys.
    pub(super) weights: Vec<Var<'k, u32>>,
    /// Accumulators of this consumer's half of the elements, and references of the logits.
    pub(super) state: RowTile<'k>,
    pub(super) rows: RowTable<'k>,
    /// Tiles consumed so far.
    pub(super) count: Var<'k, u32>,
}

impl<'c, 'k> MlaConsumer<'c, 'k> {
    pub(super) fn new(shared: &'c MlaWgmmaCta<'k>, hooks: &'c RowHooks<'k, 'c>) -> Self {
        let (k, config) = (shared.k, &shared.config);
        k.setmaxnreg_inc(REGISTERS);
        // all sums are in shared memory
        let sum = [0, 1].map(|_| ThreadScalar::Register(k.var("sum", 0.0)));
        let fragment = |_| std::array::from_fn(|_| k.unset_var("s"));
        Self {
            shared,
            hooks,
            k,
            number: (k.thread() >> 7).of_lane(0).named("consumer"),
            queries: (1..REGISTER_PANELS * PANEL / 16).map(|_| [0; 4].map(|_| k.unset_var("q"))).collect(),
            logits: (0..KEYS / 8).map(fragment).collect(),
            weights: (0..KEYS / 4).map(|_| k.unset_var("p")).collect(),
            state: RowTile::of_columns(&shared.cta, config.half() / 16, sum),
            rows: RowTable::new(&shared.cta),
            count: k.var("tiles_consumed", 0),
        }
    }

    /// Processes the items of this CTA.
    pub(super) fn run(&self) {
        let (k, shared) = (self.k, self.shared);
        let (items, scale) = (k.var("items", 0), k.var("scale_of_item", 0.0));
        self.begin_exchange();
        k.loop_(|| {
            let n = items.get();
            shared.items.wait_full(n);
            let words = shared.item_words(n);
            k.break_if(words.plus(PRESENT).load().eq(0));
            let current = CurrentItem::new(&shared.cta, self.hooks, words, scale);
            self.begin(&current);
            shared.queries.wait_full(n);
            self.load_queries();
            // weights overwrite the queries that are in registers
            shared.cta.sync();
            self.attend(&current);
            let pair = self.store(&current);
            release_from_warp(k, shared.queries.empty(n));
            k.when_else(
                pair.is_pair(),
                || k.when(pair.is_first, || pair.arrive(&shared.cta)),
                || shared.cta.arrive_and_merge(&current, self.hooks),
            );
            release_from_warp(k, shared.items.empty(n));
            items.set(n + 1);
        });
        self.end_exchange();
    }

    /// Computes the ranges of keys that the rows see, and resets the state.
    fn begin(&self, current: &CurrentItem<'k>) {
        let (cta, first) = (&self.shared.cta, self.shared.first_row());
        // the ranges and the merges of the previous item have been read
        cta.sync();
        cta.fetch_merges(current);
        self.k.when(self.k.thread().lt(128), || {
            self.rows.fill(cta, current, first, super::Q_ROWS);
        });
        cta.sync();
        self.rows.compute_unmasked_range(cta, current);
        self.sums(self.k.thread()).store_vector([self.k.constant(0.0_f32); 4]);
        self.state.max.iter().for_each(|max| max.set(f32::NEG_INFINITY));
        self.state.o.iter().flatten().for_each(|o| o.set(0.0));
    }

    /// The first and the end of the keys that all rows see, loaded at the point of use to reduce register pressure.
    pub(super) fn unmasked(&self) -> [Value<'k, i32>; 2] {
        self.rows.unmasked_range().map(|at| at.of_lane(0))
    }

    /// The first row of this warp in the tile.
    pub(super) fn first_row(&self) -> Value<'k, u32> {
        ((self.k.thread() >> 5) & 3) << 4
    }

    /// Loads the last panels of the queries into registers.
    fn load_queries(&self) {
        let (k, panels) = (self.k, self.shared.config.panels());
        let tile = self.shared.q.panels(panels - REGISTER_PANELS..panels);
        let row = self.first_row() + (k.lane() & 15);
        let load =
            |step: usize| k.load_matrix::<4, _>(tile.chunk(row, (k.lane() >> 4) + 2 * step as u32), false);
        for (step, fragment) in self.queries.iter().enumerate() {
            fragment.iter().zip(load(step)).for_each(|(to, word)| to.set(word));
        }
        // that of the other consumer is the same
        k.when(self.number.eq(0), || self.last_fragment().store_vector(load(self.queries.len())));
    }

    /// The last fragment of the queries of this thread.
    fn last_fragment(&self) -> Shared<'k, u32> {
        let thread = self.k.thread() & (CONSUMERS / 2 - 1);
        self.shared.cta.at::<u32>(self.shared.arena.last_fragment).at(thread << 2)
    }

    /// A fragment of the queries, by its step in the last panels; `last` is the last one.
    fn query_operand(&self, step: usize, last: Option<[Value<'k, u32>; 4]>) -> WgmmaLeft<'k> {
        let fragment = self.queries.get(step).map(|words| words.map(|word| word.get()));
        WgmmaLeft::Registers(fragment.or(last).unwrap_or([self.k.constant(0); 4]))
    }

    /// Starts `S = Q · Kᵀ` of tile `n`, as its panels arrive.
    pub(super) fn multiply_keys(&self, n: Value<'k, u32>) {
        let (k, shared) = (self.k, self.shared);
        let keys = shared.stage(n.of_lane(0)).rows_descriptor();
        let q = shared.q.from_row(self.uniform_zero()).rows_descriptor();
        let logits: Vec<_> = self.logits.iter().flatten().copied().collect();
        let in_memory = shared.config.panels() - REGISTER_PANELS;
        for half in 0..2 {
            for (at, panels) in shared.config.barrier_panels(half).into_iter().enumerate() {
                shared.full(n, half, at).wait(MlaWgmmaCta::parity(n));
                let last = (panels.end == shared.config.panels()).then(|| self.last_fragment().load_vector());
                k.wgmma_fence();
                for step in panels.flat_map(|panel| 4 * panel..4 * panel + 4) {
                    let left = match step.checked_sub(4 * in_memory) {
                        None => WgmmaLeft::Shared(q.depth_step(step), Major::K),
                        Some(at) => self.query_operand(at, last),
                    };
                    let (elements, right) = (self.shared.cta.elements, keys.depth_step(step));
                    let operands = WgmmaOperands { elements, left, right, right_major: Major::K };
                    k.wgmma(&logits, operands, step > 0);
                }
            }
        }
        k.wgmma_commit();
    }

    /// Starts `O += P · V` of tile `n` and half `half`, with this consumer's weights, in registers, or with those of the other one.
    pub(super) fn multiply_values(&self, n: Value<'k, u32>, half: usize, of_other: bool) {
        let k = self.k;
        let values = self.values(n.of_lane(0), half).columns_descriptor();
        let weights = self.shared.weights(1 - half).from_row(self.uniform_zero()).rows_descriptor();
        let o: Vec<_> = self.state.o.iter().flatten().copied().collect();
        k.wgmma_fence();
        for step in 0..KEYS / 16 {
            let left = match of_other {
                true => WgmmaLeft::Shared(weights.depth_step(step), Major::K),
                false => WgmmaLeft::Registers(std::array::from_fn(|i| self.weights[4 * step + i].get())),
            };
            let (elements, right) = (self.shared.cta.elements, values.row_step(step));
            let operands = WgmmaOperands { elements, left, right, right_major: Major::Mn };
            k.wgmma(&o, operands, true);
        }
        k.wgmma_commit();
    }

    /// 0 that the assembler does not know. It would keep descriptors in registers from one tile to the next, and addresses from one
    /// item to the next.
    pub(super) fn uniform_zero(&self) -> Value<'k, u32> {
        (self.number >> 1).of_lane(0)
    }

    pub(super) fn values(&self, n: Value<'k, u32>, half: usize) -> SharedTile<'k> {
        let middle = self.shared.config.value_panels() / 2;
        self.shared.stage(n).panels(middle * half..middle * (half + 1))
    }

    /// One thread of the warpgroup releases a half of tile `n`, or one for each CTA of the item.
    pub(super) fn release(&self, n: Value<'k, u32>, half: usize) {
        let (k, empty, ctas) = (self.k, self.shared.empty(n, half), self.shared.cta.ctas_per_item);
        let thread = k.thread() & 127;
        k.when(thread.lt(ctas), || if ctas > 1 { empty.arrive_in_cta(thread) } else { empty.arrive() });
    }

    /// Barrier of consumer `half`.
    pub(super) fn sync(&self, half: usize) {
        self.k.sync_named(ONE_CONSUMER + half as u32, CONSUMERS / 2);
    }
}
