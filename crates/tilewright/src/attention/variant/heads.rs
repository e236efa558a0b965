//! Variants with a number for each head: attention sinks and scales.

use super::{At, Number, Properties, Reads, Variant, lists::check_heads};
use crate::{Problem, Result};

const HEADS: Reads = Reads::QO_HEAD.and(Reads::TABLES);

/// A learned logit for each head that takes its share of the softmax and has no value: the denominator becomes
/// `Σ_j e^s[j] + e^sink[h]`, and the LSE counts it (StreamingLLM, gpt-oss). Applied once to a row, after all its keys.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSinks {
    sinks: Vec<f32>,
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
        Ok(Self { sinks })
    }
}

impl Variant for AttentionSinks {
    fn name(&self) -> &str {
        "attention_sinks"
    }

    fn properties(&self) -> Properties {
        Properties::NONE.reading(HEADS)
    }

    fn check(&self, problem: &Problem) -> Result<()> {
        check_heads("attention_sinks", "sinks", self.sinks.len(), problem)
    }

    #[inline(always)]
    fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
        let sink = at.read("sinks", &self.sinks, at.qo_head());
        // this order keeps NaN; a row without keys has max = -inf, whose sum of 0 stays 0
        let merged = sink.max(max);
        (merged, sum * (max - merged).exp() + (sink - merged).exp())
    }
}

/// `s' = qk[h] · s` and `o' = vo[h] · o`: the scales of quantized heads (q and k together, v), without touching the LSE's
/// meaning.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadScales {
    qk: Vec<f32>,
    vo: Vec<f32>,
}

impl HeadScales {
    /// Both `[num_qo_heads]`: factors on logits, beside the problem's scale, and on outputs.
    pub fn new(qk: Vec<f32>, vo: Vec<f32>) -> Self {
        Self { qk, vo }
    }
}

impl Variant for HeadScales {
    fn name(&self) -> &str {
        "head_scales"
    }

    fn properties(&self) -> Properties {
        Properties { linear_output: true, ..Properties::NONE.reading(HEADS) }
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
