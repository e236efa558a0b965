//! Buckets of weights by binary logarithm: weights of a bucket share the bits of their f32 pattern from bit `shift` on.

use super::cta::CtaCollectives;
use tilewright_ptx::build::Value;

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
