//! Construction of a layer from the tensors of a checkpoint.

use super::{BlockNorms, Layer};
use crate::model::{
    ModelConfig, NormPlacement, QkNorm, Tensor, Weights,
    linear::{Linear, Weight},
    projections::Projections,
};
use tilewright::{Dtype, Result, gemm::PackedMatrix};

/// The tensors of a checkpoint in the dtype of the computation.
pub(in crate::model) struct WeightLoader<'a> {
    pub(in crate::model) config: &'a ModelConfig,
    pub(in crate::model) weights: &'a Weights,
    /// `None` is the storage of the checkpoint, see [`Weights::dtype`].
    pub(in crate::model) dtype: Option<Dtype>,
}

/// Projections that read the same input: one matrix each in the checkpoint, or all in one.
#[derive(Clone, Copy)]
struct ProjectionGroup<'a, const N: usize> {
    module: &'a str,
    /// Name and output features of each.
    parts: [(&'a str, usize); N],
    /// The name of the one matrix.
    fused: &'a str,
    columns: usize,
    bias: bool,
}

impl WeightLoader<'_> {
    pub(in crate::model) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.weights.get(name, shape)?;
        let dtype = self.dtype.or_else(|| self.weights.dtype(name));
        dtype.map_or_else(|| Ok(tensor.clone()), |dtype| tensor.cast(dtype))
    }

    /// The matrix in panels, if the checkpoint stores integers that a packed matrix holds, and no dtype is requested.
    pub(in crate::model) fn packed(&self, name: &str, shape: [usize; 2]) -> Result<Option<PackedMatrix>> {
        if self.dtype.is_none() { self.weights.packed(name, shape) } else { Ok(None) }
    }

    /// The factors of a norm, its offset included.
    pub(in crate::model) fn norm(&self, name: &str, width: usize) -> Result<Tensor> {
        let weight = self.tensor(&format!("{name}.weight"), &[width])?;
        let offset = self.config.norm_offset;
        if offset == 0.0 { Ok(weight) } else { weight.plus(offset) }
    }

    fn linear(&self, name: &str, shape: [usize; 2], bias: bool) -> Result<Linear> {
        let matrix = format!("{name}.weight");
        let weight = match self.packed(&matrix, shape)? {
            Some(packed) => Weight::Packed(packed),
            None => Weight::Rows(self.tensor(&matrix, &shape)?),
        };
        Ok(Linear { weight, bias: self.bias(name, shape[0], bias)? })
    }

    /// The bias of a linear layer, if it has one.
    fn bias(&self, name: &str, features: usize, present: bool) -> Result<Option<Tensor>> {
        let bias = present.then(|| self.tensor(&format!("{name}.bias"), &[features])).transpose()?;
        // f32 is exact, and GEMM libraries require the bias in the dtype of the accumulator
        bias.map(|bias| bias.cast(Dtype::F32)).transpose()
    }

    fn projections<const N: usize>(&self, group: &ProjectionGroup<'_, N>) -> Result<Projections<N>> {
        let ProjectionGroup { module, parts, fused, columns, bias } = *group;
        let linears: Result<Vec<Linear>> = if self.config.fused_projections {
            let all_rows = parts.iter().map(|(_, rows)| rows).sum();
            let name = format!("{module}.{fused}_proj");
            let weight = self.tensor(&format!("{name}.weight"), &[all_rows, columns])?;
            let biases = self.bias(&name, all_rows, bias)?;
            let mut end = 0;
            let part = |(_, rows)| {
                end += rows;
                let bias = biases.as_ref().map(|biases| biases.rows(end - rows..end)).transpose()?;
                Ok(Linear { weight: Weight::Rows(weight.rows(end - rows..end)?), bias })
            };
            parts.into_iter().map(part).collect()
        } else {
            let linear = |(name, rows)| self.linear(&format!("{module}.{name}_proj"), [rows, columns], bias);
            parts.into_iter().map(linear).collect()
        };
        Ok(Projections::Apart(linears?.try_into().expect("one projection per part")))
    }

    pub(in crate::model) fn layer(&self, index: usize) -> Result<Layer> {
        let config = self.config;
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let name = |name: &str| format!("model.layers.{index}.{name}");
        let (attention, mlp) = (name("self_attn"), name("mlp"));
        let qkv = ProjectionGroup {
            module: &attention,
            parts: [("q", q), ("k", kv), ("v", kv)],
            fused: "qkv",
            columns: hidden,
            bias: config.qkv_bias,
        };
        let gate_up = ProjectionGroup {
            module: &mlp,
            parts: [("gate", inner), ("up", inner)],
            fused: "gate_up",
            columns: hidden,
            bias: config.mlp_bias,
        };
        let qk_norm = |norm: QkNorm| -> Result<_> {
            Ok([("q", q), ("k", kv)]
                .map(|(part, width)| self.norm(&format!("{attention}.{part}_norm"), norm.width(width, dim))))
        };
        let kind = config.layers[index];
        let [attention_norms, mlp_norms] =
            config.norm_placement.names().map(|names| self.block_norms(names, &name));
        Ok(Layer {
            attention: config.attention_index(kind),
            rope: config.rope_index(kind),
            attention_norms: attention_norms?,
            mlp_norms: mlp_norms?,
            qkv: self.projections(&qkv)?,
            qk_norms: match config.qk_norm.map(qk_norm).transpose()? {
                Some([q, k]) => Some([q?, k?]),
                None => None,
            },
            o: self.linear(&format!("{attention}.o_proj"), [hidden, q], config.output_bias)?,
            gate_up: self.projections(&gate_up)?,
            down: self.linear(&format!("{mlp}.down_proj"), [hidden, inner], config.mlp_bias)?,
        })
    }

    fn block_norms(&self, names: &[&str], full: &impl Fn(&str) -> String) -> Result<BlockNorms> {
        let norm = |name: &&str| self.norm(&full(name), self.config.hidden_size);
        let (first, last) = (names.first(), names.last());
        let placement = self.config.norm_placement;
        let before = first.filter(|_| placement != NormPlacement::After).map(norm).transpose()?;
        let after = last.filter(|_| placement != NormPlacement::Before).map(norm).transpose()?;
        Ok(BlockNorms { before, after })
    }
}
