//! Qwen 3, dense: an RMSNorm on each head of q and k, optional windows in the upper layers.

use super::{Family, LLAMA};
use crate::model::config::{QkNorm, layers::upper_windows};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    reads: &["attention_bias", "use_sliding_window"],
    terms: |_, config| {
        config.qk_norm = Some(QkNorm::Head);
        Ok(())
    },
    layers: upper_windows,
    ..LLAMA
};
