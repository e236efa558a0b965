//! Qwen 2 and 2.5: biases on the q, k and v projections, optional windows in the upper layers.

use super::{Family, LLAMA};
use crate::model::config::layers::upper_windows;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    reads: &["attention_bias", "use_sliding_window"],
    terms: |_, config| {
        // there is no switch for these three biases
        (config.qkv_bias, config.output_bias) = (true, false);
        Ok(())
    },
    layers: upper_windows,
    ..LLAMA
};
