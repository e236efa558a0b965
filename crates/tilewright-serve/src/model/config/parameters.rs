//! Names and shapes of all weights of a configuration, as in Hugging Face checkpoints.
//!
//! Matrices are `[out, in]`: a projection computes `x @ w^T`.

use super::{ModelConfig, NormPlacement, QkNorm};

/// One weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// The name in the checkpoint, as in `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Extents, in elements.
    pub shape: Vec<usize>,
}

impl ModelConfig {
    /// All weights in the order of the forward pass: embedding, layers, final norm, and the output matrix unless it is
    /// tied to the embedding.
    pub fn parameters(&self) -> impl Iterator<Item = Parameter> + '_ {
        let table = || vec![self.vocab_size, self.hidden_size];
        let first = Parameter { name: Self::EMBEDDING.to_owned(), shape: table() };
        let norm = Parameter { name: "model.norm.weight".to_owned(), shape: vec![self.hidden_size] };
        let last =
            (!self.tie_word_embeddings).then(|| Parameter { name: Self::OUTPUT.to_owned(), shape: table() });
        std::iter::once(first)
            .chain((0..self.num_hidden_layers).flat_map(|layer| self.layer(layer)))
            .chain([norm])
            .chain(last)
    }

    /// The name of the token embedding, `[vocab_size, hidden_size]`.
    pub const EMBEDDING: &str = "model.embed_tokens.weight";

    /// The name of an output matrix of its own.
    pub(crate) const OUTPUT: &str = "lm_head.weight";

    /// The name of the output matrix, `[vocab_size, hidden_size]`: the embedding if the two are tied.
    pub fn output_matrix(&self) -> &'static str {
        if self.tie_word_embeddings { Self::EMBEDDING } else { Self::OUTPUT }
    }

    fn layer(&self, layer: usize) -> Vec<Parameter> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let mut list = Vec::with_capacity(16);
        let mut add = |name: &str, shape: &[usize]| {
            list.push(Parameter { name: format!("model.layers.{layer}.{name}"), shape: shape.to_vec() });
        };
        let [attention_norms, mlp_norms] = self.norm_placement.names();
        attention_norms.iter().for_each(|name| add(&format!("{name}.weight"), &[hidden]));
        let projections = if self.fused_projections {
            &[("qkv", q + 2 * kv)][..]
        } else {
            &[("q", q), ("k", kv), ("v", kv)][..]
        };
        for &(name, rows) in projections {
            add(&format!("self_attn.{name}_proj.weight"), &[rows, hidden]);
            if self.qkv_bias {
                add(&format!("self_attn.{name}_proj.bias"), &[rows]);
            }
        }
        if let Some(norm) = self.qk_norm {
            add("self_attn.q_norm.weight", &[norm.width(q, self.head_dim)]);
            add("self_attn.k_norm.weight", &[norm.width(kv, self.head_dim)]);
        }
        add("self_attn.o_proj.weight", &[hidden, q]);
        if self.output_bias {
            add("self_attn.o_proj.bias", &[hidden]);
        }
        mlp_norms.iter().for_each(|name| add(&format!("{name}.weight"), &[hidden]));
        let gate_up = if self.fused_projections {
            &[("gate_up", 2 * inner)][..]
        } else {
            &[("gate", inner), ("up", inner)]
        };
        let gate_up = gate_up.iter().map(|&(name, rows)| (name, [rows, hidden]));
        for (name, [rows, columns]) in gate_up.chain([("down", [hidden, inner])]) {
            add(&format!("mlp.{name}_proj.weight"), &[rows, columns]);
            if self.mlp_bias {
                add(&format!("mlp.{name}_proj.bias"), &[rows]);
            }
        }
        list
    }
}

impl NormPlacement {
    /// The norms of the attention and of the MLP, in the order of the forward pass.
    pub(in crate::model) fn names(self) -> [&'static [&'static str]; 2] {
        match self {
            Self::Before => [&["input_layernorm"], &["post_attention_layernorm"]],
            Self::After => [&["post_attention_layernorm"], &["post_feedforward_layernorm"]],
            Self::Around => [
                &["input_layernorm", "post_attention_layernorm"],
                &["pre_feedforward_layernorm", "post_feedforward_layernorm"],
            ],
        }
    }
}

impl QkNorm {
    /// Elements of the norm's weight for a projection of this width.
    pub(in crate::model) fn width(self, projection: usize, head_dim: usize) -> usize {
        match self {
            Self::Head => head_dim,
            Self::Projection => projection,
        }
    }
}
