//! Position biases: ALiBi, and a learned table of relative positions.

use super::{At, Number, Variant, lists::check_heads};
use crate::{Problem, Result};

/// `s' = s + slope[h] · (j - p)` for the query at position `p` and the key at `j` (Press et al. 2021, ALiBi). Positions
/// are absolute, so the LSE is exact for appended queries too.
#[derive(Debug, Clone, PartialEq)]
pub struct Alibi {
    slopes: Vec<f32>,
    is_bound: bool,
}

impl Alibi {
    /// The paper's slopes for any number of query heads.
    pub fn new(num_qo_heads: usize) -> Self {
        Self { slopes: Self::slopes(num_qo_heads), is_bound: false }
    }

    /// Slopes that each run binds as the table `slopes`.
    pub fn bound(num_qo_heads: usize) -> Self {
        Self { slopes: vec![0.0; num_qo_heads], is_bound: true }
    }

    /// With `n` the largest power of two up to the number of heads: `2^(-8 (h + 1) / n)` for the first `n`. The others
    /// take the odd powers of `2^(-4 / n)`, which interleave with the first.
    pub fn slopes(num_qo_heads: usize) -> Vec<f32> {
        let Some(log) = num_qo_heads.checked_ilog2() else { return Vec::new() };
        let n = 1_usize << log;
        let power = |numerator: usize| (-(numerator as f64) / n as f64).exp2() as f32;
        let slope =
            |head: usize| if head < n { power(8 * (head + 1)) } else { power(4 * (2 * (head - n) + 1)) };
        (0..num_qo_heads).map(slope).collect()
    }
}

impl Variant for Alibi {
    fn name(&self) -> &str {
        "alibi"
    }

    fn bound_tables(&self) -> Vec<String> {
        self.is_bound.then(|| "slopes".to_owned()).into_iter().collect()
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        check_heads("alibi", "slopes", self.slopes.len(), problem)
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let slope = at.read("slopes", &self.slopes, at.qo_head());
        slope.mul_add(at.kv() - at.qo(), logit)
    }
}

/// `s' = s + table[h, clamp(j - p, -reach, reach) + reach]`: a learned, clamped relative position bias (Shaw et al.
/// 2018; T5 with its buckets expanded).
#[derive(Debug, Clone, PartialEq)]
pub struct RelativePositionBias {
    table: Vec<f32>,
    reach: usize,
}

impl RelativePositionBias {
    /// `table`: `[num_qo_heads, 2 · reach + 1]`, by key position minus query position, `-reach..=reach`.
    ///
    /// # Errors
    /// When the table's size is not a multiple of `2 · reach + 1`.
    pub fn new(table: Vec<f32>, reach: usize) -> Result<Self> {
        let row = reach.saturating_mul(2).saturating_add(1);
        crate::ensure!(
            table.len().is_multiple_of(row),
            "attention.relative_position_bias",
            "the table has {} elements, which is no multiple of 2 · reach + 1 = {row}",
            table.len()
        );
        Ok(Self { table, reach })
    }
}

impl Variant for RelativePositionBias {
    fn name(&self) -> &str {
        "relative_position_bias"
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        let rows = self.table.len() / (2 * self.reach + 1);
        check_heads("relative_position_bias", "rows of the table", rows, problem)
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let reach = at.scalar("reach", self.reach as f32);
        let distance = (at.kv() - at.qo()).max(-reach).min(reach);
        let row = at.qo_head() * (reach + reach + at.number(1.0));
        logit + at.read("biases", &self.table, row + distance + reach)
    }
}
