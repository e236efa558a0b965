//! A consumer warpgroup: logits, weights and outputs of 64 rows of each item.

use super::{CAREFUL, CONSUMER_WARPS, EXPONENTIALS, Masked, PRESENT, WgmmaCta};
use crate::{
    attention::{
        items::NONE,
        kernel::{AccFragment, CurrentItem, F16Factor, RowHooks, RowTile, ThreadScalar, TileLogits},
    },
    tile::{Cursor, SharedTile, release_from_warp},
};
use tilewright::{Dtype, attention::variant::Hook};
use tilewright_ptx::{Builder, Elements, Major, Shared, Value, Var, WgmmaLeft, WgmmaOperands};

/// Threads that process items.
const THREADS: u32 = super::CONSUMERS;

/// A consumer warpgroup. The registers of its current item are `Var`s.
pub(super) struct Consumer<'c, 'k> {
    pub(super) shared: &'c WgmmaCta<'k>,
    pub(super) hooks: &'c RowHooks<'k, 'c>,
    pub(super) k: &'k Builder,
    /// 0 or 1.
    pub(super) number: Value<'k, u32>,
    /// Fragments of the queries in registers, one per step.
    queries: Vec<[Var<'k, u32>; 4]>,
    /// Factors of the logits of both rows, if queries are converted to f16.
    row_factors: Option<[Var<'k, f32>; 2]>,
    pub(super) logits: Vec<AccFragment<'k>>,
    /// Logits of the next tile, if they are computed beside the exponentials of this one.
    pub(super) next_logits: Vec<AccFragment<'k>>,
    /// Four words per 16 keys, or per 32 if products have 8 bits.
    pub(super) weights: Vec<Var<'k, u32>>,
    /// Accumulators, references of the logits, and sums of weights.
    pub(super) state: RowTile<'k>,
    pub(super) sum: [Var<'k, f32>; 2],
    /// Sums of the rounding errors of the largest weights.
    pub(super) error: [Var<'k, f32>; 2],
    /// The first and the end of the KV tiles that all rows of the item see in full.
    pub(super) unmasked: [Var<'k, u32>; 2],
    /// Visible masks that the producers compute, and the first KV tile of the item that is masked by them.
    pub(super) masks: Option<(Cursor<'k>, Var<'k, u32>)>,
    /// The first KV tile of the item, which is processed last.
    pub(super) first_tile: Var<'k, u32>,
    /// The KV tile whose products replace the accumulators, or [`NONE`]. Without it, they are zeroed before each item.
    replacing_tile: Option<Var<'k, u32>>,
    /// One past the last KV tile that this CTA's rows see, if the other CTA of a pair has rows of the item, too.
    pub(super) seen_end: Option<Var<'k, u32>>,
    /// Whether the item is processed again, because outputs were not finite.
    pub(super) careful: Var<'k, u32>,
    pub(super) keys: Cursor<'k>,
    pub(super) values: Cursor<'k>,
}

impl<'c, 'k> Consumer<'c, 'k> {
    pub(super) fn new(shared: &'c WgmmaCta<'k>, hooks: &'c RowHooks<'k, 'c>) -> Self {
        let (k, config) = (shared.k, &shared.config);
        k.setmaxnreg_inc(config.registers().0);
        let sum = [0, 1].map(|_| k.var("sum", 0.0));
        let fragment = |_| std::array::from_fn(|_| k.unset_var("s"));
        Self {
            shared,
            hooks,
            k,
            number: (k.thread() >> 7).of_lane(0).named("consumer"),
            queries: (0..config.register_steps()).map(|_| [0; 4].map(|_| k.unset_var("q"))).collect(),
            row_factors: (config.is_converted() && config.o != Dtype::F16)
                .then(|| [0, 1].map(|_| k.var("row_factor", 1.0))),
            logits: (0..config.kv_tokens() / 8).map(fragment).collect(),
            next_logits: (0..if config.is_fp8() { config.kv_tokens() / 8 } else { 0 })
                .map(fragment)
                .collect(),
            weights: (0..config.kv_tokens() / if config.is_fp8() { 8 } else { 4 })
                .map(|_| k.unset_var("p"))
                .collect(),
            state: RowTile::of_columns(&shared.cta, config.vo() / 16, sum.map(ThreadScalar::Register)),
            sum,
            error: [0, 1].map(|_| k.var("error", 0.0)),
            unmasked: [0, 1].map(|_| k.var("unmasked", 0)),
            first_tile: k.var("first_tile", 0),
            replacing_tile: config.replaces_outputs().then(|| k.var("replacing_tile", 0)),
            seen_end: shared.pair.map(|_| k.var("seen_end", 0)),
            masks: shared.masks.map(|ring| (ring.cursor(k), k.var("first_tile_by_words", 0))),
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
            self.compute_ranges(&current);
            shared.queries.wait_full(n);
            self.process(&current);
            let requests = self.request_repetition(shared.flags(n));
            self.store(&current);
            if shared.pair.is_none() {
                self.merge(&current, shared.flags(n));
            }
            shared.release_item(n, requests);
            count.set(n + 1);
        });
        // the other consumer's last arrival
        k.when(self.number.eq(0), || k.sync_named(EXPONENTIALS, THREADS));
    }

    /// Fills the stored values of hooks, which both consumers share.
    fn fill_row_values(&self, current: &CurrentItem<'k>) {
        if self.hooks.has_row_values() {
            self.shared.cta.sync();
            self.hooks.fill(current, self.k.constant(0), super::Q_ROWS);
            self.shared.cta.sync();
        }
    }

    /// Computes and stores the rows of an item.
    fn process(&self, current: &CurrentItem<'k>) {
        let k = self.k;
        let item = current.load();
        let (first, end) = self.shared.tiles(item.kv_begin, current.kv_end);
        self.sum.iter().chain(&self.error).for_each(|sum| sum.set(0.0));
        self.state.max.iter().for_each(|max| max.set(f32::NEG_INFINITY));
        self.first_tile.set(first);
        self.load_queries();
        let end = self.skip_unseen(first, end);
        self.begin_outputs(first, end);
        let attend = || match self.shared.config.is_fp8() {
            true => self.process_fp8(current, end),
            false => self.process_tiles(current, end),
        };
        // values of hooks are filled while the first logits are computed
        k.when_else(end.gt(first), attend, || {
            self.fill_row_values(current);
            self.release_queries(k.constant(true));
        });
    }

    /// Lets the products of the first processed tile replace the accumulators. Zeroes these if there is none, or if non-finite values
    /// are added before.
    fn begin_outputs(&self, first: Value<'k, u32>, end: Value<'k, u32>) {
        let zero = || self.state.o.iter().flatten().for_each(|o| o.set(0.0));
        let Some(replacing_tile) = self.replacing_tile else { return zero() };
        let zeroes = end.le(first) | self.careful.get().ne(0);
        replacing_tile.set((end - 1).unless(zeroes, NONE));
        self.k.when(zeroes, zero);
    }

    /// Starts the logits of the first tile, and fills the values of hooks meanwhile.
    pub(super) fn start_logits(&self, current: &CurrentItem<'k>, logits: &[AccFragment<'k>]) {
        self.keys.wait_full();
        self.multiply_keys(logits);
        self.fill_row_values(current);
    }

    /// Processes the KV tiles of an item before `end`.
    fn process_tiles(&self, current: &CurrentItem<'k>, end: Value<'k, u32>) {
        let (k, first) = (self.k, self.first_tile.get());
        let tile = k.var("tile", end - 1);
        self.start_logits(current, &self.logits);
        let mask = self.prepare_mask(current, tile.get(), Masked::Any);
        // loops are chosen by all warps alike
        let has_biases = mask.hook.as_ref().is_some_and(|hook| self.has_biases(hook));
        let slow = has_biases.then(|| !Self::allows_biases(current));
        k.wgmma_wait(0);
        self.release_products(tile.get());
        self.mask(current, tile.get(), &self.logits, &mask);
        self.softmax(current, None);
        k.loop_(|| {
            k.break_if(tile.get().eq(first));
            let masked = self.needs_mask(tile.get()) | self.needs_mask(tile.get() - 1);
            let masked = slow.map_or(masked, |slow| masked | slow);
            k.when(masked, || self.next_tile(current, tile, Masked::Any));
            self.unmasked_tiles(current, tile, slow);
        });
        self.multiply_values(current, tile.get(), Masked::Any);
        k.wgmma_wait(0);
        self.release(self.values);
    }

    /// Requests that the item is processed carefully, if an output is not finite. A sum of outputs that overflows does no harm.
    /// Returns whether this warp does.
    fn request_repetition(&self, repeat: Shared<'k, u32>) -> Value<'k, bool> {
        let k = self.k;
        let sum = |i: usize| {
            let column = self.state.o.iter().map(|fragment| fragment[i].get());
            column.reduce(|sum, o| sum + o).unwrap_or_else(|| k.constant(0.0))
        };
        let sum = (sum(0) + sum(1)) + (sum(2) + sum(3));
        let request = !sum.abs().lt(f32::INFINITY) & self.careful.get().eq(0);
        let of_warp = k.ballot(request);
        let requests = of_warp.ne(0);
        match self.shared.pair {
            None => k.when(k.lane().eq(0), || repeat.at(k.thread() >> 5).store(of_warp)),
            // both CTAs process the item again; flags are 0 until then
            Some(pair) => k.when(k.lane().eq(0) & requests, || {
                let flag = repeat.at((k.thread() >> 5) + pair.rank * CONSUMER_WARPS);
                flag.store(of_warp);
                flag.of_cta(pair.other).store(of_warp);
            }),
        }
        requests
    }

    /// Arrives at the merges of an item, unless it is processed again.
    fn merge(&self, current: &CurrentItem<'k>, repeat: Shared<'k, u32>) {
        let (k, cta, item) = (self.k, &self.shared.cta, current.load());
        k.when(item.merge_deps_begin.lt(item.merge_deps_end), || {
            cta.fetch_merges(current);
            cta.sync();
            let flags = (0..CONSUMER_WARPS as usize).map(|warp| repeat.plus(warp).load());
            let any = flags.reduce(|a, b| a | b).unwrap_or_else(|| k.constant(0));
            k.when(any.eq(0), || cta.arrive_and_merge(current, self.hooks));
        });
    }

    /// Processes tiles as long as neither needs a mask: a loop of its own, so that its instructions are adjacent.
    fn unmasked_tiles(&self, current: &CurrentItem<'k>, tile: Var<'k, u32>, slow: Option<Value<'k, bool>>) {
        if self.hooks.masks_all_tiles() {
            return;
        }
        let [begin, end] = self.unmasked.map(|tile| tile.get());
        let last = begin.max(self.first_tile.get());
        self.k.loop_(|| {
            let is_end = tile.get().le(last) | tile.get().ge(end);
            self.k.break_if(slow.map_or(is_end, |slow| is_end | slow));
            self.next_tile(current, tile, Masked::No);
        });
    }

    /// Whether a hook's biases are added in the unit of products, where converted queries with a factor of 0 would make them infinite.
    fn has_biases(&self, hook: &TileLogits<'k, '_>) -> bool {
        self.row_factors.is_none() && hook.has_biases()
    }

    /// Whether biases may be added in the unit of products: their factor is positive and neither tiny nor huge.
    fn allows_biases(current: &CurrentItem<'k>) -> Value<'k, bool> {
        current.product_scale.gt(1e-20) & current.product_scale.lt(1e20)
    }

    /// Starts the logits of the tile before `tile`, adds the values of `tile`, and computes the weights of the former.
    fn next_tile(&self, current: &CurrentItem<'k>, tile: Var<'k, u32>, masked: Masked) {
        let k = self.k;
        self.keys.wait_full();
        self.multiply_keys(&self.logits);
        self.multiply_values(current, tile.get(), masked);
        tile.set(tile.get() - 1);
        let mask = self.prepare_mask(current, tile.get(), masked);
        let unmasked = mask.hook.as_ref().filter(|_| masked == Masked::No);
        let caps = unmasked.and_then(TileLogits::soft_caps);
        k.wgmma_wait(1);
        self.release_products(tile.get());
        let cap = || self.mask(current, tile.get(), &self.logits, &mask);
        let release = || self.release(self.values);
        let biases = unmasked.filter(|hook| self.has_biases(hook)).and_then(TileLogits::biases);
        // masked logits are infinite, which a polynomial does not keep
        match (caps, biases) {
            (Some(caps), _) => self.capped_softmax(current, caps, cap, &release),
            (None, Some(biases)) => self.biased_softmax(current, &biases, &release),
            (None, None) => {
                cap();
                self.softmax(current, Some(&release));
            }
        }
    }

    /// The tile rows of this consumer.
    fn query_tile(&self) -> SharedTile<'k> {
        self.shared.q.from_row(self.number << 6)
    }

    /// Loads queries into registers, and releases their tile if these are all.
    fn load_queries(&self) {
        let (k, tile) = (self.k, self.query_tile());
        let row = (((k.thread() >> 5) & 3) << 4) + (k.lane() & 15);
        for (step, fragment) in self.queries.iter().enumerate() {
            let at = tile.chunk(row, (k.lane() >> 4) + 2 * step as u32);
            fragment.iter().zip(k.load_matrix::<4, _>(at, false)).for_each(|(to, word)| to.set(word));
        }
        if self.shared.config.has_queries_in_registers() {
            release_from_warp(k, self.shared.queries.empty(k.constant(0)));
        }
        self.convert_queries();
    }

    /// Converts queries of bf16 to f16, if keys are: rows are scaled by powers of two, and their logits by the inverse.
    fn convert_queries(&self) {
        let Some(row_factors) = self.row_factors else { return };
        for half in 0..2 {
            let of_row = || self.queries.iter().flat_map(|fragment| [fragment[half], fragment[half + 2]]);
            let largest = of_row().map(|word| F16Factor::magnitude(word.get())).reduce(|a, b| a.max(b));
            let largest = largest.unwrap_or_else(|| self.k.constant(0));
            let largest = [1, 2].into_iter().fold(largest, |max, mask: u32| max.max(max.shuffle_xor(mask)));
            let factor = F16Factor::new(largest);
            of_row().for_each(|word| word.set(factor.convert(word.get())));
            row_factors[half].set(factor.inverse);
        }
    }

    /// A factor of the products `Q · Kᵀ`, for both rows of this thread.
    pub(super) fn of_rows(&self, factor: Value<'k, f32>) -> [Value<'k, f32>; 2] {
        self.row_factors.map_or([factor; 2], |rows| rows.map(|row| factor * row.get()))
    }

    /// The factors from logits, after the hook if there is one, to base-2 logits.
    pub(super) fn logit_scales(&self, current: &CurrentItem<'k>) -> [Value<'k, f32>; 2] {
        if self.hooks.is_live(Hook::Logits) || self.row_factors.is_none() {
            return [current.scale; 2];
        }
        // masked logits are -inf: their products with 0 would be NaN
        self.of_rows(current.scale).map(|scale| scale.max(f32::MIN_POSITIVE))
    }

    pub(super) fn elements(&self) -> Elements {
        self.shared.products().elements
    }

    /// Starts `S = Q · Kᵀ`.
    pub(super) fn multiply_keys(&self, logits: &[AccFragment<'k>]) {
        let k = self.k;
        let keys = self.shared.keys.0.stage(self.keys.stage()).rows_descriptor();
        let logits: Vec<_> = logits.iter().flatten().copied().collect();
        k.wgmma_fence();
        let config = &self.shared.config;
        let q = (!config.has_queries_in_registers()).then(|| self.query_tile().rows_descriptor());
        for step in 0..config.qk_steps() {
            let left = match (self.queries.get(step), q) {
                (Some(fragment), _) => WgmmaLeft::Registers(fragment.map(|word| word.get())),
                (None, Some(q)) => WgmmaLeft::Shared(q.depth_step(step), Major::K),
                (None, None) => unreachable!("all queries are in registers"),
            };
            let right = keys.depth_step(step);
            let operands = WgmmaOperands { elements: self.elements(), left, right, right_major: Major::K };
            k.wgmma(&logits, operands, step > 0);
        }
        k.wgmma_commit();
    }

    /// Starts `O += P · V` of KV tile `tile`, or `O = P · V`.
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
            let replacing_tile = self.replacing_tile.filter(|_| step == 0);
            let adds = replacing_tile.map_or(k.constant(true), |replacing| tile.ne(replacing.get()));
            k.wgmma(&o, operands, adds);
        }
        k.wgmma_commit();
    }

    /// One thread of the warpgroup releases the stage, to which both CTAs of a pair copy.
    pub(super) fn release(&self, cursor: Cursor<'k>) {
        let k = self.k;
        k.when((k.thread() & 127).eq(0), || {
            cursor.release();
            self.shared.pair.iter().for_each(|pair| cursor.empty().arrive_in_cta(pair.other));
        });
        cursor.advance();
    }

    /// Releases the keys of `tile`, and after the first tile the queries, because their products have been computed.
    pub(super) fn release_products(&self, tile: Value<'k, u32>) {
        self.release(self.keys);
        self.release_queries(tile.eq(self.first_tile.get()));
    }

    /// Releases the queries if they are not all in registers and `are_last` products have been computed. Each warp has read its own
    /// queries for registers; without those, one thread of the warpgroup arrives.
    fn release_queries(&self, are_last: Value<'k, bool>) {
        let (k, empty) = (self.k, self.shared.queries.empty(self.k.constant(0)));
        match self.queries.len() {
            0 => k.when((k.thread() & 127).eq(0) & are_last, || empty.arrive()),
            _ if self.shared.config.has_queries_in_registers() => {}
            _ => k.when(are_last, || release_from_warp(k, empty)),
        }
    }

    #[track_caller]
    pub(super) fn first_key(&self, tile: Value<'k, u32>) -> Value<'k, u32> {
        tile * self.shared.config.kv_tokens() as u32
    }
}
