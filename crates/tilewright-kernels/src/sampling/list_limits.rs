//! The second pass over a row: fills the candidate list, and sums the masses of the row.

use super::{
    candidates::{CandidateList, Candidates},
    mass::{MassScale, Number},
    weights::WeightRule,
};
use tilewright_ptx::build::{Value, Var};

/// Elements in flight per thread while masses are added: twice as many of 16 bits spill on sm_120.
const IN_FLIGHT: u32 = 16;

/// Limits of the listed elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListLimits<'k> {
    pub(super) min_weight: Var<'k, f32>,
    /// All scores of listed elements reach it.
    pub(super) min_score: Var<'k, f32>,
    /// Whether only elements that reach `min_score` are read: the total mass is not used.
    pub(super) skips_rest: Var<'k, bool>,
}

impl<'k> ListLimits<'k> {
    /// Fills the list; returns the masses of the row, 0 with `skips_rest`.
    #[track_caller]
    pub(super) fn fill<T: Number>(
        &self,
        candidates: &Candidates<'k, T>,
        (rule, mass_scale): (&WeightRule<'k>, MassScale<'k>),
        thread_max: Value<'k, f32>,
    ) -> RowMasses<'k> {
        let Candidates { cta, row, list, .. } = candidates;
        let k = cta.k;
        k.sync_threads();
        list.clear();
        k.sync_threads();
        let sums = ["total", "listed_mass", "thread_mass"].map(|name| k.var(name, 0_u64));
        let set = |masses: [_; 3]| sums.iter().zip(masses).for_each(|(sum, mass)| sum.set(mass));
        k.when_else(
            rule.greedy,
            || {
                k.when(k.thread().eq(0), || list.add(rule.first, k.constant(1.0)));
                let all = mass_scale.mass(k.constant(1.0));
                set([all, all, k.constant(0)]);
            },
            || {
                k.when_else(
                    self.skips_rest.get(),
                    || {
                        let selected = thread_max.ge(self.min_score.get());
                        row.each_of_threads(selected, |index, x| self.offer(list, rule, (index, x), &|| {}));
                    },
                    || set(self.fill_and_sum(candidates, rule, mass_scale)),
                );
            },
        );
        k.sync_threads();
        let [total, listed, of_thread] = sums.map(|sum| sum.get());
        RowMasses { total, listed, of_thread }
    }

    /// Fills the list and sums all masses: of the row, of the list and of this thread's elements.
    #[track_caller]
    fn fill_and_sum<T: Number>(
        &self,
        Candidates { cta, row, list, .. }: &Candidates<'k, T>,
        rule: &WeightRule<'k>,
        mass_scale: MassScale<'k>,
    ) -> [Value<'k, u64>; 3] {
        let (all, of_list) = (cta.total(), cta.total());
        let part = |first: Value<'k, u32>, numbers: &[Value<'k, f32>]| {
            let masses: Vec<_> = numbers.iter().map(|&x| rule.mass(mass_scale, x)).collect();
            masses.iter().for_each(|&mass| all.add(mass));
            let max = numbers[1..].iter().fold(numbers[0], |max, &x| max.max(x));
            cta.k.when(max.ge(self.min_score.get()), || {
                for (i, (&x, &mass)) in (0..).zip(numbers.iter().zip(&masses)) {
                    self.offer(list, rule, (first + i, x), &|| of_list.add(mass));
                }
            });
        };
        let group = |first: Value<'k, u32>, numbers: &[Value<'k, f32>]| {
            // vectors of 16-bit elements in halves, to reduce register pressure
            (0..).step_by(4).zip(numbers.chunks(4)).for_each(|(i, numbers)| part(first + i, numbers));
        };
        row.visit(IN_FLIGHT / T::PER_VECTOR, group, |index, x| part(index, &[x]));
        [all.of_all(), of_list.of_all(), all.of_thread()]
    }

    /// Appends an element to the list and calls `added` if its weight reaches the limits.
    #[track_caller]
    fn offer(
        &self,
        list: &CandidateList<'k>,
        rule: &WeightRule<'k>,
        (index, x): (Value<'k, u32>, Value<'k, f32>),
        added: &dyn Fn(),
    ) {
        let k = index.builder();
        k.when(x.ge(self.min_score.get()), || {
            let weight = rule.weight(index, x);
            k.when(weight.ge(self.min_weight.get()), || {
                list.add(index, weight);
                added();
            });
        });
    }
}

/// Masses of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowMasses<'k> {
    pub(super) total: Value<'k, u64>,
    /// Mass of the list.
    pub(super) listed: Value<'k, u64>,
    /// Mass of this thread's elements; 0 for greedy rows.
    pub(super) of_thread: Value<'k, u64>,
}
