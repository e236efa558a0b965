//! The supported families: each constant says how its family differs from Llama.
//!
//! Invariant: a setting of [`TERMS`], [`COUNTS`] or [`FLAGS`] is read by the family or must be absent or off, so that no term
//! of a forward pass is ignored.

mod gemma;
mod smollm3;

use super::{
    LayerKind, ModelConfig, NormPlacement, OPERATOR, QkNorm, Rope,
    fields::Fields,
    layers::{full_attention, same_window, upper_windows, window},
    rope::RopeDefaults,
};
use serde_json::json;
use tilewright::{Error, Result, activation::Activation, ensure};

/// How a family reads `config.json`.
#[derive(Clone, Copy)]
pub(super) struct Family {
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
    /// The settings of [`TERMS`], [`COUNTS`] and [`FLAGS`] that this family reads, and `no_rope_layers`.
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

/// Mistral: a sliding window in every layer (4,096 if absent, none if `null`), without biases.
const MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    reads: &[],
    layers: |fields, config| same_window(fields, config, window(fields, Some(4096))?),
    ..LLAMA
};

/// Qwen 2 and 2.5: biases on the q, k and v projections, optional windows in the upper layers.
const QWEN2: Family = Family {
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

/// Qwen 3, dense: an RMSNorm on each head of q and k, optional windows in the upper layers.
const QWEN3: Family = Family {
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

/// Phi-3, 3.5 and 4-mini: fused projections, partial rotation, LongRoPE, an optional window in every layer.
const PHI3: Family = Family {
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

/// Granite 3: multipliers of embeddings, attention, blocks and logits.
const GRANITE: Family = Family {
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

/// OLMo 2: norms after each block instead of before, and an RMSNorm over the whole q and k projections.
const OLMO2: Family = Family {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    eps: 1e-5,
    reads: &["attention_bias"],
    terms: |_, config| {
        config.norm_placement = NormPlacement::After;
        config.qk_norm = Some(QkNorm::Projection);
        Ok(())
    },
    ..LLAMA
};

const FAMILIES: [Family; 10] =
    [LLAMA, MISTRAL, QWEN2, QWEN3, gemma::GEMMA2, gemma::GEMMA3, PHI3, GRANITE, OLMO2, smollm3::FAMILY];

/// Settings that change the forward pass of some architectures. Many of those share the tensor names of Llama, so that a
/// checkpoint with the wrong `model_type` would load and compute something else.
const TERMS: [&str; 20] = [
    "quantization_config",
    "compression_config",
    // Gemma
    "hidden_activation",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    // Granite
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    // Cohere
    "logit_scale",
    // MiniCPM
    "scale_emb",
    "scale_depth",
    "dim_model_base",
    // OLMo
    "clip_qkv",
    // LayerNorm in place of RMSNorm: Phi, StableLM, Starcoder 2
    "layer_norm_eps",
    // SmolLM3, Llama 4
    "no_rope_layer_interval",
    "attention_chunk_size",
    "vision_config",
];

/// Settings that count something that a dense model lacks; 0 and 1 mean that it is absent.
const COUNTS: [&str; 10] = [
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "sliding_window_pattern",
    "num_nextn_predict_layers",
];

/// Switches of some architectures, off if absent.
const FLAGS: [&str; 16] = [
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "bias",
    "use_qkv_bias",
    "attention_out_bias",
    "alibi",
    "use_alibi",
    "parallel_attn",
    "use_parallel_residual",
    "rope_interleaved",
    "rope_interleave",
    "use_sliding_window",
    "use_bidirectional_attention",
    "use_qk_norm",
    "attn_temperature_tuning",
];

/// Model types that are refused with a reason.
const REFUSED: [(&str, &[&str]); 4] = [
    (
        "a mixture of experts",
        &[
            "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "granitemoeshared",
            "granitemoehybrid", "phimoe", "gpt_oss", "llama4", "llama4_text", "ernie4_5_moe", "glm4_moe",
            "dbrx", "jamba",
        ],
    ),
    (
        "latent attention (MLA)",
        &["deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3", "longcat_flash", "mistral4"],
    ),
    (
        "a model of images and text",
        &[
            "gemma3", "gemma3n", "mllama", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3",
            "phi4_multimodal",
        ],
    ),
    (
        "a recurrent model",
        &[
            "mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "rwkv", "qwen3_next", "nemotron_h",
            "zamba2", "bamba",
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
    /// Whether this family reads the setting `key`.
    fn reads(&self, key: &str) -> bool {
        self.reads.contains(&key) || self.activation_key == key
    }

    /// Rejects the settings that this family does not read.
    pub(super) fn reject_unread(&self, fields: &Fields<'_>) -> Result<()> {
        let unread = |key: &&str| !self.reads(key);
        FLAGS.into_iter().filter(unread).try_for_each(|key| fields.require(key, &json!(false)))?;
        fields.require("is_causal", &json!(true))?;
        if !self.partial_rotary {
            fields.require_one("partial_rotary_factor")?;
        }
        TERMS.into_iter().filter(unread).try_for_each(|key| fields.reject(key))?;
        for key in COUNTS.into_iter().filter(unread) {
            let absent = fields.get(key).is_none_or(|value| matches!(value.as_u64(), Some(0 | 1)));
            ensure!(absent, OPERATOR, "{key} is not supported");
        }
        if self.reads("no_rope_layers") { Ok(()) } else { reject_layers_without_rope(fields) }
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

/// Rejects a list that excludes a layer from the rotation, as in SmolLM3.
fn reject_layers_without_rope(fields: &Fields<'_>) -> Result<()> {
    for rotates in fields.list("no_rope_layers")? {
        let message = format!("no_rope_layers has {rotates}, which is not supported, expected 1");
        ensure!(rotates.as_u64() == Some(1), OPERATOR, "{message}");
    }
    Ok(())
}

/// One rotation for all layers.
fn one_rope(family: &Family, fields: &Fields<'_>, config: &ModelConfig) -> Result<Vec<Rope>> {
    Ok(vec![Rope::read(fields, family.rope_defaults(config))?])
}
