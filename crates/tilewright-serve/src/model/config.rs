//! Model configuration from `config.json`: sizes, RoPE, and one switch per optional term of the forward pass.
//!
//! Invariant: a setting that affects results is either a field of [`ModelConfig`] or an error. Settings without effect on
//! inference (dropout, initializers, caches) are ignored.

mod fields;
mod parameters;
mod rope;

pub use parameters::Parameter;
pub use rope::{Rope, RopeScaling};

use super::{parse_object, read_optional, read_required};
use fields::Fields;
use serde_json::json;
use std::path::Path;
use tilewright::{Dtype, Error, Result, ensure};

const OPERATOR: &str = "model.config";
const SUPPORTED: &str = "llama, mistral, qwen2, qwen3";

/// Settings of other architectures that would change this forward pass.
const UNSUPPORTED: [&str; 9] = [
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
];

/// The family that defines tensor names and defaults. The forward pass depends only on the switches of
/// [`ModelConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 1 to 3, and Mistral without a sliding window.
    Llama,
    /// Qwen 2 and 2.5: biases on the q, k and v projections.
    Qwen2,
    /// Qwen 3, dense: an RMSNorm on each head of q and k.
    Qwen3,
}

/// A decoder-only transformer: pre-norm with RMSNorm, rotary positions, grouped-query causal attention, SiLU-gated
/// MLP (`down(silu(gate(x)) * up(x))`).
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    /// Channels inside the MLP.
    pub intermediate_size: usize,
    /// Transformer layers.
    pub num_hidden_layers: usize,
    /// Query heads; a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Channels of one head, even.
    pub head_dim: usize,
    /// Rows of the embedding and number of logits; at least the tokenizer's vocabulary size.
    pub vocab_size: usize,
    /// Context length, in tokens.
    pub max_position_embeddings: usize,
    /// The epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary position embedding of queries and keys.
    pub rope: Rope,
    /// Whether the output matrix is the embedding, so that there is no `lm_head.weight`.
    pub tie_word_embeddings: bool,
    /// Whether the q, k and v projections add a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of the attention adds a bias.
    pub output_bias: bool,
    /// Whether an RMSNorm per head is applied to q and k before RoPE.
    pub qk_norm: bool,
    /// The dtype of the checkpoint, if specified.
    pub dtype: Option<Dtype>,
    /// The token that begins a sequence.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a sequence, without duplicates; `generation_config.json` overrides `config.json`.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads `dir/config.json`, and the end tokens of `dir/generation_config.json` if it exists.
    ///
    /// # Errors
    /// When the folder or `config.json` does not exist, a field has the wrong type, sizes contradict each other, or
    /// the model needs an unsupported feature; the text names the field.
    pub fn open(dir: &Path) -> Result<Self> {
        let text = read_required(OPERATOR, dir, "config.json")?;
        let mut config = Self::parse(&text)
            .map_err(|e| Error::new(OPERATOR, format!("{}: {}", dir.display(), e.message())))?;
        if let Some(text) = read_optional(OPERATOR, dir, "generation_config.json")? {
            let values = parse_object(OPERATOR, "generation_config.json", &text)?;
            let fields = Fields { prefix: "generation_config.json: ", values: &values };
            if let Some(ids) = fields.ids("eos_token_id", config.vocab_size)? {
                config.eos_token_ids = ids;
            }
        }
        Ok(config)
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// As [`ModelConfig::open`].
    pub fn parse(text: &str) -> Result<Self> {
        let values = parse_object(OPERATOR, "config.json", text)?;
        let fields = Fields { prefix: "", values: &values };
        let model_type = model_type(&fields)?;
        let architecture = match model_type {
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            _ => Architecture::Llama,
        };
        let hidden_size = fields.required_size("hidden_size")?;
        let heads = fields.required_size("num_attention_heads")?;
        let vocab_size = fields.required_size("vocab_size")?;
        let bias = fields.flag("attention_bias")?;
        let config = Self {
            architecture,
            hidden_size,
            intermediate_size: fields.required_size("intermediate_size")?,
            num_hidden_layers: fields.required_size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: fields.size("num_key_value_heads")?.unwrap_or(heads),
            head_dim: head_dim(&fields, hidden_size, heads)?,
            vocab_size,
            max_position_embeddings: fields.required_size("max_position_embeddings")?,
            rms_norm_eps: fields.required_positive("rms_norm_eps")? as f32,
            rope: Rope::read(&fields)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?,
            // Qwen2 always has these three biases; it has no switch for them.
            qkv_bias: bias || architecture == Architecture::Qwen2,
            output_bias: bias && architecture != Architecture::Qwen2,
            qk_norm: architecture == Architecture::Qwen3,
            dtype: dtype(&fields)?,
            bos_token_id: fields.ids("bos_token_id", vocab_size)?.and_then(|ids| ids.first().copied()),
            eos_token_ids: fields.ids("eos_token_id", vocab_size)?.unwrap_or_default(),
        };
        reject_unsupported(&fields, model_type)?;
        reject_sliding_window(&fields, model_type, &config)?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let (heads, kv) = (self.num_attention_heads, self.num_key_value_heads);
        ensure!(
            heads.is_multiple_of(kv),
            OPERATOR,
            "num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv}"
        );
        ensure!(
            self.head_dim.is_multiple_of(2),
            OPERATOR,
            "head_dim = {} is odd, and the rotation needs pairs",
            self.head_dim
        );
        Ok(())
    }
}

/// The model type, checked against the supported ones and against `architectures`.
fn model_type<'a>(fields: &Fields<'a>) -> Result<&'a str> {
    let model_type = fields.text("model_type")?.unwrap_or("");
    let class = match model_type {
        "llama" => "LlamaForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        _ => {
            let message =
                format!("model_type = {model_type:?} is not supported, expected one of {SUPPORTED}");
            return Err(Error::new(OPERATOR, message));
        }
    };
    // Other heads on the same layers (classifiers, reward models) produce no logits over tokens.
    fields.require("architectures", &json!([class]))?;
    Ok(model_type)
}

fn head_dim(fields: &Fields<'_>, hidden_size: usize, heads: usize) -> Result<usize> {
    if let Some(head_dim) = fields.size("head_dim")? {
        return Ok(head_dim);
    }
    ensure!(
        hidden_size.is_multiple_of(heads),
        OPERATOR,
        "hidden_size = {hidden_size} is not a multiple of num_attention_heads = {heads}, and there is no head_dim"
    );
    Ok(hidden_size / heads)
}

fn dtype(fields: &Fields<'_>) -> Result<Option<Dtype>> {
    let Some(name) = fields.text("dtype")?.or(fields.text("torch_dtype")?) else { return Ok(None) };
    match name {
        "float32" => Ok(Some(Dtype::F32)),
        "float16" => Ok(Some(Dtype::F16)),
        "bfloat16" => Ok(Some(Dtype::Bf16)),
        _ => {
            let expected = "expected one of \"float32\", \"float16\", \"bfloat16\"";
            Err(Error::new(OPERATOR, format!("dtype = {name:?} is not supported, {expected}")))
        }
    }
}

fn reject_unsupported(fields: &Fields<'_>, model_type: &str) -> Result<()> {
    fields.require("hidden_act", &json!("silu"))?;
    fields.require("mlp_bias", &json!(false))?;
    if model_type == "mistral" {
        fields.require("attention_bias", &json!(false))?;
    }
    fields.require_one("partial_rotary_factor")?;
    UNSUPPORTED.iter().try_for_each(|key| fields.reject(key))
}

/// Rejects models with sliding-window layers.
fn reject_sliding_window(fields: &Fields<'_>, model_type: &str, config: &ModelConfig) -> Result<()> {
    fields.require("use_sliding_window", &json!(false))?;
    for kind in fields.list("layer_types")? {
        let message = format!("layer_types has {kind}, which is not supported, expected \"full_attention\"");
        ensure!(kind.as_str() == Some("full_attention"), OPERATOR, "{message}");
    }
    // Qwen configurations contain a window that `use_sliding_window` disables.
    if model_type.starts_with("qwen") {
        return Ok(());
    }
    let window = match (fields.size("sliding_window")?, fields.values.contains_key("sliding_window")) {
        (None, false) if model_type == "mistral" => {
            let message = "sliding_window is missing, which means 4096 for mistral; only null is supported";
            return Err(Error::new(OPERATOR, message));
        }
        (window, _) => window,
    };
    // A window of at least the context length masks nothing.
    let Some(window) = window.filter(|&window| window < config.max_position_embeddings) else {
        return Ok(());
    };
    Err(Error::new(OPERATOR, format!("sliding_window = {window} is not supported, expected null")))
}
