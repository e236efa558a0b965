//! The supported families: each file says how its family differs from Llama.
//!
//! Invariant: a setting of [`TERMS`] is read by the family or must be absent, so that no term of a forward pass is ignored.

mod gemma2;
mod gemma3;
mod granite;
mod mistral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod smollm3;

use super::{
    Architecture, LayerKind, ModelConfig, OPERATOR, Rope, fields::Fields, layers::full_attention,
    rope::RopeDefaults,
};
use serde_json::json;
use tilewright::{Error, Result, activation::Activation};

/// How a family reads `config.json`.
#[derive(Clone, Copy)]
pub(super) struct Family {
    pub(super) architecture: Architecture,
    model_type: &'static str,
    /// The class that `architectures` must name.
    class: &'static str,
    /// The RoPE base if there is none in `config.json`.
    theta: f64,
    /// `rms_norm_eps` if absent.
    pub(super) eps: f64,
    /// Whether a partial rotation is read.
    partial_rotary: bool,
    /// `tie_word_embeddings` if absent.
    pub(super) tied: bool,
    /// The field of the activation.
    pub(super) activation_key: &'static str,
    /// The activation if that is absent.
    pub(super) activation: Activation,
    /// The settings of [`TERMS`] and [`FLAGS`] that this family reads.
    reads: &'static [&'static str],
    /// Sets the terms that differ from Llama's.
    pub(super) terms: fn(&Fields<'_>, &mut ModelConfig) -> Result<()>,
    /// The rotations that layers choose from.
    pub(super) ropes: fn(&Family, &Fields<'_>, &ModelConfig) -> Result<Vec<Rope>>,
    /// Window and rotation of each layer.
    pub(super) layers: fn(&Fields<'_>, &ModelConfig) -> Result<Vec<LayerKind>>,
}

/// The family that the others are described against.
const LLAMA: Family = Family {
    architecture: Architecture::Llama,
    model_type: "llama",
    class: "LlamaForCausalLM",
    theta: 10_000.0,
    eps: 1e-6,
    partial_rotary: false,
    tied: false,
    activation_key: "hidden_act",
    activation: Activation::Silu,
    reads: &["attention_bias", "mlp_bias"],
    terms: |_, _| Ok(()),
    ropes: one_rope,
    layers: full_attention,
};

const FAMILIES: [Family; 10] = [
    LLAMA,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    phi3::FAMILY,
    granite::FAMILY,
    olmo2::FAMILY,
    smollm3::FAMILY,
];

/// Settings of some families that change the forward pass.
const TERMS: [&str; 22] = [
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "no_rope_layers",
    "no_rope_layer_interval",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "attention_chunk_size",
    "clip_qkv",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "kv_lora_rank",
    "q_lora_rank",
    "vision_config",
];

/// Switches of some families, off if absent.
const FLAGS: [&str; 4] = ["attention_bias", "mlp_bias", "use_sliding_window", "use_bidirectional_attention"];

/// Model types that are refused with a reason.
const REFUSED: [(&str, &[&str]); 4] = [
    (
        "a mixture of experts",
        &[
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "olmoe",
            "flex_olmo",
            "granitemoe",
            "granitemoeshared",
            "granitemoehybrid",
            "phimoe",
            "gpt_oss",
            "llama4",
            "llama4_text",
            "ernie4_5_moe",
            "glm4_moe",
            "dbrx",
            "jamba",
        ],
    ),
    (
        "latent attention (MLA)",
        &["deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3", "longcat_flash", "mistral4"],
    ),
    (
        "a model of images and text",
        &[
            "gemma3",
            "gemma3n",
            "mllama",
            "llava",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "mistral3",
            "phi4_multimodal",
        ],
    ),
    (
        "a recurrent model",
        &[
            "mamba",
            "mamba2",
            "falcon_mamba",
            "recurrent_gemma",
            "rwkv",
            "qwen3_next",
            "nemotron_h",
            "zamba2",
            "bamba",
        ],
    ),
];

/// The family of `model_type`, checked against `architectures`.
pub(super) fn find(fields: &Fields<'_>) -> Result<Family> {
    let model_type = fields.text("model_type")?.unwrap_or("");
    let Some(family) = FAMILIES.into_iter().find(|family| family.model_type == model_type) else {
        let refused = REFUSED.iter().find(|(_, types)| types.contains(&model_type));
        let reason = refused.map_or("not supported".to_owned(), |(kind, _)| format!("{kind}, not supported"));
        let supported = FAMILIES.map(|family| family.model_type).join(", ");
        let message = format!("model_type = {model_type:?} is {reason}, expected one of {supported}");
        return Err(Error::new(OPERATOR, message));
    };
    // Other heads on the same layers (classifiers, reward models) produce no logits over tokens.
    fields.require("architectures", &json!([family.class]))?;
    Ok(family)
}

impl Family {
    /// Rejects the settings that this family does not read.
    pub(super) fn reject_unread(&self, fields: &Fields<'_>) -> Result<()> {
        let unread = |key: &&str| !self.reads.contains(key);
        FLAGS.into_iter().filter(unread).try_for_each(|key| fields.require(key, &json!(false)))?;
        if !self.partial_rotary {
            fields.require_one("partial_rotary_factor")?;
        }
        TERMS.into_iter().filter(unread).try_for_each(|key| fields.reject(key))
    }

    /// The parameters of RoPE that are not in `config.json`.
    fn rope_defaults(&self, config: &ModelConfig) -> RopeDefaults {
        RopeDefaults {
            theta: self.theta,
            head_dim: config.head_dim,
            max_position_embeddings: config.max_position_embeddings,
            partial_rotary: self.partial_rotary,
        }
    }
}

/// One rotation for all layers.
fn one_rope(family: &Family, fields: &Fields<'_>, config: &ModelConfig) -> Result<Vec<Rope>> {
    Ok(vec![Rope::read(fields, family.rope_defaults(config))?])
}
