//! Model configuration from `config.json`: sizes, RoPE, and one switch per optional term of the forward pass.
//!
//! Invariant: a setting that affects results is either a field of [`ModelConfig`] or an error. Settings without effect on
//! inference (dropout, initializers, caches) are ignored.

mod families;
pub(super) mod fields;
mod generation;
mod layers;
mod parameters;
mod rope;

pub use generation::GenerationDefaults;
pub use layers::LayerKind;
pub use parameters::Parameter;
pub use rope::{PairDivisors, Rope};

use super::{parse_object, read_optional, read_required};
use families::Family;
use fields::Fields;
use std::path::Path;
use tilewright::{Dtype, Error, Result, activation::Activation, ensure};

const OPERATOR: &str = "model.config";

/// Maximum number of layers: a description of each is held in memory.
const MAX_LAYERS: usize = 1 << 16;

/// Position of the norms of a block (attention or MLP).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormPlacement {
    /// On the input of the block (Llama).
    Before,
    /// On its output, before the addition to the residual stream (OLMo 2).
    After,
    /// On both (Gemma).
    Around,
}

/// The elements over which an RMSNorm of q and k takes its mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QkNorm {
    /// Those of one head (Qwen 3, Gemma 3).
    Head,
    /// Those of all heads (OLMo 2).
    Projection,
}

/// A decoder-only transformer with RMSNorm, rotary positions, grouped-query causal attention and a gated MLP
/// (`down(activation(gate(x)) * up(x))`).
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
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
    /// Position of the norms of a block.
    pub norm_placement: NormPlacement,
    /// Added to every norm weight: 1 if weights are stored minus one, otherwise 0.
    pub norm_offset: f32,
    /// The rotations of queries and keys that layers choose from.
    pub ropes: Vec<Rope>,
    /// Window and rotation of each layer.
    pub layers: Vec<LayerKind>,
    /// Whether the output matrix is the embedding; see [`super::Weights::has_own_output`].
    pub tie_word_embeddings: bool,
    /// Whether the q, k and v projections add a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of the attention adds a bias.
    pub output_bias: bool,
    /// Whether the three projections of the MLP add a bias.
    pub mlp_bias: bool,
    /// Whether q, k and v are one matrix in the checkpoint, and gate and up another.
    pub fused_projections: bool,
    /// The RMSNorm of q and k before RoPE.
    pub qk_norm: Option<QkNorm>,
    /// The activation of the MLP's gate.
    pub activation: Activation,
    /// Factor of the embeddings.
    pub embedding_multiplier: f32,
    /// Whether that factor is rounded to the dtype of the weights.
    pub rounds_embedding_multiplier: bool,
    /// Factor of each block's output.
    pub residual_multiplier: f32,
    /// Factor on `q · k`; `None` is `1 / sqrt(head_dim)`.
    pub attention_scale: Option<f32>,
    /// `c · tanh(s / c)` on the logits of attention.
    pub attention_soft_cap: Option<f32>,
    /// Divisor of the model's logits.
    pub logits_divisor: f32,
    /// `c · tanh(x / c)` on the model's logits, after the division.
    pub logits_soft_cap: Option<f32>,
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
        let family = families::find(&fields)?;
        let mut config = Self::read(&fields, &family)?;
        family.reject_unread(&fields)?;
        (family.terms)(&fields, &mut config)?;
        config.check()?;
        config.ropes = (family.ropes)(&family, &fields, &config)?;
        config.layers = (family.layers)(&fields, &config)?;
        Ok(config)
    }

    /// The sizes, and the terms of a Llama.
    fn read(fields: &Fields<'_>, family: &Family) -> Result<Self> {
        let hidden_size = fields.required_size("hidden_size")?;
        let heads = fields.required_size("num_attention_heads")?;
        let vocab_size = fields.required_size("vocab_size")?;
        let bias = fields.flag("attention_bias")?.unwrap_or(false);
        let tied = fields.flag("tie_word_embeddings")?;
        Ok(Self {
            hidden_size,
            intermediate_size: fields.required_size("intermediate_size")?,
            num_hidden_layers: fields.required_size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: fields.size("num_key_value_heads")?.unwrap_or(heads),
            head_dim: head_dim(fields, hidden_size, heads)?,
            vocab_size,
            max_position_embeddings: fields.required_size("max_position_embeddings")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(family.eps) as f32,
            norm_placement: NormPlacement::Before,
            norm_offset: 0.0,
            ropes: Vec::new(),
            layers: Vec::new(),
            tie_word_embeddings: tied.unwrap_or(family.tied),
            qkv_bias: bias,
            output_bias: bias,
            mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
            fused_projections: false,
            qk_norm: None,
            activation: activation(fields, family.activation_key, family.activation)?,
            embedding_multiplier: 1.0,
            rounds_embedding_multiplier: false,
            residual_multiplier: 1.0,
            attention_scale: None,
            attention_soft_cap: None,
            logits_divisor: 1.0,
            logits_soft_cap: None,
            dtype: dtype(fields)?,
            bos_token_id: fields.ids("bos_token_id", vocab_size)?.and_then(|ids| ids.first().copied()),
            eos_token_ids: fields.ids("eos_token_id", vocab_size)?.unwrap_or_default(),
        })
    }

    fn check(&self) -> Result<()> {
        let (heads, kv, layers) =
            (self.num_attention_heads, self.num_key_value_heads, self.num_hidden_layers);
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
        ensure!(layers <= MAX_LAYERS, OPERATOR, "num_hidden_layers = {layers} is above {MAX_LAYERS}");
        Ok(())
    }
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
        // The dtype of the weights, whatever it is.
        "auto" => Ok(None),
        "float32" => Ok(Some(Dtype::F32)),
        "float16" => Ok(Some(Dtype::F16)),
        "bfloat16" => Ok(Some(Dtype::Bf16)),
        _ => {
            let expected = "expected one of \"auto\", \"float32\", \"float16\", \"bfloat16\"";
            Err(Error::new(OPERATOR, format!("dtype = {name:?} is not supported, {expected}")))
        }
    }
}

fn activation(fields: &Fields<'_>, key: &str, default: Activation) -> Result<Activation> {
    match fields.text(key)? {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu") => Ok(Activation::Gelu),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some(name) => {
            let expected = "expected one of \"silu\", \"gelu\", \"gelu_pytorch_tanh\"";
            Err(Error::new(OPERATOR, format!("{key} = {name:?} is not supported, {expected}")))
        }
    }
}
