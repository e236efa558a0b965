//! Histogram of a row's scores, counted in the first pass, and the scores around a threshold that it shows.
//!
//! 1. The first loads of a CTA give a preliminary maximum. Buckets begin [`OCTAVES_ABOVE`] octaves of weight above it.
//! 2. The first pass counts the elements per bucket, one addition to shared memory per element.
//! 3. Once the maximum of the row is known, the count of a bucket times the weight at its center estimates its mass. A prefix
//!    sum over the buckets of all CTAs finds the bucket in which top-k or top-p ends.
//!
//! Results do not depend on these estimates: the second pass sums the exact masses above and in the bucket, and a row for which
//! they show another threshold takes the slower path of `row_filters`. So does a row with elements above the buckets.

use super::{
    CtaCollectives, MassScale, Number, RowKind, RowReader, RowStats, SamplingRequest, WeightRule,
    mass::{key, of_key, part_of},
};
use tilewright_ptx::{AtomicOp, Order, Scope, Shared, Value, Var};

/// Octaves of weight that the buckets of a row cover.
const OCTAVES: u32 = 44;
/// Octaves above the preliminary maximum: elements that the first loads miss may be far above it.
const OCTAVES_ABOVE: u32 = 20;
/// Bits of a count in a sum; masses have the rest.
const COUNT_BITS: u32 = 20;
/// Maximum elements of a list that is ranked by counting, with a reserve for errors of the estimate.
const MAX_LISTED: u64 = 192;
/// The largest elements, which are listed where top-p ends among them: few elements hold most of the mass, and the estimate may be
/// off by one of them.
const ALWAYS_LISTED: u64 = 32;
/// Elements next to the bucket of the threshold that are listed on either side.
const ELEMENTS_BESIDE: f32 = 64.0;
/// Adding it rounds to an integer, which is in the low bits of the sum.
const ROUND: f32 = 1.5 * (1 << 23) as f32;

/// Histogram of the scores of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowHistogram<'k> {
    cta: CtaCollectives<'k>,
    kind: RowKind,
    vocab: Value<'k, u32>,
    /// Whether this row is counted.
    pub(super) is_counted: Value<'k, bool>,
    /// Shares of all buckets per unit of [`Self::position`].
    factor: Value<'k, f32>,
    /// Units per bucket.
    inverse: Value<'k, f32>,
    /// Added to a position in shares: where the buckets of this CTA begin.
    offset: Var<'k, f32>,
    counts: Shared<'k, u32>,
    /// Counts of all CTAs, in two halves.
    sums: [Shared<'k, u32>; 2],
    /// The preliminary maximum of this CTA in buckets.
    origin: Shared<'k, f32>,
    /// The bucket of the threshold, and that of the first element after [`ALWAYS_LISTED`].
    found: Shared<'k, u32>,
    /// The sums before and in the bucket of the threshold.
    found_sums: Shared<'k, u64>,
}

/// The scores around the end of top-k or top-p.
#[derive(Debug, Clone, Copy)]
pub(super) struct ThresholdRange<'k> {
    /// Whether the histogram shows it.
    pub(super) is_known: Value<'k, bool>,
    pub(super) lower: Value<'k, f32>,
    /// Elements from here on are not listed.
    pub(super) upper: Value<'k, f32>,
    pub(super) has_upper: Value<'k, bool>,
}

impl<'k> RowHistogram<'k> {
    #[track_caller]
    pub(super) fn new<T: Number>(
        cta: &CtaCollectives<'k>,
        row: &RowReader<'k, T>,
        kind: RowKind,
        request: &SamplingRequest<'k>,
    ) -> Self {
        let k = cta.k;
        let per_octave = Self::buckets(cta) as f32 / OCTAVES as f32;
        let (last, log2_e) = (Self::last(cta), std::f32::consts::LOG2_E);
        let [factor, inverse] = match kind {
            RowKind::Logits => [
                k.constant(per_octave * log2_e / last) / request.temperature,
                request.temperature * (per_octave * log2_e).recip(),
            ],
            // the exponent and the leading digits of a weight
            RowKind::Probs | RowKind::Scores => {
                [per_octave * 2_f32.powi(-23) / last, 2_f32.powi(23) / per_octave].map(|of| k.constant(of))
            }
        };
        let is_drawn = match kind {
            RowKind::Logits => request.temperature.ne(0.0),
            RowKind::Probs | RowKind::Scores => k.constant(true),
        };
        Self {
            cta: *cta,
            kind,
            vocab: row.vocab,
            is_counted: is_drawn
                & request.is_histogram_used(cta, row.vocab)
                & row.vocab.lt(1_u32 << COUNT_BITS),
            factor,
            inverse,
            offset: k.var("offset", 0.0_f32),
            counts: k.shared("histogram", Self::buckets(cta) as usize, 16),
            sums: if cta.buckets() * 2 >= Self::buckets(cta) {
                [cta.low, cta.high]
            } else {
                ["low", "high"].map(|half| k.shared(half, Self::buckets(cta) as usize / 2, 16))
            },
            origin: k.shared("origin", 1, 4),
            found: k.shared("found_buckets", 2, 4),
            found_sums: k.shared("found_sums", 2, 8),
        }
    }

    fn buckets(cta: &CtaCollectives<'k>) -> u32 {
        if cta.threads >= 512 { 4096 } else { 1024 }
    }

    /// The bucket of a score at the preliminary maximum.
    fn origin_bucket(cta: &CtaCollectives<'k>) -> u32 {
        Self::buckets(cta) - 1 - Self::buckets(cta) * OCTAVES_ABOVE / OCTAVES
    }

    /// A number in the order of scores, linear in the logarithm of the weight, or nearly so.
    #[track_caller]
    fn position(&self, x: Value<'k, f32>) -> Value<'k, f32> {
        match self.kind {
            RowKind::Logits => x,
            RowKind::Probs | RowKind::Scores => (x + 0.0).reinterpret::<i32>().to_f32(),
        }
    }

    /// [`Self::position`] in buckets.
    #[track_caller]
    fn in_buckets(&self, x: Value<'k, f32>) -> Value<'k, f32> {
        self.position(x) * (self.factor * Self::last(&self.cta))
    }

    /// The score at a position in buckets.
    #[track_caller]
    fn score_at(&self, in_buckets: Value<'k, f32>) -> Value<'k, f32> {
        let position = in_buckets * self.inverse;
        match self.kind {
            RowKind::Logits => position,
            RowKind::Probs | RowKind::Scores => {
                // rounded to 2^8 units in the last place
                let rounded = (position * 2_f32.powi(-8)).max(0.0).min(8_388_607.0) + 2_f32.powi(23);
                (rounded.reinterpret::<u32>() << 8).reinterpret()
            }
        }
    }

    /// Clears the buckets and sets their range by the maximum of the threads' first elements.
    #[track_caller]
    pub(super) fn begin(&self, thread_max: Value<'k, f32>) {
        let (k, cta) = (self.cta.k, &self.cta);
        for bucket in (0..Self::buckets(cta)).step_by(cta.threads as usize) {
            self.counts.at(k.thread() + bucket).store(0_u32);
        }
        let max = of_key(cta.max_of_cta(key(thread_max)));
        let origin = round(self.in_buckets(max));
        k.when(k.thread().eq(0), || self.origin.store(origin));
        self.offset.set((k.constant(Self::origin_bucket(cta) as f32) - origin) * (1.0 / Self::last(cta)));
    }

    /// The highest bucket.
    fn last(cta: &CtaCollectives<'k>) -> f32 {
        (Self::buckets(cta) - 1) as f32
    }

    /// Counts an element.
    #[track_caller]
    pub(super) fn count(&self, x: Value<'k, f32>) {
        // numbers in [2, 4) have steps of 2^-22, and four times the bits of 2 are 0 modulo 2^32
        let step = 2_f32.powi(-22);
        let share = self.position(x).mul_add_saturated(self.factor, self.offset.get());
        let bucket = share.mul_add(Self::last(&self.cta) * step, 2.0).reinterpret::<u32>();
        self.counts.at(bucket).reduce(AtomicOp::AddU32, 1_u32, Order::Relaxed, Scope::Cta);
    }

    /// The scores around the end of top-k, or of top-p of all elements. The row is counted.
    #[track_caller]
    pub(super) fn threshold_range(
        &self,
        rule: &WeightRule<'k>,
        stats: &RowStats<'k>,
        request: &SamplingRequest<'k>,
        is_top_k: Value<'k, bool>,
    ) -> ThresholdRange<'k> {
        let (k, cta, buckets) = (self.cta.k, &self.cta, Self::buckets(&self.cta));
        let mass_scale = MassScale::new(self.vocab, rule.max_weight());
        let top = round(self.in_buckets(stats.max));
        let is_above = k.var("is_above", false);
        // the bucket of each CTA at the maximum
        let tops: Vec<_> = cta
            .of_all_ctas(self.origin)
            .map(|origin| {
                let bucket = top - origin.load() + Self::origin_bucket(cta) as f32;
                is_above.set(is_above.get() | !bucket.lt((buckets - 1) as f32));
                (bucket.max(0.0).min((buckets - 1) as f32) + ROUND).reinterpret::<u32>() - ROUND.to_bits()
            })
            .collect();
        let counts = self.counts_of_thread(&tops);
        let first = k.thread() * counts.len() as u32;
        let top_score = top - first.reinterpret::<i32>().to_f32();
        let first_weight = rule.normal_weight(self.score_at(top_score).min(stats.max));
        let weight_of = |i: u32| match self.kind {
            RowKind::Logits => first_weight * (-(i as f32) * OCTAVES as f32 / buckets as f32).exp2(),
            RowKind::Probs | RowKind::Scores => {
                rule.normal_weight(self.score_at(top_score - i as f32).min(stats.max))
            }
        };
        let packed = |i: u32, count: Value<'k, u32>| {
            // at most 44 bits for the mass of a row
            let mass = (mass_scale.mass(weight_of(i)) >> 19_u32).low().to_u64() * count.to_u64();
            (mass << COUNT_BITS) + count.to_u64()
        };
        let sums: Vec<_> = (0..).zip(&counts).map(|(i, &count)| packed(i, count)).collect();
        let all = sums[1..].iter().fold(sums[0], |sum, &of| sum + of);
        k.when(k.thread().lt(2), || {
            self.found.at(k.thread()).store(0_u32);
            self.found_sums.at(k.thread()).store(0_u64);
        });
        let (before, total) = cta.exclusive_sum_and_total(all);
        let count = |sum: Value<'k, u64>| sum & ((1_u64 << COUNT_BITS) - 1);
        let amount = |sum: Value<'k, u64>| is_top_k.select(count(sum), sum >> COUNT_BITS);
        let target = is_top_k.select(request.top_k.to_u64(), part_of(request.top_p, total >> COUNT_BITS));
        let sums = BucketSums { first, sums, before, all };
        sums.find(&amount, target, |bucket, before, of| {
            self.found.store(bucket);
            self.found_sums.store(before);
            self.found_sums.at(1).store(of);
        });
        sums.find(&count, k.constant(ALWAYS_LISTED + 1), |bucket, _, _| self.found.at(1).store(bucket));
        k.sync_threads();
        let [below, end] = [0, 1].map(|i| self.found.at(i).load());
        let [before, of_bucket] = [0, 1].map(|i| count(self.found_sums.at(i).load()));
        let has_upper = !is_top_k & (before + of_bucket).gt(MAX_LISTED);
        let beside = k.constant(ELEMENTS_BESIDE) / of_bucket.low().max(1).reinterpret::<i32>().to_f32();
        let beside = is_top_k.select(0.125, beside.max(0.125).min(8.0));
        let center = top - below.reinterpret::<i32>().to_f32();
        let score = |in_buckets| self.score_at(in_buckets).min(stats.max);
        let always = is_top_k.select(f32::INFINITY, top - end.reinterpret::<i32>().to_f32() + 0.5);
        ThresholdRange {
            is_known: of_bucket.ne(0) & !is_above.get(),
            lower: score((center - 0.5 - beside).min(always)),
            upper: score(center + 0.5 + beside),
            has_upper,
        }
    }

    /// The counts of adjacent buckets over all CTAs, the highest first: those below the buckets `tops` of the CTAs.
    #[track_caller]
    fn counts_of_thread(&self, tops: &[Value<'k, u32>]) -> Vec<Value<'k, u32>> {
        let (k, cta, buckets) = (self.cta.k, &self.cta, Self::buckets(&self.cta));
        // adjacent threads read adjacent buckets of other CTAs, then each thread those that it sums, the highest first
        let [low, high] = self.sums;
        let half = buckets / 2;
        for begin in (0..buckets).step_by(cta.threads as usize) {
            let below = k.thread() + begin;
            let of_cta = |(counts, &top): (Shared<'k, u32>, &Value<'k, u32>)| {
                let there = below.lt(top); // without bucket 0
                there.select(counts.at(there.select(top - below, 0)).load(), 0)
            };
            let count = cta.of_all_ctas(self.counts).zip(tops).map(of_cta);
            let count = count.fold(k.constant(0_u32), |sum, count| sum + count);
            let sums = if begin < half { low.at(below) } else { high.at(below - half) };
            sums.store(count);
        }
        k.sync_threads();
        let each = buckets / cta.threads;
        let first = k.thread() * each;
        let is_low = first.lt(half);
        let of_thread = k.var("counts_address", low.at(first).address());
        k.when(!is_low, || of_thread.set(high.at(first - half).address()));
        let of_thread = Shared::<u32>::new(of_thread.get());
        (0..each).step_by(4).flat_map(|i| of_thread.plus(i as usize).load_vector::<4>()).collect()
    }
}

/// Sums of adjacent buckets of a thread, the highest bucket first.
struct BucketSums<'k> {
    first: Value<'k, u32>,
    sums: Vec<Value<'k, u64>>,
    /// Sum of the buckets above.
    before: Value<'k, u64>,
    /// Sum of these buckets.
    all: Value<'k, u64>,
}

impl<'k> BucketSums<'k> {
    /// Calls `publish` with the bucket in which the running `amount` reaches `target`, the sum before it and its own.
    #[track_caller]
    fn find(
        &self,
        amount: &dyn Fn(Value<'k, u64>) -> Value<'k, u64>,
        target: Value<'k, u64>,
        publish: impl Fn(Value<'k, u32>, Value<'k, u64>, Value<'k, u64>),
    ) {
        let k = target.builder();
        let reaches = |before, after| amount(before).lt(target) & amount(after).ge(target);
        k.when(reaches(self.before, self.before + self.all), || {
            let mut before = self.before;
            for (i, &of) in (0..).zip(&self.sums) {
                let after = before + of;
                k.when(reaches(before, after), || publish(self.first + i, before, of));
                before = after;
            }
        });
    }
}

/// The nearest integer, if it is below 2^22.
#[track_caller]
fn round(x: Value<'_, f32>) -> Value<'_, f32> {
    (x + ROUND) - ROUND
}

/// Buckets of weights, heaviest last.
#[derive(Debug, Clone, Copy)]
pub(super) struct WeightBuckets<'k> {
    /// Bits of the largest weight.
    largest: Value<'k, u32>,
    shift: Value<'k, u32>,
    last: u32,
}

impl<'k> WeightBuckets<'k> {
    /// Buckets over twice as many octaves, at least 1, below the largest weight.
    #[track_caller]
    pub(super) fn over(cta: &CtaCollectives<'k>, largest: Value<'k, f32>, octaves: Value<'k, u32>) -> Self {
        let last = cta.buckets() - 1;
        let shift = cta.k.constant(32 + 23 - (last + 1).ilog2()) - (octaves * 2 - 1).leading_zeros();
        Self { largest: largest.reinterpret(), shift, last }
    }

    /// The bucket of a weight; the first one has all that are too small for others.
    #[track_caller]
    pub(super) fn of(&self, weight: Value<'k, f32>) -> Value<'k, u32> {
        let bits = weight.reinterpret::<u32>();
        let below = (self.largest.max(bits) >> self.shift) - (bits >> self.shift);
        below.builder().constant(self.last) - below.min(self.last)
    }
}
