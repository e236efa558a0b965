//! The second pass over a row: fills the candidate list, and sums the masses of the row.

use super::{Candidates, CtaCollectives, CtaSum, ListedElement, MassScale, Number, RowStats, WeightRule};
use tilewright_ptx::{Value, Var};

/// Vectors in flight per thread while masses are added: four are slower because the loop gets longer; two of 16-bit elements spill on
/// sm_120.
fn vectors_in_flight<T: Number>(cta: &CtaCollectives<'_>) -> u32 {
    if T::PER_VECTOR == 4 && !cta.is_short_of_registers() { 2 } else { 1 }
}

/// Vectors in flight per thread where scores are only compared.
fn scores_in_flight<T: Number>(cta: &CtaCollectives<'_>) -> u32 {
    if !cta.is_short_of_registers() { 16 / T::PER_VECTOR } else { 1 }
}

/// Limits of the listed elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListLimits<'k> {
    pub(super) min_weight: Var<'k, f32>,
    /// All scores of listed elements reach it.
    pub(super) min_score: Var<'k, f32>,
    /// Whether only elements that reach `min_score` are read: the total mass is not used.
    pub(super) skips_rest: Var<'k, bool>,
    /// Weights from here on are not listed; infinite without an upper limit.
    pub(super) max_weight: Var<'k, f32>,
    /// Whether `skips_rest` tests elements, not threads: many are listed.
    pub(super) skips_rest_by_element: Value<'k, bool>,
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
        stats: &RowStats<'k>,
    ) -> RowMasses<'k> {
        let Candidates { cta, list, .. } = candidates;
        let k = cta.k;
        let (all, part) = (cta.total(), cta.total());
        let masses = ["total", "part_mass"].map(|name| k.var(name, 0_u64));
        let has_upper = self.has_upper();
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
                    [all, part].iter().for_each(|sum| sum.add(mass_scale.mass(k.constant(1.0))));
                });
            },
            || {
                k.when_else(
                    is_summed,
                    || {
                        k.when_else(
                            has_upper,
                            || self.fill_and_sum_above(candidates, rule, mass_scale, [all, part]),
                            || self.fill_and_sum(candidates, rule, mass_scale, [all, part]),
                        );
                    },
                    || {
                        k.when_else(
                            self.skips_rest_by_element,
                            || self.fill_by_element(candidates, rule),
                            || self.fill_by_thread(candidates, rule, stats),
                        );
                    },
                );
            },
        );
        k.when(is_summed, || {
            // the masses of the ranges are those of the row, or those above the list
            let [all, part] = [all, part].map(|sum| sum.of_thread());
            cta.publish_masses([has_upper.select(part, all), has_upper.select(all, part)]);
        });
        list.complete();
        k.when(is_summed, || masses.iter().zip(cta.sums()).for_each(|(var, sum)| var.set(sum)));
        let [first, second] = masses.map(|sum| sum.get());
        RowMasses { total: has_upper.select(second, first), part: has_upper.select(first, second) }
    }

    /// Lists elements with at least the weight of a score.
    #[track_caller]
    pub(super) fn set_min_score(
        &self,
        rule: &WeightRule<'k>,
        bound: Value<'k, f32>,
        needs_total: Value<'k, bool>,
    ) {
        let weight = rule.weight(bound.builder().constant(0), bound);
        self.min_weight.set(weight);
        let separates = rule.separates(weight);
        self.min_score.set(separates.select(rule.min_score(bound), f32::NEG_INFINITY));
        self.skips_rest.set(!needs_total & separates);
    }

    /// Lists elements with at least this weight.
    #[track_caller]
    pub(super) fn set_min_weight(&self, rule: &WeightRule<'k>, weight: Value<'k, f32>) {
        self.min_weight.set(weight);
        let separates = rule.separates(weight);
        self.min_score.set(separates.select(rule.score_below(weight), f32::NEG_INFINITY));
        self.skips_rest.set(separates);
    }

    /// Whether the list has an upper limit.
    #[track_caller]
    pub(super) fn has_upper(&self) -> Value<'k, bool> {
        self.max_weight.get().lt(f32::INFINITY)
    }

    /// Fills the list with elements that reach `min_score`, and reads all.
    #[track_caller]
    fn fill_by_element<T: Number>(
        &self,
        Candidates { cta, row, list, .. }: &Candidates<'k, T>,
        rule: &WeightRule<'k>,
    ) {
        row.each_four(scores_in_flight::<T>(cta), |first, numbers| {
            let max = numbers[1..].iter().fold(numbers[0], |max, &x| max.max(x));
            cta.k.when(max.ge(self.min_score.get()), || {
                let element = |(i, &x)| self.element(rule, first + i, x);
                list.add(&(0..).zip(numbers).map(element).collect::<Vec<_>>());
            });
        });
    }

    /// Fills the list with elements that reach `min_score`: reads the best vector of threads that have one, or all elements of
    /// threads that may have more.
    #[track_caller]
    fn fill_by_thread<T: Number>(
        &self,
        Candidates { cta, row, list, .. }: &Candidates<'k, T>,
        rule: &WeightRule<'k>,
        stats: &RowStats<'k>,
    ) {
        let (k, min_score, best) = (cta.k, self.min_score.get(), stats.best_vector);
        let is_selected = stats.thread_max.ge(min_score);
        let has_more = best.rest.ge(min_score);
        k.when(is_selected & !has_more, || {
            let element = |(i, x)| self.element(rule, best.first + i, x);
            list.add(&(0..).zip(row.vector(best.first)).map(element).collect::<Vec<_>>());
        });
        row.each_of_threads(has_more, |index, x| {
            k.when(x.ge(min_score), || list.add(&[self.element(rule, index, x)]));
        });
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
        row.each_four(vectors_in_flight::<T>(cta), |first, numbers| {
            let masses: Vec<_> = numbers.iter().map(|&x| rule.weight_and_mass(mass_scale, x).1).collect();
            masses.iter().for_each(|&mass| all.add(mass));
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

    /// Fills the list below its upper limit, and sums the masses of this thread: all, and those above the limit.
    #[track_caller]
    fn fill_and_sum_above<T: Number>(
        &self,
        Candidates { cta, row, list, .. }: &Candidates<'k, T>,
        rule: &WeightRule<'k>,
        mass_scale: MassScale<'k>,
        [all, above]: [CtaSum<'k>; 2],
    ) {
        let (min_weight, max_weight) = (self.min_weight.get(), self.max_weight.get());
        // weights have the order of their bits
        let [least, upper] = [min_weight, max_weight].map(|weight| weight.reinterpret::<u32>());
        row.each_four(vectors_in_flight::<T>(cta), |first, numbers| {
            let weighed: Vec<_> = numbers.iter().map(|&x| rule.weight_and_mass(mass_scale, x)).collect();
            for &(weight, mass) in &weighed {
                all.add(mass);
                above.add(weight.ge(max_weight).select(mass, 0_u64));
            }
            let element = |i: u32, value: Value<'k, f32>| {
                let is_listed = (value.reinterpret::<u32>() - least).lt(upper - least);
                ListedElement { is_listed, index: first + i, value }
            };
            let elements: Vec<_> = (0..).zip(&weighed).map(|(i, &(value, _))| element(i, value)).collect();
            let any = elements[1..].iter().fold(elements[0].is_listed, |any, of| any | of.is_listed);
            cta.k.when(any, || list.add(&elements));
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

#[derive(Debug, Clone, Copy)]
pub(super) struct RowMasses<'k> {
    pub(super) total: Value<'k, u64>,
    /// Mass of the list, or the mass above its upper limit.
    pub(super) part: Value<'k, u64>,
}
