//! Weights of elements: `e^((logit - max) / temperature)`, or probabilities as they are, and bounds of scores by weights.

use super::{
    CtaCollectives, ExpAccuracy, MassScale, Number, RowKind, RowReader, RowStats, SamplingRequest, ScaledExp,
};
use std::f32::consts::LN_2;
use tilewright_ptx::Value;

/// Least weight of logits that [`WeightRule::separates`].
const MIN_SEPARABLE_WEIGHT: f32 = 1.0 / (1_u128 << 100) as f32;

/// Conversion of row elements to weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct WeightRule<'k> {
    kind: RowKind,
    max: Value<'k, f32>,
    temperature: Value<'k, f32>,
    exp: ScaledExp<'k>,
    /// Whether all mass is on the first maximum (temperature 0), and its index.
    pub(super) greedy: Value<'k, bool>,
    pub(super) first: Value<'k, u32>,
}

impl<'k> WeightRule<'k> {
    #[track_caller]
    pub(super) fn new<T: Number>(
        cta: &CtaCollectives<'k>,
        row: &RowReader<'k, T>,
        accuracy: ExpAccuracy,
        stats: &RowStats<'k>,
        request: &SamplingRequest<'k>,
    ) -> Self {
        let (k, kind) = (cta.k, stats.kind);
        let greedy = match kind {
            RowKind::Logits => request.temperature.eq(0.0),
            RowKind::Probs | RowKind::Scores => k.constant(false),
        };
        let temperature = greedy.select(1.0, request.temperature);
        let first = k.var("first_of_max", 0_u32);
        k.when(greedy, || first.set(stats.first_of_max(cta, row)));
        let exp = ScaledExp::new(stats.max, temperature, accuracy);
        Self { kind, max: stats.max, temperature, exp, greedy, first: first.get() }
    }

    /// Weight of an element.
    #[track_caller]
    pub(super) fn weight(&self, index: Value<'k, u32>, x: Value<'k, f32>) -> Value<'k, f32> {
        match self.kind {
            RowKind::Logits => {
                let alone = index.eq(self.first).select(1.0_f32, 0.0_f32);
                self.greedy.select(alone, self.exp.at(x))
            }
            // -0 becomes 0
            RowKind::Probs | RowKind::Scores => x + 0.0,
        }
    }

    /// Weight of an element of a row that is not greedy; below 2^-100 an unspecified one that is also below that.
    #[track_caller]
    pub(super) fn normal_weight(&self, x: Value<'k, f32>) -> Value<'k, f32> {
        match self.kind {
            RowKind::Logits => self.exp.at_normal(x),
            RowKind::Probs | RowKind::Scores => x + 0.0,
        }
    }

    /// [`Self::normal_weight`] and its mass.
    #[track_caller]
    pub(super) fn weight_and_mass(
        &self,
        scale: MassScale<'k>,
        x: Value<'k, f32>,
    ) -> (Value<'k, f32>, Value<'k, u64>) {
        match self.kind {
            // masses of weights below 2^-100 are 0
            RowKind::Logits => self.exp.with_mass(x, scale),
            RowKind::Probs | RowKind::Scores => {
                let weight = self.normal_weight(x);
                (weight, scale.mass(weight))
            }
        }
    }

    /// A number below which every score has a smaller weight than `bound`, if [`Self::separates`] its weight.
    ///
    /// Exponents of such weights are at least -70. Subtraction and scaling move them by less than 2^-16, and `exp`
    /// errs by 1.3 ulp, so a distance of 2^-10 in the exponent keeps the order of weights.
    #[track_caller]
    pub(super) fn min_score(&self, bound: Value<'k, f32>) -> Value<'k, f32> {
        match self.kind {
            RowKind::Logits => bound - self.temperature * 2_f32.powi(-10),
            RowKind::Probs | RowKind::Scores => bound,
        }
    }

    /// A number below which every score has a smaller weight than `weight`, if [`Self::separates`] it.
    #[track_caller]
    pub(super) fn score_below(&self, weight: Value<'k, f32>) -> Value<'k, f32> {
        match self.kind {
            RowKind::Logits => {
                // the power of two at or below the weight
                let exponent = ((weight.reinterpret::<u32>() >> 23).reinterpret::<i32>() - 127).to_f32();
                self.min_score(self.max + exponent * self.temperature * LN_2)
            }
            RowKind::Probs | RowKind::Scores => weight,
        }
    }

    /// Whether [`Self::min_score`] holds for a bound with this weight.
    #[track_caller]
    pub(super) fn separates(&self, weight: Value<'k, f32>) -> Value<'k, bool> {
        match self.kind {
            RowKind::Logits => weight.ge(MIN_SEPARABLE_WEIGHT),
            RowKind::Probs | RowKind::Scores => weight.builder().constant(true),
        }
    }

    /// Maximum weight.
    #[track_caller]
    pub(super) fn max_weight(&self) -> Value<'k, f32> {
        match self.kind {
            RowKind::Logits => self.max.builder().constant(1.0),
            RowKind::Probs | RowKind::Scores => self.max + 0.0,
        }
    }
}
