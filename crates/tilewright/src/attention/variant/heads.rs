//! Variants with a parameter per head: attention sinks and head scales.

use super::{At, Number, Variant, lists::check_heads};
use crate::{Problem, Result};

/// A learned logit per head that adds to the softmax denominator and has no value: the denominator is `Σ_j e^s[j] +
/// e^sink[h]`, and the LSE includes it (StreamingLLM, gpt-oss). Applied once per row, after all keys.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSinks {
    sinks: Vec<f32>,
    is_bound: bool,
}

impl AttentionSinks {
    /// `sinks`: `[num_qo_heads]`, natural-log logits.
    ///
    /// # Errors
    /// When one is not finite.
    pub fn new(sinks: Vec<f32>) -> Result<Self> {
        for (head, sink) in sinks.iter().enumerate() {
            crate::ensure!(
                sink.is_finite(),
                "attention.attention_sinks",
                "sinks[{head}] = {sink}, expected a finite number"
            );
        }
        Ok(Self { sinks, is_bound: false })
    }

    /// Sinks that each run binds as the table `sinks`.
    pub fn bound(num_qo_heads: usize) -> Self {
        Self { sinks: vec![0.0; num_qo_heads], is_bound: true }
    }
}

impl Variant for AttentionSinks {
    fn name(&self) -> &str {
        "attention_sinks"
    }

    fn bound_tables(&self) -> Vec<String> {
        self.is_bound.then(|| "sinks".to_owned()).into_iter().collect()
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        check_heads("attention_sinks", "sinks", self.sinks.len(), problem)
    }

    #[inline(always)]
    fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
        let sink = at.read("sinks", &self.sinks, at.qo_head());
        // this operand order propagates NaN; a row without keys has max = -inf and its sum stays 0
        let merged = sink.max(max);
        (merged, sum * (max - merged).exp() + (sink - merged).exp())
    }
}

/// `s' = qk[h] · s` and `o' = vo[h] · o`: scales of quantized heads (q and k combined, v). The meaning of the LSE is
/// unchanged.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadScales {
    qk: Vec<f32>,
    vo: Vec<f32>,
}

impl HeadScales {
    /// Both `[num_qo_heads]`: factors on logits, in addition to the problem's scale, and on outputs.
    pub fn new(qk: Vec<f32>, vo: Vec<f32>) -> Self {
        Self { qk, vo }
    }
}

impl Variant for HeadScales {
    fn name(&self) -> &str {
        "head_scales"
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        check_heads("head_scales", "scales of logits", self.qk.len(), problem)?;
        check_heads("head_scales", "scales of outputs", self.vo.len(), problem)
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        logit * at.read("qk_scales", &self.qk, at.qo_head())
    }

    #[inline(always)]
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        o * at.read("vo_scales", &self.vo, at.qo_head())
    }
}
