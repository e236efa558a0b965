//! The second pass over a row: fills the candidate list, and sums the masses of the row.

use super::{
    candidates::{Candidates, ListedElement},
    cta_sum::CtaSum,
    mass::{MassScale, Number},
    weight_buckets::CountedBuckets,
    weights::WeightRule,
};
use tilewright_ptx::build::{Value, Var};

/// Vectors in flight per thread while masses are added; two of 16-bit elements spill on sm_120.
fn vectors_in_flight<T: Number>() -> u32 {
    if T::PER_VECTOR == 4 { 4 } else { 1 }
}

/// Limits of the listed elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListLimits<'k> {
    pub(super) min_weight: Var<'k, f32>,
    /// All scores of listed elements reach it.
    pub(super) min_score: Var<'k, f32>,
    /// Whether only elements that reach `min_score` are read: the total mass is not used.
    pub(super) skips_rest: Var<'k, bool>,
    /// Whether elements are counted in these buckets, if all are read.
    pub(super) is_counted: Value<'k, bool>,
    pub(super) counted: CountedBuckets<'k>,
}

impl<'k> ListLimits<'k> {
    /// Fills the list, which is empty; returns the masses of the row, 0 with `skips_rest`. Those of the warps' ranges are
    /// kept for [`Candidates::first`].
    #[track_caller]
    pub(super) fn fill<T: Number>(
        &self,
        candidates: &Candidates<'k, T>,
        rule: &WeightRule<'k>,
        mass_scale: MassScale<'k>,
        thread_max: Value<'k, f32>,
    ) -> RowMasses<'k> {
        let Candidates { cta, row, list, .. } = candidates;
        let k = cta.k;
        let (all, of_list) = (cta.total(), cta.total());
        let masses = ["total", "listed_mass"].map(|name| k.var(name, 0_u64));
        let is_summed = !self.skips_rest.get();
        k.when_else(
            rule.greedy,
            || {
                k.when(cta.row_thread().eq(0), || {
                    list.add(&[ListedElement {
                        is_listed: k.constant(true),
                        index: rule.first,
                        value: k.constant(1.0),
                    }]);
                    [all, of_list].iter().for_each(|sum| sum.add(mass_scale.mass(k.constant(1.0))));
                });
            },
            || {
                k.when_else(
                    is_summed,
                    || self.fill_and_sum(candidates, rule, mass_scale, [all, of_list]),
                    || {
                        let selected = thread_max.ge(self.min_score.get());
                        row.each_of_threads(selected, |index, x| {
                            k.when(x.ge(self.min_score.get()), || list.add(&[self.element(rule, index, x)]));
                        });
                    },
                );
            },
        );
        k.when(is_summed, || cta.publish_masses([all, of_list].map(|sum| sum.of_thread())));
        list.complete();
        k.when(is_summed, || masses.iter().zip(cta.sums()).for_each(|(var, sum)| var.set(sum)));
        let [total, listed] = masses.map(|sum| sum.get());
        RowMasses { total, listed }
    }

    /// Fills the list and sums the masses of this thread: all, and those in the list.
    #[track_caller]
    fn fill_and_sum<T: Number>(
        &self,
        Candidates { cta, row, list, .. }: &Candidates<'k, T>,
        rule: &WeightRule<'k>,
        mass_scale: MassScale<'k>,
        [all, of_list]: [CtaSum<'k>; 2],
    ) {
        row.each_four(vectors_in_flight::<T>(), |first, numbers| {
            let weights: Vec<_> = numbers.iter().map(|&x| rule.normal_weight(x)).collect();
            let masses: Vec<_> = weights.iter().map(|&weight| rule.mass(mass_scale, weight)).collect();
            masses.iter().for_each(|&mass| all.add(mass));
            cta.k.when(self.is_counted, || weights.iter().for_each(|&weight| self.counted.count(weight)));
            let max = numbers[1..].iter().fold(numbers[0], |max, &x| max.max(x));
            cta.k.when(max.ge(self.min_score.get()), || {
                let elements: Vec<_> =
                    (0..).zip(numbers).map(|(i, &x)| self.element(rule, first + i, x)).collect();
                list.add(&elements);
                for (element, &mass) in elements.iter().zip(&masses) {
                    of_list.add(element.is_listed.select(mass, 0_u64));
                }
            });
        });
    }

    /// An element, listed if its weight reaches the limits.
    #[track_caller]
    fn element(&self, rule: &WeightRule<'k>, index: Value<'k, u32>, x: Value<'k, f32>) -> ListedElement<'k> {
        let value = rule.weight(index, x);
        let is_listed = x.ge(self.min_score.get()) & value.ge(self.min_weight.get());
        ListedElement { is_listed, index, value }
    }
}

/// Masses of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowMasses<'k> {
    pub(super) total: Value<'k, u64>,
    /// Mass of the list.
    pub(super) listed: Value<'k, u64>,
}
