//! Granite 3: multipliers of embeddings, attention, blocks and logits.

use super::{Family, LLAMA};

pub(super) const FAMILY: Family = Family {
    model_type: "granite",
    class: "GraniteForCausalLM",
    reads: &[
        "attention_bias",
        "mlp_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ],
    terms: |fields, config| {
        let multiplier = |key| Ok(fields.positive(key)?.unwrap_or(1.0) as f32);
        config.attention_scale = Some(multiplier("attention_multiplier")?);
        config.embedding_multiplier = multiplier("embedding_multiplier")?;
        config.residual_multiplier = multiplier("residual_multiplier")?;
        config.logits_divisor = multiplier("logits_scaling")?;
        Ok(())
    },
    ..LLAMA
};
