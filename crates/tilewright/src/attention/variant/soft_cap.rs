//! Soft cap of logits: bounds them to (-cap, cap).

use super::{At, Number, Variant};
use crate::Result;

/// `s' = cap · tanh(s / cap)`, with the scale applied to `s` before (Gemma 2; `logits_soft_cap` of FlashInfer).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftCap {
    cap: f32,
}

impl SoftCap {
    /// `cap` in natural-log units; 50 in Gemma 2, 30 in Grok.
    ///
    /// # Errors
    /// When `cap` is not a normal number above 0. For no cap, omit the variant.
    pub fn new(cap: f32) -> Result<Self> {
        crate::ensure!(
            cap.is_normal() && cap > 0.0,
            "attention.soft_cap",
            "cap = {cap}, expected a normal number above 0"
        );
        Ok(Self { cap })
    }
}

impl Variant for SoftCap {
    fn name(&self) -> &str {
        "soft_cap"
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let cap = at.scalar("cap", self.cap);
        // one division per row instead of one per key
        cap * (logit * (at.number(1.0) / cap)).tanh()
    }
}
