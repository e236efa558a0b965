//! Weights of a row and the filters on them.
//!
//! Each filter is a threshold: it keeps weights at or above it. Thresholds are found in the candidate list if it
//! holds the `top_k` largest weights, or the mass share `top_p`; otherwise in the row.

use super::{
    CandidateList, Candidates, ExpAccuracy, KeptMasses, LIST_CAPACITY, ListLimits, MassScale, Number,
    RowHistogram, RowMasses, RowReader, RowStats, SamplingRequest, ThresholdRange, WeightRule, mass::part_of,
};
use tilewright_ptx::{Builder, Value, Var};

/// Active filters of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filters<'k> {
    pub(super) top_k: Value<'k, bool>,
    pub(super) top_p: Value<'k, bool>,
    pub(super) min_p: Value<'k, bool>,
    /// Whether top-p applies to all weights, not only to those that top-k keeps.
    pub(super) top_p_of_all: Value<'k, bool>,
}

impl<'k> Filters<'k> {
    #[track_caller]
    fn new(request: &SamplingRequest<'k>, vocab: Value<'k, u32>) -> Self {
        let top_k = request.top_k.lt(vocab);
        let (top_p, min_p) = (request.top_p.lt(1.0), request.min_p.gt(0.0));
        Self { top_k, top_p, min_p, top_p_of_all: request.joint | !top_k }
    }

    /// Whether the total mass of the row is used.
    #[track_caller]
    fn needs_total(&self) -> Value<'k, bool> {
        (self.top_p & self.top_p_of_all) | !self.any()
    }

    #[track_caller]
    fn any(&self) -> Value<'k, bool> {
        self.top_k | self.top_p | self.min_p
    }
}

/// A [`ThresholdRange`], unknown unless set.
#[derive(Debug, Clone, Copy)]
struct RangeVars<'k> {
    is_known: Var<'k, bool>,
    lower: Var<'k, f32>,
    upper: Var<'k, f32>,
    has_upper: Var<'k, bool>,
}

impl<'k> RangeVars<'k> {
    #[track_caller]
    fn find(
        k: &'k Builder,
        stats: &RowStats<'k>,
        range: impl FnOnce(RowHistogram<'k>) -> ThresholdRange<'k>,
    ) -> Self {
        let vars = Self {
            is_known: k.var("range_is_known", false),
            lower: k.var("lower", 0.0_f32),
            upper: k.var("upper", 0.0_f32),
            has_upper: k.var("has_upper", false),
        };
        if let Some(histogram) = stats.histogram {
            k.when(histogram.is_counted, || {
                let range = range(histogram);
                vars.is_known.set(range.is_known);
                vars.lower.set(range.lower);
                vars.upper.set(range.upper);
                vars.has_upper.set(range.is_known & range.has_upper);
            });
        }
        vars
    }
}

/// Weights of a valid row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weights<'k, T> {
    pub(super) candidates: Candidates<'k, T>,
    pub(super) rule: WeightRule<'k>,
    pub(super) mass_scale: MassScale<'k>,
    pub(super) request: SamplingRequest<'k>,
    pub(super) filters: Filters<'k>,
    /// Whether the list has an upper limit, and [`RowMasses::part`] is the mass above it.
    pub(super) has_upper: Value<'k, bool>,
    /// The limits of the listed weights.
    pub(super) list_weights: [Value<'k, f32>; 2],
    pub(super) masses: RowMasses<'k>,
    /// Mass of the list, which may have been replaced.
    pub(super) listed_mass: Var<'k, u64>,
    pub(super) kept: KeptMasses<'k>,
}

impl<'k, T: Number> Weights<'k, T> {
    /// Reads a valid row: computes the total mass and fills the candidate list.
    #[track_caller]
    pub(super) fn new(
        list: CandidateList<'k>,
        row: RowReader<'k, T>,
        accuracy: ExpAccuracy,
        stats: &RowStats<'k>,
        request: &SamplingRequest<'k>,
    ) -> Self {
        let cta = list.cta;
        let k = cta.k;
        let rule = WeightRule::new(&cta, &row, accuracy, stats, request);
        let request = request.without_filters(k, rule.greedy);
        let filters = Filters::new(&request, row.vocab);
        let mass_scale = MassScale::new(row.vocab, rule.max_weight());
        let candidates = Candidates::new(list, row);

        let row_fits = list.holds(row.vocab);
        let wanted = filters.top_k.select(request.top_k, cta.groups() / 2);
        let (wanted, worthwhile) = RowStats::list_size(&cta, wanted);
        let range = RangeVars::find(k, stats, |histogram| {
            histogram.threshold_range(&rule, stats, &request, filters.top_k)
        });
        let use_list = filters.any() & (worthwhile | range.is_known.get()) & !row_fits;
        let limits = ListLimits {
            min_weight: k.var("least", row_fits.select(-1.0_f32, f32::INFINITY)),
            min_score: k.var("least_score", row_fits.select(f32::NEG_INFINITY, f32::INFINITY)),
            // without a list, too
            skips_rest: k.var("skips_rest", !use_list & !row_fits & !filters.needs_total()),
            max_weight: k.var("above", f32::INFINITY),
            skips_rest_by_element: range.is_known.get(),
        };
        let is_min_p_alone = filters.min_p & !filters.top_k & !filters.top_p;
        k.when(use_list & !is_min_p_alone, || {
            let bound = k.var("bound", range.lower.get());
            k.when(!range.is_known.get(), || bound.set(stats.list_threshold(&cta, wanted)));
            limits.set_min_score(&rule, bound.get(), filters.needs_total());
            // only where the lower limit holds for scores, too
            k.when(range.has_upper.get() & limits.min_score.get().gt(f32::NEG_INFINITY), || {
                limits.max_weight.set(rule.weight(k.constant(0), range.upper.get()));
            });
        });
        k.when(use_list & is_min_p_alone, || limits.set_min_weight(&rule, request.min_p * rule.max_weight()));
        let masses = limits.fill(&candidates, &rule, mass_scale, stats);
        let count = list.count();
        let holds_top_k = !filters.top_k | count.ge(request.top_k);
        // without this share, top-p keeps all that a list of top-k has
        let holds_top_p = !(filters.top_p & filters.top_p_of_all)
            | filters.top_k
            | masses.part.ge(part_of(request.top_p, masses.total));
        let has_upper = limits.has_upper();
        let suffices = use_list & count.le(LIST_CAPACITY) & holds_top_k & holds_top_p & !has_upper;
        candidates.listed.set(rule.greedy | row_fits | suffices);
        let listed_mass = k.var("listed_mass", masses.part);
        let kept = KeptMasses {
            known: k.var("kept_is_known", !filters.any()),
            all: k.var("kept_mass", masses.total),
        };
        let list_weights = [limits.min_weight.get(), limits.max_weight.get()];
        let weights = Self {
            candidates,
            rule,
            mass_scale,
            request,
            filters,
            has_upper,
            list_weights,
            masses,
            listed_mass,
            kept,
        };
        k.when(filters.top_k & !candidates.listed.get(), || weights.list_top_k(stats));
        weights
    }

    /// Weight of an element.
    #[track_caller]
    pub(super) fn weight(&self, index: Value<'k, u32>, x: Value<'k, f32>) -> Value<'k, f32> {
        self.rule.weight(index, x)
    }

    /// Applies the filters.
    #[track_caller]
    pub(super) fn apply_filters(&self) -> KeptSet<'k> {
        let (k, filters) = (self.candidates.cta.k, &self.filters);
        let by_k = k.var("by_k", 0.0_f32);
        let (begin, end) = (k.var("ties_begin", 0_u32), k.var("ties_end", u32::MAX));
        k.when(filters.top_k, || {
            self.find_top_k(|kth, from, to| {
                by_k.set(kth);
                begin.set(from);
                end.set(to);
            });
        });
        let (by_k, ties) = (by_k.get(), (begin.get(), end.get()));
        // greedy rows keep weight 1 only: all other weights are 0
        let min_weight = self.rule.greedy.select(1.0_f32, by_k);
        let floor = k.var("floor", min_weight);
        let kept_by_k = KeptSet { floor: min_weight, by_k, ties, mass: self.masses.total };
        k.when(filters.top_p, || floor.set(by_k.max(self.top_p(&kept_by_k))));
        k.when(filters.min_p, || floor.set(floor.get().max(self.request.min_p * self.rule.max_weight())));
        let kept = KeptSet { floor: floor.get(), ..kept_by_k };
        self.kept.known.set(self.kept.known.get() & !filters.min_p);
        k.when(!self.kept.known.get(), || self.kept.all.set(self.mass_of(&kept)));
        KeptSet { mass: self.kept.all.get(), ..kept }
    }

    /// Finds the `top_k`-th largest weight and the index range of its kept ties.
    #[track_caller]
    fn find_top_k(&self, set: impl Fn(Value<'k, f32>, Value<'k, u32>, Value<'k, u32>)) {
        let (k, candidates) = (self.candidates.cta.k, &self.candidates);
        let value = |index, x| self.weight(index, x);
        let top_k = self.request.top_k.to_u64();
        let (kth, above) = candidates.threshold(&value, &|_, _| k.constant(1_u64), top_k);
        set(kth, k.constant(0), k.constant(u32::MAX));
        k.when(self.request.ties.ne(0), || {
            let is_tie = |_, weight: Value<'k, f32>| weight.eq(kth).select(1_u64, 0_u64);
            let remaining = top_k - above;
            let tie_count = candidates.sum(&value, &is_tie);
            let first = self.request.ties.eq(1);
            let index = candidates.first(&value, &is_tie, first.select(remaining, tie_count - remaining + 1));
            set(kth, first.select(0_u32, index), first.select(index + 1, u32::MAX));
        });
    }

    /// Threshold of top-p.
    #[track_caller]
    fn top_p(&self, by_k: &KeptSet<'k>) -> Value<'k, f32> {
        let (k, top_p_of_all) = (self.candidates.cta.k, self.filters.top_p_of_all);
        let mass = k.var("judged", self.masses.total);
        k.when(!top_p_of_all, || mass.set(self.mass_of(by_k)));
        let target = part_of(self.request.top_p, mass.get());
        let top_p_mass = |index, weight| {
            (top_p_of_all | by_k.contains(index, weight)).select(self.mass_scale.mass(weight), 0_u64)
        };
        let found = k.var("top_p_threshold", 0.0_f32);
        let listed = self.candidates.listed.get();
        let is_of_row = !listed & !self.filters.top_k;
        // the threshold of all elements may be below the list of top-k
        let is_listed = !(listed & self.filters.top_k & top_p_of_all) | self.listed_mass.get().ge(target);
        k.when(is_of_row, || found.set(self.top_p_of_row(target)));
        k.when(!is_of_row & is_listed, || {
            let value = |index, x| self.weight(index, x);
            found.set(self.candidates.threshold(&value, &top_p_mass, target).0);
        });
        found.get()
    }

    /// Mass of the kept elements.
    #[track_caller]
    pub(super) fn mass_of(&self, kept: &KeptSet<'k>) -> Value<'k, u64> {
        let mass = |index, weight| kept.contains(index, weight).select(self.mass_scale.mass(weight), 0_u64);
        self.candidates.sum(&|index, x| self.weight(index, x), &mass)
    }

    /// First token at which the running kept mass exceeds `fraction` / 2^64 of the total kept mass, which is the last sum
    /// over the row's threads.
    #[track_caller]
    pub(super) fn draw(&self, kept: &KeptSet<'k>, fraction: Value<'k, u64>) -> Value<'k, u32> {
        let mass = |index, weight| kept.contains(index, weight).select(self.mass_scale.mass(weight), 0_u64);
        let target = super::mass::fraction_of(fraction, kept.mass) + 1;
        self.candidates.first(&|index, x| self.weight(index, x), &mass, target)
    }
}

/// Elements of a row that the filters keep.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptSet<'k> {
    /// Minimum kept weight.
    floor: Value<'k, f32>,
    /// Weight whose ties are kept only in the index range `ties`.
    by_k: Value<'k, f32>,
    ties: (Value<'k, u32>, Value<'k, u32>),
    /// Total kept mass.
    pub(super) mass: Value<'k, u64>,
}

impl<'k> KeptSet<'k> {
    /// Whether an element is kept.
    #[track_caller]
    pub(super) fn contains(&self, index: Value<'k, u32>, weight: Value<'k, f32>) -> Value<'k, bool> {
        let between = index.ge(self.ties.0) & index.lt(self.ties.1);
        weight.ge(self.floor) & (weight.gt(self.by_k) | between)
    }
}
