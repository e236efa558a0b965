//! Mistral: a sliding window in every layer (4,096 if absent, none if `null`), without biases.

use super::{Family, LLAMA};
use crate::model::config::layers::{same_window, window};

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    reads: &[],
    layers: |fields, config| same_window(fields, config, window(fields, Some(4096))?),
    ..LLAMA
};
