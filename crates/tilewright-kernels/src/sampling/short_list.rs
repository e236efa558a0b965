//! Filters and draw of a short candidate list, by counting: two passes over the list, four barriers.
//!
//! 1. The lanes of an entry count the entries of larger weight and sum their masses.
//! 2. An entry passes top-k if fewer than k entries are above it, and top-p if the mass above it is less than the share. The lowest
//!    kept entries publish the mass at or above them, which is the kept mass. With min-p, all kept entries are summed.
//! 3. The lanes of an entry sum the kept masses of smaller indices. The entry in which the sum reaches the random number is the token.
//!
//! Ties of top-k are kept; other rules take the general path of `weights`.

use super::{
    Candidates, CtaCollectives, MAX_RANKED, Number, Weights,
    mass::{fraction_of, part_of},
};
use tilewright_ptx::{AtomicOp, Order, Scope, Shared, Value, Var};

/// Maximum lanes per entry; a power of two.
const MAX_LANES: u32 = 8;

/// The lanes of an entry; those after the last entry repeat it.
#[derive(Debug, Clone, Copy)]
struct EntryLanes<'k> {
    cta: CtaCollectives<'k>,
    /// Index of the entry.
    at: Value<'k, u32>,
    is_entry: Value<'k, bool>,
    /// Index of this lane among those of the entry.
    lane: Value<'k, u32>,
    lanes: Value<'k, u32>,
    /// Number of entries, rounded up to a multiple of 4.
    padded: Value<'k, u32>,
    /// Whether this warp has an entry.
    is_active: Value<'k, bool>,
}

impl<'k> EntryLanes<'k> {
    /// Divides the threads among `count` entries, at most as many as threads.
    #[track_caller]
    fn new(cta: &CtaCollectives<'k>, count: Value<'k, u32>) -> Self {
        let (k, thread) = (cta.k, cta.k.thread());
        let spare = (count - 1).leading_zeros() - (32 - cta.threads.ilog2());
        let lanes_log2 = spare.min(MAX_LANES.ilog2());
        let lanes = k.constant(1_u32) << lanes_log2;
        let at = thread >> lanes_log2;
        Self {
            cta: *cta,
            at: at.min(count - 1),
            is_entry: at.lt(count),
            lane: thread & (lanes - 1),
            lanes,
            padded: (count + 3) & !3,
            is_active: ((thread & !31) >> lanes_log2).lt(count),
        }
    }

    /// Whether this is the first lane of an entry.
    fn is_first(&self) -> Value<'k, bool> {
        self.is_entry & self.lane.eq(0)
    }

    /// Calls `body` with words of every entry, 4 at a time among the lanes.
    #[track_caller]
    fn each_four<const WORDS: usize>(
        &self,
        words: [Shared<'k, u32>; WORDS],
        body: impl Fn([Value<'k, u32>; WORDS]),
    ) {
        self.cta.k.repeat((self.lane * 4, self.padded), self.lanes * 4, |begin| {
            let words = words.map(|of| of.at(begin).load_vector::<4>());
            (0..4).for_each(|i| body(words.map(|of| of[i])));
        });
    }

    /// Kept mass of the entries with smaller indices, in all lanes of the entry.
    #[track_caller]
    fn kept_before(&self, index: Value<'k, u32>) -> Value<'k, u64> {
        let (k, cta) = (self.cta.k, &self.cta);
        let sum = MassSum::new(cta);
        self.each_four([cta.ranked_indices, cta.low, cta.high], |[other, low, high]| {
            sum.add(other.lt(index).select(1_u32, 0_u32), low, high);
        });
        let before = k.var("before", sum.get());
        self.cta.sum_lanes(self.lanes, &[before], None);
        before.get()
    }
}

/// An entry and the entries above it.
#[derive(Debug, Clone, Copy)]
struct ListEntry<'k> {
    /// Bits of the weight.
    key: Value<'k, u32>,
    index: Value<'k, u32>,
    mass: Value<'k, u64>,
    /// Number of entries of larger weight, and of those of at least this weight.
    count_above: Value<'k, u32>,
    count_through: Value<'k, u32>,
    /// Their masses.
    above: Value<'k, u64>,
    through: Value<'k, u64>,
}

impl<'k> ListEntry<'k> {
    /// The entry of these lanes; the same in all of them.
    #[track_caller]
    fn new(lanes: &EntryLanes<'k>) -> Self {
        let cta = &lanes.cta;
        let k = cta.k;
        let words = [cta.ranked_keys, cta.ranked_indices, cta.ranked_low, cta.ranked_high];
        let [key, index, low, high] = words.map(|of| of.at(lanes.at).load());
        let mass = k.pack32(low, high);
        let (counts, above) = (k.var("counts", 0_u32), k.var("above", 0_u64));
        k.when(lanes.is_active, || {
            let sum = MassSum::new(cta);
            lanes.each_four([cta.ranked_keys, cta.ranked_low, cta.ranked_high], |[other, low, high]| {
                let is_above = other.gt(key).select(1_u32, 0_u32);
                sum.add(is_above, low, high);
                counts.set(counts.get() + is_above + other.ge(key).select(1_u32 << 16, 0_u32));
            });
            above.set(sum.get());
            cta.sum_lanes(lanes.lanes, &[above], Some(counts));
        });
        let (count_above, count_through) = (counts.get() & 0xffff, counts.get() >> 16);
        // ties have the same mass
        let above = above.get();
        let through = above + (count_through - count_above).to_u64() * mass;
        Self { key, index, mass, count_above, count_through, above, through }
    }
}

/// Masses, added if a factor is 1; the high words in a sum of their own.
#[derive(Debug, Clone, Copy)]
struct MassSum<'k> {
    low: Var<'k, u64>,
    high: Var<'k, u32>,
}

impl<'k> MassSum<'k> {
    #[track_caller]
    fn new(cta: &CtaCollectives<'k>) -> Self {
        Self { low: cta.k.var("low_sum", 0_u64), high: cta.k.var("high_sum", 0_u32) }
    }

    /// Adds `factor` times a mass.
    #[track_caller]
    fn add(&self, factor: Value<'k, u32>, low: Value<'k, u32>, high: Value<'k, u32>) {
        self.low.set(factor.to_u64().mul_add(low.to_u64(), self.low.get()));
        self.high.set(factor.mul_add(high, self.high.get()));
    }

    #[track_caller]
    fn get(&self) -> Value<'k, u64> {
        let low = self.low.get();
        low.builder().pack32(low.low(), low.high() + self.high.get())
    }
}

impl<'k, T: Number> Weights<'k, T> {
    /// Whether [`Self::draw_from_short_list`] applies.
    #[track_caller]
    pub(super) fn has_short_list(&self) -> Value<'k, bool> {
        let Candidates { cta, list, listed, .. } = &self.candidates;
        let is_short = listed.get() & list.count().le(MAX_RANKED.min(cta.threads));
        is_short & (!self.filters.top_k | self.request.ties.eq(0))
    }

    /// The first token at which the running kept mass exceeds `fraction` / 2^64 of the kept mass. The row is not greedy.
    #[track_caller]
    pub(super) fn draw_from_short_list(&self, fraction: Value<'k, u64>) -> Value<'k, u32> {
        let (cta, filters) = (&self.candidates.cta, &self.filters);
        let k = cta.k;
        let lanes = EntryLanes::new(cta, self.candidates.list.count());
        self.store_entries(lanes.padded);
        k.sync_threads();
        let entry = ListEntry::new(&lanes);

        let is_in_top_k = !filters.top_k | entry.count_above.lt(self.request.top_k);
        let ends_top_k = filters.top_k & entry.count_through.ge(self.request.top_k);
        let judged = k.var("judged", self.masses.total);
        k.when(filters.top_p & !filters.top_p_of_all, || {
            let ends = ends_top_k & is_in_top_k;
            k.when(lanes.is_first() & ends, || publish(cta.ranked_sums, entry.through));
            k.sync_threads();
            judged.set(published(cta.ranked_sums));
        });
        let target = part_of(self.request.top_p, judged.get());
        let is_in_top_p = !filters.top_p | entry.above.lt(target);
        let min_weight = filters.min_p.select(self.request.min_p * self.rule.max_weight(), 0.0);
        let is_heavy = entry.key.reinterpret::<f32>().ge(min_weight);
        let is_kept = lanes.is_first() & is_in_top_k & is_in_top_p & is_heavy;
        let kept_mass = is_kept.select(entry.mass, 0_u64);
        k.when(lanes.is_first(), || {
            cta.low.at(lanes.at).store(kept_mass.low());
            cta.high.at(lanes.at).store(kept_mass.high());
        });
        let kept = k.var("kept", 0_u64);
        k.when_else(
            filters.min_p,
            || kept.set(cta.sum_of_cta(kept_mass)),
            || {
                let ends_top_p = filters.top_p & entry.through.ge(target);
                let is_last = ends_top_k | ends_top_p | entry.count_through.ge(self.candidates.list.count());
                k.when(is_kept & is_last, || publish(cta.ranked_sums.at(2), entry.through));
                k.sync_threads();
                kept.set(published(cta.ranked_sums.at(2)));
            },
        );
        k.when(lanes.is_active, || {
            let before = lanes.kept_before(entry.index);
            let target = fraction_of(fraction, kept.get()) + 1;
            let is_token = before.lt(target) & (before + kept_mass).ge(target);
            k.when(is_kept & is_token, || cta.ranked_token.store(entry.index));
        });
        k.sync_threads();
        cta.ranked_token.load()
    }

    /// Stores weights, indices and masses of the list, with entries of mass 0 up to `padded`, and clears the published sums.
    #[track_caller]
    fn store_entries(&self, padded: Value<'k, u32>) {
        let (cta, list) = (&self.candidates.cta, &self.candidates.list);
        let (k, thread) = (cta.k, cta.k.thread());
        k.when(thread.lt(padded), || {
            let (key, at) = (k.var("key", 0_u32), k.var("index", 0_u32));
            let mass = k.var("mass", 0_u64);
            k.when_else(
                thread.lt(list.count()),
                || {
                    let (index, weight) = list.get(thread);
                    key.set(weight.reinterpret());
                    at.set(index);
                    mass.set(self.mass_scale.mass(weight));
                },
                || [cta.low, cta.high].iter().for_each(|of| of.at(thread).store(0_u32)),
            );
            cta.ranked_keys.at(thread).store(key.get());
            cta.ranked_indices.at(thread).store(at.get());
            cta.ranked_low.at(thread).store(mass.get().low());
            cta.ranked_high.at(thread).store(mass.get().high());
        });
        k.when(thread.lt(4), || cta.ranked_sums.at(thread).store(0_u32));
    }
}

/// Stores a sum; several threads may store the same one.
#[track_caller]
fn publish<'k>(to: Shared<'k, u32>, sum: Value<'k, u64>) {
    to.reduce(AtomicOp::Or, sum.low(), Order::Relaxed, Scope::Cta);
    to.at(1).reduce(AtomicOp::Or, sum.high(), Order::Relaxed, Scope::Cta);
}

#[track_caller]
fn published(from: Shared<'_, u32>) -> Value<'_, u64> {
    let low = from.load();
    low.builder().pack32(low, from.at(1).load())
}
