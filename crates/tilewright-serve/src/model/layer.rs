//! One layer of a Llama-family decoder: attention, then feed-forward.
//!
//! Both read the normed input and leave what is to be added to the residual stream.

use super::{ModelConfig, Tensor, activations::Activations, transformer::Device};
use crate::{arguments::Arguments, cache::KvPool};
use std::time::Instant;
use tilewright::{
    Backend, Dtype, KvCacheMut, Output, Result, Scale, View, ViewMut, activation, gemm,
    kv::{
        ScaleMut,
        append::{QuantizedCacheMut, append_planned},
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
    /// `[head_dim]` each: norms on the heads of q and k.
    head_norms: Option<[Tensor; 2]>,
    o: Linear,
    pub(super) post_attention_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// What every layer of a forward pass sees alike.
pub(super) struct Pass<'a, B> {
    pub(super) config: &'a ModelConfig,
    pub(super) device: &'a Device<'a, B>,
    pub(super) arguments: &'a Arguments,
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
            // exactly, and of the dtype of the sums: libraries of products want both to be of one
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

    /// The matrices, which are what a decoding step reads.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &Tensor> {
        self.linears().map(|linear| &linear.weight)
    }

    /// All weights.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norms = [&self.input_norm, &self.post_attention_norm];
        self.linears().flat_map(Linear::tensors).chain(norms).chain(self.head_norms.iter().flatten())
    }

    /// All weights, to be put elsewhere.
    pub(super) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let Self { q, k, v, o, gate, up, down, .. } = self;
        let norms = [&mut self.input_norm, &mut self.post_attention_norm];
        let head_norms = self.head_norms.iter_mut().flatten();
        [q, k, v, o, gate, up, down].into_iter().flat_map(Linear::tensors_mut).chain(norms).chain(head_norms)
    }

    /// `added ← attention(x) · Wo`
    pub(super) fn attend<B: Backend>(
        &self,
        pass: &Pass<'_, B>,
        cache: KvCacheMut<'_>,
        a: &mut Activations,
    ) -> Result<()> {
        let (config, backend, rows) = (pass.config, pass.device.backend, pass.arguments.rows);
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
        let positions = Positions::Indices(pass.arguments.positions()?);
        rope::rotate_with_cos_sin_cache(backend, from, to, positions, pass.device.rope)?;

        let start = Instant::now();
        attention(pass, cache, a)?;
        if backend.computes_on_host() {
            a.attention_time += start.elapsed();
        }
        let attended = a.attended.view(&[rows, heads * dim])?;
        self.o.multiply(backend, attended, a.added.view_mut(&[rows, config.hidden_size])?)
    }

    /// `added ← (silu(x · Wgate) * x · Wup) · Wdown`
    pub(super) fn feed_forward<B: Backend>(&self, pass: &Pass<'_, B>, a: &mut Activations) -> Result<()> {
        let (backend, rows) = (pass.device.backend, pass.arguments.rows);
        let (hidden, inner) = (pass.config.hidden_size, pass.config.intermediate_size);
        let x = a.x.view(&[rows, hidden])?;
        for (linear, column) in [(&self.gate, 0), (&self.up, inner)] {
            let out = a.gate_up.strided_mut(column, (&[rows, inner], &[2 * inner, 1]))?;
            linear.multiply(backend, x, out)?;
        }
        let activated = a.activated.view_mut(&[rows, inner])?;
        activation::silu_and_mul(backend, a.gate_up.view(&[rows, 2 * inner])?, activated)?;
        self.down.multiply(backend, a.activated.view(&[rows, inner])?, a.added.view_mut(&[rows, hidden])?)
    }
}

/// `pages ← k, v; attended ← attention(q, pages)`, in all rows but those that are padding.
fn attention<B: Backend>(pass: &Pass<'_, B>, mut cache: KvCacheMut<'_>, a: &mut Activations) -> Result<()> {
    let Pass { config, device, arguments } = pass;
    let (rows, dim) = (arguments.rows, config.head_dim);
    let kv_shape = [rows, config.num_key_value_heads, dim];
    let scale = || ScaleMut::Static(Scale::One);
    let pages = QuantizedCacheMut {
        cache: KvCacheMut { k: cache.k.reborrow(), v: cache.v.reborrow() },
        k_scale: scale(),
        v_scale: scale(),
    };
    let [q, k] = &a.rotated;
    let new = (k.view(&kv_shape)?, a.v.view(&kv_shape)?);
    append_planned(device.backend, &arguments.append, new, pages, KvPool::LAYOUT)?;
    let q_shape = [arguments.plan.num_rows(), config.num_attention_heads, dim];
    let o = a.attended.view_mut(&q_shape)?;
    let out = Output { o, lse: None, workspace: &mut a.workspace };
    device.attention.run(&arguments.plan, q.view(&q_shape)?, cache.as_cache(), out)
}
