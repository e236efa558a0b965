//! Phi-3, 3.5 and 4-mini: fused projections, partial rotation, LongRoPE, an optional window in every layer.

use super::{Family, LLAMA};
use crate::model::config::layers::{same_window, window};

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    eps: 1e-5,
    partial_rotary: true,
    reads: &[],
    terms: |_, config| {
        config.fused_projections = true;
        Ok(())
    },
    layers: |fields, config| same_window(fields, config, window(fields, None)?),
    ..LLAMA
};
