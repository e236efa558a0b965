//! Filters of a row whose candidate list does not suffice, in two passes over the row.
//!
//! 1. A histogram of weights finds the bucket of a threshold. Its buckets divide the binary logarithm of weights
//!    over twice the distance from the largest weight to the mean, for top-k to the least maximum of a thread.
//!    About 200 elements share a bucket of normally distributed logits.
//! 2. The elements of that bucket are listed, for top-k those above it, too. If there are more than the list holds,
//!    radix select finds the threshold.

use super::{
    candidates::LIST_CAPACITY,
    mass::{Number, key, leading_zeros, of_key},
    row_stats::RowStats,
    weights::Weights,
};
use tilewright_ptx::{
    build::{Value, Var},
    isa::warp::WarpReduction,
};

/// Masses of the kept elements, if top-p has computed them; those of the warps' ranges are stored, too.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptMasses<'k> {
    pub(super) known: Var<'k, bool>,
    pub(super) all: Var<'k, u64>,
}

/// Buckets of weights, heaviest last.
#[derive(Debug, Clone, Copy)]
struct WeightBuckets<'k> {
    /// Bits of the largest weight.
    largest: Value<'k, u32>,
    /// Binary logarithm of the bit patterns per bucket.
    shift: Value<'k, u32>,
    last: u32,
}

impl<'k> WeightBuckets<'k> {
    /// Buckets over twice as many octaves, at least 1, below the largest weight.
    #[track_caller]
    fn new<T: Number>(weights: &Weights<'k, T>, octaves: Value<'k, u32>) -> Self {
        let last = weights.candidates.cta.buckets() - 1;
        let shift = (octaves * 2 - 1).leading_zeros();
        let shift = shift.builder().constant(32 + 23 - (last + 1).ilog2()) - shift;
        Self { largest: weights.rule.max_weight().reinterpret(), shift, last }
    }

    /// The bucket of a weight; the first one has all that are too small for others.
    #[track_caller]
    fn of(&self, weight: Value<'k, f32>) -> Value<'k, u32> {
        let bits = weight.reinterpret::<u32>();
        let below = (self.largest.max(bits) - bits) >> self.shift;
        below.builder().constant(self.last) - below.min(self.last)
    }
}

impl<'k, T: Number> Weights<'k, T> {
    /// Calls `body` with index, value and bucket of each element of this thread.
    #[track_caller]
    fn each_bucket(
        &self,
        buckets: WeightBuckets<'k>,
        body: impl Fn(Value<'k, u32>, Value<'k, f32>, Value<'k, u32>),
    ) {
        let bucket_of = |x| buckets.of(self.rule.normal_weight(x));
        self.candidates.row.each(2, |index, x| body(index, x, bucket_of(x)));
    }

    /// Replaces the list; `offer` gets all elements of this thread and a function that appends one.
    #[track_caller]
    fn relist(
        &self,
        buckets: WeightBuckets<'k>,
        offer: impl Fn((Value<'k, f32>, Value<'k, u32>), &dyn Fn()),
    ) {
        let (k, list) = (self.candidates.cta.k, &self.candidates.list);
        k.sync_threads();
        list.clear();
        k.sync_threads();
        self.each_bucket(buckets, |index, x, bucket| {
            offer((x, bucket), &|| list.add(index, self.weight(index, x)));
        });
        k.sync_threads();
    }

    /// Lists the `top_k` largest elements, if they fit.
    #[track_caller]
    pub(super) fn list_top_k(&self, stats: &RowStats<'k>) {
        let (k, cta) = (self.candidates.cta.k, &self.candidates.cta);
        let least = of_key(cta.reduce(WarpReduction::MinU32, key(stats.thread_max)));
        let [largest, least] = [self.rule.max_weight(), self.rule.normal_weight(least)];
        let [largest, least] = [largest, least].map(|weight| weight.reinterpret::<u32>());
        let buckets = WeightBuckets::new(self, ((largest.max(least) - least) >> 23) + 1);
        let (lowest, _) = cta.select_bucket(self.request.top_k.to_u64(), |count| {
            self.each_bucket(buckets, |_, _, bucket| count(bucket, k.constant(1)));
        });
        let of_list = cta.total();
        self.relist(buckets, |(x, bucket), append| {
            k.when(bucket.ge(lowest), || {
                append();
                of_list.add(self.rule.mass(self.mass_scale, x));
            });
        });
        self.listed_mass.set(of_list.of_all());
        self.candidates.listed.set(self.candidates.list.count().le(LIST_CAPACITY));
    }

    /// The threshold of top-p with a mass of `target` among all elements, and the masses of the kept elements.
    #[track_caller]
    pub(super) fn top_p_of_row(&self, target: Value<'k, u64>) -> Value<'k, f32> {
        let (k, candidates) = (self.candidates.cta.k, &self.candidates);
        // the mass of a row of largest weights is at most 2^63
        let buckets = WeightBuckets::new(self, leading_zeros(self.masses.total));
        let (decisive, above) = candidates.cta.select_bucket(target, |count| {
            self.each_bucket(buckets, |_, x, bucket| count(bucket, self.rule.mass(self.mass_scale, x)));
        });
        let of_thread = k.var("kept_of_thread", 0_u64);
        self.relist(buckets, |(x, bucket), append| {
            k.when(bucket.gt(decisive), || {
                of_thread.set(of_thread.get() + self.rule.mass(self.mass_scale, x));
            });
            k.when(bucket.eq(decisive), append);
        });
        let (value, mass) = (|index, x| self.weight(index, x), |_, weight| self.mass_scale.mass(weight));
        let found = k.var("top_p_threshold", 0.0_f32);
        k.when_else(
            candidates.list.count().le(LIST_CAPACITY),
            || {
                candidates.listed.set(true);
                let threshold = candidates.threshold(&value, &mass, target - above).0;
                found.set(threshold);
                let kept =
                    |index, weight: Value<'k, f32>| weight.ge(threshold).select(mass(index, weight), 0_u64);
                self.kept.all.set(above + candidates.sum(&value, &kept));
                candidates.listed.set(false);
                candidates.cta.store_range_mass(of_thread.get() + self.listed_of_thread(threshold));
                self.kept.known.set(true);
            },
            || found.set(candidates.threshold(&value, &mass, target).0),
        );
        found.get()
    }

    /// The mass of listed elements from `threshold` on: this lane's share of those in its warp's range of the row.
    #[track_caller]
    fn listed_of_thread(&self, threshold: Value<'k, f32>) -> Value<'k, u64> {
        let (k, candidates) = (self.candidates.cta.k, &self.candidates);
        let (begin, end) = candidates.row.of_warp(k.warp_index());
        let mass = k.var("listed_of_thread", 0_u64);
        k.repeat((k.lane(), candidates.list.count()), 32, |at| {
            let (index, weight) = candidates.list.get(at);
            k.when(index.ge(begin) & index.lt(end) & weight.ge(threshold), || {
                mass.set(mass.get() + self.mass_scale.mass(weight));
            });
        });
        mass.get()
    }
}
