//! Gemma 2: norms around each block with weights stored minus one, GELU, scaled embeddings, soft caps, and a window in
//! every other layer.

use super::{Family, LLAMA};
use crate::model::config::{
    ModelConfig, NormPlacement,
    fields::Fields,
    layers::{alternating_windows, window},
};
use tilewright::{Result, activation::Activation};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    tied: true,
    activation_key: "hidden_activation",
    activation: Activation::GeluTanh,
    reads: &["attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"],
    terms: |fields, config| {
        common_terms(fields, config)?;
        config.attention_soft_cap = cap(fields, "attn_logit_softcapping", 50.0)?;
        config.logits_soft_cap = cap(fields, "final_logit_softcapping", 30.0)?;
        Ok(())
    },
    layers: |fields, config| {
        let slides = |layer: usize| layer.is_multiple_of(2);
        alternating_windows(fields, config, window(fields, Some(4096))?, slides)
    },
    ..LLAMA
};

/// The terms of Gemma 2 and 3.
pub(super) fn common_terms(fields: &Fields<'_>, config: &mut ModelConfig) -> Result<()> {
    config.norm_placement = NormPlacement::Around;
    config.norm_offset = 1.0;
    config.embedding_multiplier = (config.hidden_size as f32).sqrt();
    config.rounds_embedding_multiplier = true;
    config.attention_scale =
        Some(fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0).sqrt().recip() as f32);
    Ok(())
}

/// A soft cap: `default` if absent, none if `null`.
fn cap(fields: &Fields<'_>, key: &str, default: f32) -> Result<Option<f32>> {
    Ok(match fields.positive(key)? {
        None if !fields.values.contains_key(key) => Some(default),
        cap => cap.map(|cap| cap as f32),
    })
}
