//! Sigmoid attention: independent gates per key.

use super::{At, Number, Variant};

/// `o = Σ_j sigmoid(s[j] + bias) · v[j]`, without softmax and without LSE (Ramapuram et al. 2024, FlashSigmoid). The paper's
/// bias is `-ln(kv_len)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FlashSigmoid {
    bias: f32,
}

impl FlashSigmoid {
    /// `bias` is added to every logit.
    pub fn new(bias: f32) -> Self {
        Self { bias }
    }
}

impl Variant for FlashSigmoid {
    fn name(&self) -> &str {
        "flash_sigmoid"
    }

    fn has_softmax(&self) -> bool {
        false
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        (logit + at.scalar("bias", self.bias)).sigmoid()
    }
}
