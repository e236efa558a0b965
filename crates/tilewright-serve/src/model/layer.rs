//! One layer of a Llama-family decoder: attention, then feed-forward.
//!
//! Both blocks read the normalized input `x` and write `block_output`, which the next norm adds to the residual stream.

use super::{ModelConfig, Tensor, activations::Activations, transformer::ForwardContext};
use crate::{cache::KvPool, step_inputs::StepInputs};
use std::time::Instant;
use tilewright::{
    Backend, Dtype, KvCacheMut, Output, Result, Scale, View, ViewMut, activation, gemm,
    kv::{
        ScaleMut,
        append::{NewKv, QuantizedCacheMut, append_planned},
    },
    norm,
    rope::{self, Positions},
};

/// `y = x · weightᵀ + bias`
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
}

/// A layer's weights.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Tensor,
    q: Linear,
    k: Linear,
    v: Linear,
    /// Per-head norms of q and k, `[head_dim]` each.
    head_norms: Option<[Tensor; 2]>,
    o: Linear,
    pub(super) post_attention_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Inputs common to all layers of a forward pass.
pub(super) struct LayerContext<'a, B> {
    pub(super) config: &'a ModelConfig,
    pub(super) forward: &'a ForwardContext<'a, B>,
    pub(super) inputs: &'a StepInputs,
}

impl Linear {
    pub(super) fn multiply<B: Backend>(&self, backend: &B, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        gemm::linear(backend, x, self.weight.view(), self.bias.as_ref().map(Tensor::view), out)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.weight].into_iter().chain(&self.bias)
    }

    fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        [&mut self.weight].into_iter().chain(&mut self.bias)
    }
}

impl Layer {
    pub(super) fn new(
        config: &ModelConfig,
        index: usize,
        get: &impl Fn(&str, &[usize]) -> Result<Tensor>,
    ) -> Result<Self> {
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let tensor = |name: &str, shape: &[usize]| get(&format!("model.layers.{index}.{name}"), shape);
        let linear = |name: &str, shape: [usize; 2], bias: bool| -> Result<Linear> {
            let bias = bias.then(|| tensor(&format!("{name}.bias"), &shape[..1])).transpose()?;
            // f32 is exact, and GEMM libraries require the bias in the dtype of the accumulator
            let bias = bias.map(|bias| bias.cast(Dtype::F32));
            Ok(Linear { weight: tensor(&format!("{name}.weight"), &shape)?, bias })
        };
        let head_norm = |name: &str| tensor(&format!("self_attn.{name}_norm.weight"), &[dim]);
        Ok(Self {
            input_norm: tensor("input_layernorm.weight", &[hidden])?,
            q: linear("self_attn.q_proj", [q, hidden], config.qkv_bias)?,
            k: linear("self_attn.k_proj", [kv, hidden], config.qkv_bias)?,
            v: linear("self_attn.v_proj", [kv, hidden], config.qkv_bias)?,
            head_norms: if config.qk_norm { Some([head_norm("q")?, head_norm("k")?]) } else { None },
            o: linear("self_attn.o_proj", [hidden, q], config.output_bias)?,
            post_attention_norm: tensor("post_attention_layernorm.weight", &[hidden])?,
            gate: linear("mlp.gate_proj", [inner, hidden], false)?,
            up: linear("mlp.up_proj", [inner, hidden], false)?,
            down: linear("mlp.down_proj", [hidden, inner], false)?,
        })
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down].into_iter()
    }

    /// The weight matrices, which dominate the bytes of a decode step.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Tensor> {
        self.linears().map(|linear| &linear.weight)
    }

    /// All weights.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norms = [&self.input_norm, &self.post_attention_norm];
        self.linears().flat_map(Linear::tensors).chain(norms).chain(self.head_norms.iter().flatten())
    }

    /// All weights, mutable, for upload.
    pub(super) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let Self { q, k, v, o, gate, up, down, .. } = self;
        let norms = [&mut self.input_norm, &mut self.post_attention_norm];
        let head_norms = self.head_norms.iter_mut().flatten();
        [q, k, v, o, gate, up, down].into_iter().flat_map(Linear::tensors_mut).chain(norms).chain(head_norms)
    }

    /// `block_output ← attention(x) · Wo`
    pub(super) fn attend<B: Backend>(
        &self,
        context: &LayerContext<'_, B>,
        cache: KvCacheMut<'_>,
        a: &mut Activations,
    ) -> Result<()> {
        let (config, backend, rows) = (context.config, context.forward.backend, context.inputs.rows);
        let dim = config.head_dim;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let x = a.x.view(&[rows, config.hidden_size])?;
        self.q.multiply(backend, x, a.q.view_mut(&[rows, heads * dim])?)?;
        self.k.multiply(backend, x, a.k.view_mut(&[rows, kv_heads * dim])?)?;
        self.v.multiply(backend, x, a.v.view_mut(&[rows, kv_heads * dim])?)?;

        let (q_shape, kv_shape) = ([rows, heads, dim], [rows, kv_heads, dim]);
        if let Some([q_norm, k_norm]) = &self.head_norms {
            let eps = config.rms_norm_eps;
            norm::rmsnorm_in_place(backend, a.q.view_mut(&q_shape)?, q_norm.view(), eps)?;
            norm::rmsnorm_in_place(backend, a.k.view_mut(&kv_shape)?, k_norm.view(), eps)?;
        }
        let from = [a.q.view(&q_shape)?, a.k.view(&kv_shape)?];
        let [q, k] = &mut a.rotated;
        let to = [q.view_mut(&q_shape)?, k.view_mut(&kv_shape)?];
        let positions = Positions::Indices(context.inputs.positions()?);
        rope::rotate_with_cos_sin_cache(backend, from, to, positions, context.forward.rope)?;

        let start = Instant::now();
        attention(context, cache, a)?;
        if backend.computes_on_host() {
            a.attention_time += start.elapsed();
        }
        let attention_output = a.attention_output.view(&[rows, heads * dim])?;
        self.o.multiply(backend, attention_output, a.block_output.view_mut(&[rows, config.hidden_size])?)
    }

    /// `block_output ← (silu(x · Wgate) * x · Wup) · Wdown`
    pub(super) fn feed_forward<B: Backend>(
        &self,
        context: &LayerContext<'_, B>,
        a: &mut Activations,
    ) -> Result<()> {
        let (backend, rows) = (context.forward.backend, context.inputs.rows);
        let (hidden, inner) = (context.config.hidden_size, context.config.intermediate_size);
        let x = a.x.view(&[rows, hidden])?;
        for (linear, column) in [(&self.gate, 0), (&self.up, inner)] {
            let out = a.gate_up.strided_mut(column, &[rows, inner], &[2 * inner, 1])?;
            linear.multiply(backend, x, out)?;
        }
        let activated = a.activated.view_mut(&[rows, inner])?;
        activation::silu_and_mul(backend, a.gate_up.view(&[rows, 2 * inner])?, activated)?;
        self.down.multiply(
            backend,
            a.activated.view(&[rows, inner])?,
            a.block_output.view_mut(&[rows, hidden])?,
        )
    }
}

/// `pages ← k, v; attention_output ← attention(q, pages)`, except in padding rows.
fn attention<B: Backend>(
    context: &LayerContext<'_, B>,
    mut cache: KvCacheMut<'_>,
    a: &mut Activations,
) -> Result<()> {
    let LayerContext { config, forward, inputs } = context;
    let (rows, dim) = (inputs.rows, config.head_dim);
    let kv_shape = [rows, config.num_key_value_heads, dim];
    let scale = || ScaleMut::Static(Scale::One);
    let pages = QuantizedCacheMut {
        cache: KvCacheMut { k: cache.k.reborrow(), v: cache.v.reborrow() },
        k_scale: scale(),
        v_scale: scale(),
    };
    let [q, k] = &a.rotated;
    let new = NewKv { k: k.view(&kv_shape)?, v: a.v.view(&kv_shape)? };
    append_planned(forward.backend, &inputs.append, new, pages, KvPool::LAYOUT)?;
    let q_shape = [inputs.plan.num_rows(), config.num_attention_heads, dim];
    let o = a.attention_output.view_mut(&q_shape)?;
    let out = Output { o, lse: None, workspace: &mut a.workspace };
    forward.attention.run(&inputs.plan, q.view(&q_shape)?, cache.as_cache(), out)
}
