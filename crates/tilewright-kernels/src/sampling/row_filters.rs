//! Filters of a row whose candidate list does not suffice.
//!
//! If the list has an upper limit (`row_histogram`), the second pass has summed the elements above it, and their mass and that of
//! the list show whether the threshold of top-p is in the list. Otherwise two more passes over the row find a threshold:
//!
//! 1. A histogram of weights finds the bucket of the threshold: over twice the distance from the largest weight to the mean, or
//!    for top-k to the least maximum of a thread.
//! 2. The elements of that bucket are listed, for top-k those above it, too. If there are more than the list holds,
//!    radix select finds the threshold.

use super::{
    Candidates, LIST_CAPACITY, ListedElement, NARROW_BITS, Number, RowStats, WeightBuckets, Weights,
    mass::{key, leading_zeros, of_key},
};
use tilewright_ptx::{Value, Var};

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
        let ahead = if self.candidates.cta.is_short_of_registers() { 1 } else { IN_FLIGHT / T::PER_VECTOR };
        self.candidates.row.each_four(ahead, |first, numbers| {
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
        self.rule.weight_and_mass(self.mass_scale, x).1
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
        let (value, mass) = (|index, x| self.weight(index, x), |_, weight| self.mass_scale.mass(weight));
        let above = k.var("above", self.masses.part);
        // whether the list has the threshold
        let check = || {
            k.when(list.count().le(LIST_CAPACITY) & above.get().lt(target), || {
                listed.set((above.get() + self.candidates.sum_of_list(&mass)).ge(target));
            });
        };
        k.when(self.has_upper, check);
        let [least, upper] = self.list_weights.map(|weight| weight.reinterpret::<u32>());
        let is_narrow = listed.get() & (upper - least).lt(1_u32 << NARROW_BITS);
        k.when(!listed.get(), || {
            let (decisive, buckets) = self.bucket_of_threshold(target);
            list.begin_second();
            let heavier = cta.total();
            self.each_bucket(buckets, |first, elements| {
                for &(x, bucket) in elements {
                    heavier.add(bucket.gt(decisive).select(self.mass(x), 0_u64));
                }
                self.list(first, elements, |bucket| bucket.eq(decisive));
            });
            above.set(heavier.of_all());
            list.complete();
            check();
        });
        let above = above.get();
        let is_listed = listed.get();
        let rest = is_listed.select(target - above, target);
        let threshold = k.var("threshold_of_row", 0.0_f32);
        k.when_else(
            is_narrow,
            || threshold.set(self.candidates.threshold_of_narrow_list(least, &mass, rest)),
            || threshold.set(self.candidates.threshold(&value, &mass, rest).0),
        );
        let threshold = threshold.get();
        listed.set(false);
        k.when(is_listed, || {
            self.kept.all.set(self.sum_with_listed(threshold));
            self.kept.known.set(true);
        });
        threshold
    }

    /// The bucket of the threshold of top-p with a mass of `target`, and the buckets.
    #[track_caller]
    fn bucket_of_threshold(&self, target: Value<'k, u64>) -> (Value<'k, u32>, WeightBuckets<'k>) {
        // the mass of a row of largest weights is at most 2^63
        let octaves = leading_zeros(self.masses.total);
        let buckets = WeightBuckets::over(&self.candidates.cta, self.rule.max_weight(), octaves);
        let (decisive, _) = self.candidates.cta.select_bucket(target, |count| {
            self.each_bucket(buckets, |_, elements| {
                elements.iter().for_each(|&(x, bucket)| count(bucket, self.mass(x)));
            });
        });
        (decisive, buckets)
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
