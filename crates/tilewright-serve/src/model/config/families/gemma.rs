//! Gemma 2 and 3, whose terms are similar.

use super::{Family, LLAMA, RopeDefaults};
use crate::model::config::{
    LayerKind, ModelConfig, NormPlacement, OPERATOR, QkNorm, Rope,
    fields::Fields,
    layers::{alternating_windows, window},
    rope::rope_object,
};
use tilewright::{Result, activation::Activation, ensure};

const FULL: usize = 0;
const SLIDING: usize = 1;

/// Gemma 2: norms around each block with weights stored minus one, GELU, scaled embeddings, soft caps, and a window in
/// every other layer.
pub(super) const GEMMA2: Family = Family {
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
fn common_terms(fields: &Fields<'_>, config: &mut ModelConfig) -> Result<()> {
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

/// Gemma 3, text only: Gemma 2 with norms on the heads of q and k instead of a soft cap in attention, five windows to one
/// full layer, and a second RoPE base for layers with a window.
pub(super) const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    theta: 1_000_000.0,
    tied: true,
    activation_key: "hidden_activation",
    activation: Activation::GeluTanh,
    reads: &[
        "attention_bias",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "sliding_window_pattern",
        "rope_local_base_freq",
    ],
    terms: |fields, config| {
        common_terms(fields, config)?;
        config.qk_norm = Some(QkNorm::Head);
        config.logits_soft_cap = fields.positive("final_logit_softcapping")?.map(|cap| cap as f32);
        Ok(())
    },
    ropes,
    layers: layers_of_gemma3,
    ..LLAMA
};

/// The rotation of full layers, and that of layers with a window.
fn ropes(family: &Family, fields: &Fields<'_>, config: &ModelConfig) -> Result<Vec<Rope>> {
    let full = family.rope_defaults(config);
    let local_theta = fields.positive("rope_local_base_freq")?;
    let sliding = RopeDefaults { theta: local_theta.unwrap_or(10_000.0), ..full };
    let nested =
        rope_object(fields)?.filter(|object| object.values.values().any(serde_json::Value::is_object));
    let Some(nested) = nested else {
        // scaling applies to full layers only
        return Ok(vec![Rope::read(fields, full)?, Rope::unscaled(sliding)]);
    };
    let key = |key: &&String| !["full_attention", "sliding_attention"].contains(&key.as_str());
    if let Some(key) = nested.values.keys().find(key) {
        let message = format!("{}{key} is not supported beside settings per kind of layer", nested.prefix);
        return Err(tilewright::Error::new(OPERATOR, message));
    }
    let of = |key, prefix, defaults| match nested.object(key, prefix)? {
        Some(object) => Rope::of(&object, fields, defaults),
        None => Ok(Rope::unscaled(defaults)),
    };
    let outer = fields.positive("rope_theta")?;
    ensure!(
        outer.is_none() && local_theta.is_none(),
        OPERATOR,
        "rope_theta and rope_local_base_freq are not supported beside settings per kind of layer"
    );
    Ok(vec![
        of("full_attention", "rope_parameters.full_attention.", full)?,
        of("sliding_attention", "rope_parameters.sliding_attention.", sliding)?,
    ])
}

fn layers_of_gemma3(fields: &Fields<'_>, config: &ModelConfig) -> Result<Vec<LayerKind>> {
    let pattern = fields.size("sliding_window_pattern")?.unwrap_or(6);
    let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    let mut layers = alternating_windows(fields, config, window(fields, Some(4096))?, slides)?;
    for layer in &mut layers {
        layer.rope = Some(if layer.slides { SLIDING } else { FULL });
    }
    Ok(layers)
}
