//! Architectures of GGUF files, and the names of their tensors in Hugging Face checkpoints.

use crate::model::ModelConfig;
use serde_json::{Map, Value};

/// How files of an architecture differ from those of Llama.
#[derive(Debug)]
pub(super) struct GgufArchitecture {
    /// `general.architecture`, the prefix of its metadata.
    pub(super) name: &'static str,
    /// `model_type` of `config.json`.
    pub(super) model_type: &'static str,
    /// Whether the rows of q and k are in the order of interleaved RoPE.
    interleaved: bool,
    /// Metadata that only some architectures read, without the prefix, with its field of `config.json`.
    pub(super) terms: &'static [(&'static str, &'static str)],
    /// Names of norms that differ from [`NAMES`].
    norms: &'static [(&'static str, &'static str)],
}

const NONE: GgufArchitecture =
    GgufArchitecture { name: "", model_type: "", interleaved: false, terms: &[], norms: &[] };

const AROUND: &[(&str, &str)] = &[
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

static ARCHITECTURES: [GgufArchitecture; 8] = [
    GgufArchitecture { name: "llama", model_type: "llama", interleaved: true, ..NONE },
    GgufArchitecture { name: "qwen2", model_type: "qwen2", ..NONE },
    GgufArchitecture { name: "qwen3", model_type: "qwen3", ..NONE },
    GgufArchitecture {
        name: "gemma2",
        model_type: "gemma2",
        terms: &[
            ("attention.sliding_window", "sliding_window"),
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ],
        norms: AROUND,
        ..NONE
    },
    GgufArchitecture {
        name: "gemma3",
        model_type: "gemma3_text",
        terms: &[
            ("attention.sliding_window", "sliding_window"),
            ("attention.sliding_window_pattern", "sliding_window_pattern"),
            ("rope.freq_base_swa", "rope_local_base_freq"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ],
        norms: AROUND,
        ..NONE
    },
    GgufArchitecture {
        name: "granite",
        model_type: "granite",
        interleaved: true,
        terms: &[
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ],
        ..NONE
    },
    GgufArchitecture { name: "olmo2", model_type: "olmo2", norms: AROUND, ..NONE },
    GgufArchitecture { name: "smollm3", model_type: "smollm3", interleaved: true, ..NONE },
];

/// Tensors outside of layers.
const MODEL: [(&str, &str); 3] = [
    ("token_embd.weight", ModelConfig::EMBEDDING),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", ModelConfig::OUTPUT),
];

/// Modules of a layer.
const NAMES: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

impl GgufArchitecture {
    /// The architecture that `general.architecture` names.
    pub(super) fn find(metadata: &Map<String, Value>) -> Result<&'static Self, String> {
        const KEY: &str = "general.architecture";
        let Some(value) = metadata.get(KEY) else { return Err(format!("{KEY} is missing")) };
        let found = ARCHITECTURES.iter().find(|architecture| value == architecture.name);
        found.ok_or_else(|| {
            let names: Vec<_> = ARCHITECTURES.iter().map(|architecture| architecture.name).collect();
            format!("{KEY} = {value} is not supported, expected one of {}", names.join(", "))
        })
    }

    /// The name of a tensor in Hugging Face checkpoints. An unknown name is unchanged, and [`super::Weights::check`] rejects it.
    pub(super) fn hugging_face_name(&self, stored: &str) -> String {
        if let Some((_, name)) = MODEL.iter().find(|(name, _)| *name == stored) {
            return (*name).to_owned();
        }
        self.layer_name(stored).unwrap_or_else(|| stored.to_owned())
    }

    /// The name of `blk.LAYER.MODULE.weight`.
    fn layer_name(&self, stored: &str) -> Option<String> {
        let (layer, rest) = stored.strip_prefix("blk.")?.split_once('.')?;
        let (module, parameter) = rest.split_once('.')?;
        let module = self.norms.iter().chain(&NAMES).find(|(name, _)| *name == module)?.1;
        Some(format!("model.layers.{layer}.{module}.{parameter}"))
    }

    /// The heads of the matrix or bias `name`, if its rows are in the order of interleaved RoPE.
    pub(super) fn interleaved_heads(&self, name: &str, config: &ModelConfig) -> Option<usize> {
        let is = |module: &str| name.rsplit_once('.').is_some_and(|(path, _)| path.ends_with(module));
        match self.interleaved {
            true if is("self_attn.q_proj") => Some(config.num_attention_heads),
            true if is("self_attn.k_proj") => Some(config.num_key_value_heads),
            _ => None,
        }
    }
}
