//! Buckets of weights by binary logarithm, and estimates of their masses.
//!
//! Weights of a bucket share the bits of their f32 pattern from bit `shift` on. So a bucket's mass follows from the number
//! of its weights and the sum of their lower bits: two additions per weight, while a 64-bit sum needs the carry of the
//! first. The sums must fit into 32 bits, so long rows drop the lowest bits.

use super::{cta::CtaCollectives, mass::MassScale};
use tilewright_ptx::build::Value;

/// Octaves of [`WeightBuckets::fixed`].
const FIXED_OCTAVES: u32 = 16;

/// Buckets of weights, heaviest last.
#[derive(Debug, Clone, Copy)]
pub(super) struct WeightBuckets<'k> {
    /// Bits of the largest weight.
    largest: Value<'k, u32>,
    pub(super) shift: Value<'k, u32>,
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

    /// Buckets over the octaves whose masses [`CountedBuckets`] estimates.
    #[track_caller]
    fn fixed(cta: &CtaCollectives<'k>, largest: Value<'k, f32>) -> Self {
        Self::over(cta, largest, cta.k.constant(FIXED_OCTAVES / 2))
    }

    /// The same with another shift.
    pub(super) fn with_shift(self, shift: Value<'k, u32>) -> Self {
        Self { shift, ..self }
    }

    /// The bucket of a weight; the first one has all that are too small for others.
    #[track_caller]
    pub(super) fn of(&self, weight: Value<'k, f32>) -> Value<'k, u32> {
        let bits = weight.reinterpret::<u32>();
        let below = (self.largest.max(bits) >> self.shift) - (bits >> self.shift);
        below.builder().constant(self.last) - below.min(self.last)
    }

    /// Bits of the least weight of a bucket that is not empty.
    #[track_caller]
    fn least(&self, bucket: Value<'k, u32>) -> Value<'k, u32> {
        let below = bucket.builder().constant(self.last) - bucket;
        let top = self.largest >> self.shift;
        (top - below.min(top)) << self.shift
    }
}

/// Counts of weights per bucket, and sums of their lower bits; the first bucket is not counted.
#[derive(Debug, Clone, Copy)]
pub(super) struct CountedBuckets<'k> {
    cta: CtaCollectives<'k>,
    pub(super) buckets: WeightBuckets<'k>,
    /// Lowest bits that are not summed.
    dropped: Value<'k, u32>,
    vocab: Value<'k, u32>,
}

impl<'k> CountedBuckets<'k> {
    #[track_caller]
    pub(super) fn new(cta: &CtaCollectives<'k>, largest: Value<'k, f32>, vocab: Value<'k, u32>) -> Self {
        let buckets = WeightBuckets::fixed(cta, largest);
        let spare = (vocab - 1).leading_zeros();
        Self { cta: *cta, buckets, dropped: buckets.shift.max(spare) - spare, vocab }
    }

    /// Counts a weight.
    #[track_caller]
    pub(super) fn count(&self, weight: Value<'k, f32>) {
        let (k, bucket) = (self.cta.k, self.buckets.of(weight));
        let lower = weight.reinterpret::<u32>() & ((k.constant(1_u32) << self.buckets.shift) - 1);
        k.when(bucket.ne(0), || self.cta.count(bucket, lower >> self.dropped));
    }

    /// The highest and the lowest bucket that may hold the weight at which the mass from the largest weight on reaches
    /// `target`, of `total`; the highest is 0 if a bucket that is not counted may.
    ///
    /// Dropped bits are less than `2^(dropped - 23)` of a mass. Truncation to fixed point adds less than 1 per weight and
    /// term. If the error covers several buckets, the threshold can be in a lower one: the caller checks the exact masses.
    #[track_caller]
    pub(super) fn find(
        &self,
        mass_scale: MassScale<'k>,
        target: Value<'k, u64>,
        total: Value<'k, u64>,
    ) -> [Value<'k, u32>; 2] {
        let error =
            (total >> (self.cta.k.constant(23) - self.dropped)) + (self.vocab.to_u64() << 2_u32) + 4096_u64;
        let least_target = target.max(error + 1) - error;
        let found = self.cta.find_counted(least_target, |bucket, words| {
            let least = self.buckets.least(bucket);
            let of_least = mass_scale.mass(least.reinterpret()) * words.low().to_u64();
            of_least + mass_scale.mass_of_ulps(words.high().to_u64() << self.dropped, least)
        });
        let is_certain = (found.before + found.mass).ge(target + error);
        [found.bucket, is_certain.select(found.bucket, found.bucket.max(1) - 1)]
    }
}
