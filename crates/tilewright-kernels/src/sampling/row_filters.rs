//! Filters of a row whose candidate list does not suffice, in two passes over the row.
//!
//! 1. A histogram of weights finds the bucket of a threshold. For top-p the pass that has summed the row has counted it,
//!    too (`weight_buckets`); a threshold below those buckets takes a pass with buckets over twice the distance from the
//!    largest weight to the mean. For top-k the buckets cover twice the distance to the least maximum of a thread.
//! 2. The elements of that bucket are listed, for top-k those above it, too. If there are more than the list holds,
//!    radix select finds the threshold.

use super::{
    candidates::{Candidates, LIST_CAPACITY, ListedElement},
    mass::{Number, key, leading_zeros, of_key},
    row_stats::RowStats,
    weight_buckets::WeightBuckets,
    weights::Weights,
};
use tilewright_ptx::build::{Value, Var};

/// Elements in flight per thread.
const IN_FLIGHT: u32 = 8;

/// Mass of the kept elements, if it is the last sum over the row's threads.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptMasses<'k> {
    pub(super) known: Var<'k, bool>,
    pub(super) all: Var<'k, u64>,
}

impl<'k, T: Number> Weights<'k, T> {
    /// Calls `body` with the first index, the values and the buckets of up to 4 adjacent elements of this thread.
    #[track_caller]
    fn each_bucket(
        &self,
        buckets: WeightBuckets<'k>,
        body: impl Fn(Value<'k, u32>, &[(Value<'k, f32>, Value<'k, u32>)]),
    ) {
        self.candidates.row.each_four(IN_FLIGHT / T::PER_VECTOR, |first, numbers| {
            let of = |&x: &Value<'k, f32>| (x, buckets.of(self.rule.normal_weight(x)));
            body(first, &numbers.iter().map(of).collect::<Vec<_>>());
        });
    }

    /// Lists the elements whose buckets pass `is_listed`.
    #[track_caller]
    fn list(
        &self,
        first: Value<'k, u32>,
        elements: &[(Value<'k, f32>, Value<'k, u32>)],
        is_listed: impl Fn(Value<'k, u32>) -> Value<'k, bool>,
    ) {
        let any =
            elements[1..].iter().fold(is_listed(elements[0].1), |any, &(_, bucket)| any | is_listed(bucket));
        self.candidates.cta.k.when(any, || {
            let element = |(i, &(x, bucket)): (u32, &(Value<'k, f32>, Value<'k, u32>))| {
                let index = first + i;
                ListedElement { is_listed: is_listed(bucket), index, value: self.weight(index, x) }
            };
            self.candidates.list.add(&(0..).zip(elements).map(element).collect::<Vec<_>>());
        });
    }

    /// Mass of an element.
    #[track_caller]
    fn mass(&self, x: Value<'k, f32>) -> Value<'k, u64> {
        self.rule.mass(self.mass_scale, self.rule.normal_weight(x))
    }

    /// Lists the `top_k` largest elements, if they fit.
    #[track_caller]
    pub(super) fn list_top_k(&self, stats: &RowStats<'k>) {
        let Candidates { cta, list, listed, .. } = &self.candidates;
        let k = cta.k;
        let least = of_key(cta.min(key(stats.thread_max)));
        let [largest, least] = [self.rule.max_weight(), self.rule.normal_weight(least)];
        let [high, low] = [largest, least].map(|weight| weight.reinterpret::<u32>());
        let buckets = WeightBuckets::over(cta, largest, ((high.max(low) - low) >> 23) + 1);
        let (lowest, _) = cta.select_bucket(self.request.top_k.to_u64(), |count| {
            self.each_bucket(buckets, |_, elements| {
                elements.iter().for_each(|&(_, bucket)| count(bucket, k.constant(1)));
            });
        });
        list.begin_second();
        let of_list = cta.total();
        self.each_bucket(buckets, |first, elements| {
            self.list(first, elements, |bucket| bucket.ge(lowest));
            for &(x, bucket) in elements {
                k.when(bucket.ge(lowest), || of_list.add(self.mass(x)));
            }
        });
        self.listed_mass.set(of_list.of_all());
        list.complete();
        listed.set(list.count().le(LIST_CAPACITY));
    }

    /// The threshold of top-p with a mass of `target` among all elements, and the mass of the kept elements.
    #[track_caller]
    pub(super) fn top_p_of_row(&self, target: Value<'k, u64>) -> Value<'k, f32> {
        let Candidates { cta, list, listed, .. } = &self.candidates;
        let k = cta.k;
        let ([highest, lowest], buckets) = self.buckets_of_threshold(target);
        list.begin_second();
        let heavier = cta.total();
        self.each_bucket(buckets, |first, elements| {
            for &(x, bucket) in elements {
                heavier.add(bucket.gt(highest).select(self.mass(x), 0_u64));
            }
            self.list(first, elements, |bucket| bucket.le(highest) & bucket.ge(lowest));
        });
        let above = heavier.of_all();
        list.complete();
        let (value, mass) = (|index, x| self.weight(index, x), |_, weight| self.mass_scale.mass(weight));
        k.when(list.count().le(LIST_CAPACITY) & above.lt(target), || {
            listed.set((above + self.candidates.sum_of_list(&mass)).ge(target));
        });
        let is_listed = listed.get();
        let rest = is_listed.select(target - above, target);
        let threshold = self.candidates.threshold(&value, &mass, rest).0;
        listed.set(false);
        k.when(is_listed, || {
            self.kept.all.set(self.sum_with_listed(threshold));
            self.kept.known.set(true);
        });
        threshold
    }

    /// The highest and the lowest bucket that may hold the threshold of top-p with a mass of `target`, and the buckets.
    #[track_caller]
    fn buckets_of_threshold(&self, target: Value<'k, u64>) -> ([Value<'k, u32>; 2], WeightBuckets<'k>) {
        let (k, cta, total) = (self.candidates.cta.k, &self.candidates.cta, self.masses.total);
        let range = self.counted.find(self.mass_scale, target, total).map(|bucket| k.var("bucket", bucket));
        let shift = k.var("shift", self.counted.buckets.shift);
        k.when(range[0].get().eq(0), || {
            // the mass of a row of largest weights is at most 2^63
            let buckets = WeightBuckets::over(cta, self.rule.max_weight(), leading_zeros(total));
            let (decisive, _) = cta.select_bucket(target, |count| {
                self.each_bucket(buckets, |_, elements| {
                    elements.iter().for_each(|&(x, bucket)| count(bucket, self.mass(x)));
                });
            });
            range.iter().for_each(|bucket| bucket.set(decisive));
            shift.set(buckets.shift);
        });
        (range.map(|bucket| bucket.get()), self.counted.buckets.with_shift(shift.get()))
    }

    /// Adds the listed elements from `threshold` on to the last sum over the row, whose warps' parts are kept.
    #[track_caller]
    fn sum_with_listed(&self, threshold: Value<'k, f32>) -> Value<'k, u64> {
        let Candidates { cta, row, list, .. } = &self.candidates;
        let k = cta.k;
        // each CTA adds the full list to its copy
        k.repeat((k.thread(), list.count()), cta.threads, |at| {
            let (index, weight) = list.get(at);
            k.when(weight.ge(threshold), || {
                cta.add_to_range(row.warp_of(index), self.mass_scale.mass(weight));
            });
        });
        k.sync_threads();
        cta.sum_of_ranges()
    }
}
