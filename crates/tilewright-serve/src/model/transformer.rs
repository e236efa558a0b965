//! The forward pass of a Llama-family decoder, layer by layer.
//!
//! ```text
//! x = embedding[tokens]                                              [rows, hidden], f32
//! for each layer:
//!     q, k, v = norm(x) · Wq, Wk, Wv (+ bias)                        [rows, heads, head_dim]
//!     q, k = rope(head_norm(q), head_norm(k))                        head_norm: Qwen3 only
//!     pages ← k, v;  x += attention(q, pages) · Wo
//!     x += (silu(norm(x) · Wgate) * norm(x) · Wup) · Wdown
//! logits = norm(x[wanted]) · Woutput                                 [wanted, vocab]
//! ```
//!
//! Activations are f32; weights stay in the checkpoint's dtype.

use super::{ModelConfig, RopeScaling, Tensor, Weights};
use crate::{
    cache::{KvPool, widen_row},
    step::Step,
};
use std::time::{Duration, Instant};
use tilewright::{
    Attention, Backend, Dtype, HeadDim, Heads, KvCacheMut, Output, Plan, Problem, Result, View, ViewMut,
    Workspace, activation, ensure, gemm,
    kv::append::{Append, append_paged_kv_cache},
    norm,
    rope::{self, CosSinCache, Positions},
};

/// `y = x · weightᵀ + bias`
#[derive(Debug)]
struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

#[derive(Debug)]
struct Layer {
    input_norm: Tensor,
    q: Linear,
    k: Linear,
    v: Linear,
    /// `[head_dim]` each: norms on the heads of q and k.
    head_norms: Option<[Tensor; 2]>,
    o: Linear,
    post_attention_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// A model's weights, ready to run.
#[derive(Debug)]
pub struct Transformer {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    output: Linear,
}

/// What a forward pass runs on, beside the model.
pub(crate) struct Device<'a, B> {
    pub(crate) backend: &'a B,
    pub(crate) attention: &'a Attention<B>,
    pub(crate) rope: &'a CosSinCache,
}

/// What every layer of a forward pass sees alike.
struct Pass<'a, B> {
    config: &'a ModelConfig,
    device: &'a Device<'a, B>,
    step: &'a Step,
    plan: &'a Plan,
}

/// Memory of a forward pass, kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Activations {
    /// The residual stream, `[rows, hidden]`.
    residual: Vec<f32>,
    /// `[rows, hidden]`: a normed input, or what is about to be added to the residual stream.
    x: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[rows, num_attention_heads * head_dim]`
    attended: Vec<f32>,
    /// `[rows, 2 * intermediate]`: gate, then up.
    gate_up: Vec<f32>,
    /// `[rows, intermediate]`
    activated: Vec<f32>,
    /// `[wanted rows, vocab]`
    pub(crate) logits: Vec<f32>,
    pub(crate) workspace: Workspace,
    /// Time spent in attention, appending included.
    pub(crate) attention_time: Duration,
}

impl Transformer {
    /// Takes the weights of `config`, rounded to `dtype` if one is given.
    ///
    /// # Errors
    /// When a tensor is missing, left over, or has another shape or dtype than the configuration says, or `dtype` is one
    /// that only KV caches have.
    pub fn new(config: ModelConfig, weights: &Weights, dtype: Option<Dtype>) -> Result<Self> {
        if let Some(dtype) = dtype {
            ensure!(!dtype.is_cache_only(), "model.new", "dtype = {dtype}, expected f32, f16 or bf16");
        }
        weights.check(&config)?;
        let get = |name: &str, shape: &[usize]| {
            let tensor = weights.get(name, shape)?;
            Ok(dtype.map_or_else(|| tensor.clone(), |dtype| tensor.cast(dtype)))
        };
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let layers = (0..config.num_hidden_layers).map(|index| Layer::new(&config, index, &get));
        Ok(Self {
            embedding: get(ModelConfig::EMBEDDING, &[vocab, hidden])?,
            layers: layers.collect::<Result<_>>()?,
            norm: get("model.norm.weight", &[hidden])?,
            output: Linear { weight: get(config.output_matrix(), &[vocab, hidden])?, bias: None },
            config,
        })
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> Dtype {
        self.embedding.dtype()
    }

    /// Bytes of weights that a decoding step reads: all but the embedding, of which it reads a row per token.
    pub fn bytes_per_step(&self) -> usize {
        let layers: usize = self.layers.iter().map(|layer| layer.tensors().map(bytes).sum::<usize>()).sum();
        layers + bytes(&self.output.weight)
    }

    /// Multiplications and additions per token, without attention.
    pub fn flops_per_token(&self) -> usize {
        2 * self.bytes_per_step() / self.dtype().size()
    }

    /// The attention that every layer asks for.
    pub(crate) fn attention_problem(&self, kv_dtype: Dtype) -> Result<Problem> {
        let ModelConfig { num_attention_heads: qo, num_key_value_heads: kv, head_dim, .. } = self.config;
        Problem::builder(Heads { qo, kv }, HeadDim::same(head_dim))
            .dtypes(Dtype::F32, kv_dtype)
            .layout(KvPool::LAYOUT)
            .build()
    }

    /// Cosines and sines for positions below `context`.
    pub(crate) fn rope(&self, context: usize) -> Result<CosSinCache> {
        let ours = self.config.rope;
        let scaling = match ours.scaling {
            RopeScaling::None => rope::RopeScaling::None,
            RopeScaling::Linear { factor } => rope::RopeScaling::Linear { factor },
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let original_context = original_max_position_embeddings as u32;
                rope::RopeScaling::Llama31 { factor, low_freq_factor, high_freq_factor, original_context }
            }
        };
        let rope = rope::Rope::new(self.config.head_dim, ours.theta)?.with_scaling(scaling)?;
        Ok(CosSinCache::new(&rope, context as u32))
    }

    /// Runs `step`, appends its keys and values to `cache`, and leaves the wanted rows' logits in `activations`.
    pub(crate) fn forward<B: Backend>(
        &self,
        device: &Device<'_, B>,
        (step, plan): (&Step, &Plan),
        cache: &mut KvPool,
        activations: &mut Activations,
    ) -> Result<()> {
        activations.resize(&self.config, step.rows());
        activations.workspace.fit(plan);
        self.embed(step, activations);
        let eps = self.config.rms_norm_eps;
        let pass = Pass { config: &self.config, device, step, plan };
        for (index, layer) in self.layers.iter().enumerate() {
            activations.add_and_norm(device.backend, &layer.input_norm, eps)?;
            layer.attend(&pass, cache.layer(index)?, activations)?;
            activations.add_and_norm(device.backend, &layer.post_attention_norm, eps)?;
            layer.feed_forward(&pass, activations)?;
        }
        activations.add_and_norm(device.backend, &self.norm, eps)?;
        self.logits(device.backend, step, activations)
    }

    /// Starts with nothing in the residual stream and the embeddings about to be added to it.
    fn embed(&self, step: &Step, activations: &mut Activations) {
        activations.residual.fill(0.0);
        let rows = activations.x.chunks_exact_mut(self.config.hidden_size);
        for (&token, row) in step.tokens.iter().zip(rows) {
            widen_row(self.embedding.view().data(), token as usize, row);
        }
    }

    fn logits<B: Backend>(&self, backend: &B, step: &Step, activations: &mut Activations) -> Result<()> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let wanted = step.logits_rows.len();
        let rows = step.logits_rows.iter().flat_map(|&row| &activations.x[row * hidden..(row + 1) * hidden]);
        let x: Vec<f32> = rows.copied().collect();
        activations.logits.resize(wanted * vocab, 0.0);
        let out = ViewMut::new(&mut activations.logits, &[wanted, vocab])?;
        self.output.multiply(backend, View::new(&x, &[wanted, hidden])?, out)
    }
}

impl Linear {
    fn multiply<B: Backend>(&self, backend: &B, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        gemm::linear(backend, x, self.weight.view(), self.bias.as_ref().map(Tensor::view), out)
    }
}

impl Layer {
    fn new(
        config: &ModelConfig,
        index: usize,
        get: &impl Fn(&str, &[usize]) -> Result<Tensor>,
    ) -> Result<Self> {
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let tensor = |name: &str, shape: &[usize]| get(&format!("model.layers.{index}.{name}"), shape);
        let linear = |name: &str, shape: [usize; 2], bias: bool| -> Result<Linear> {
            let bias = bias.then(|| tensor(&format!("{name}.bias"), &shape[..1])).transpose()?;
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

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
            .into_iter()
            .map(|linear| &linear.weight)
    }

    /// `x ← attention(x) · Wo`
    fn attend<B: Backend>(
        &self,
        pass: &Pass<'_, B>,
        mut cache: KvCacheMut<'_>,
        a: &mut Activations,
    ) -> Result<()> {
        let &Pass { config, device, step, plan } = pass;
        let (backend, rows, dim) = (device.backend, step.rows(), config.head_dim);
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let x = View::new(&a.x, &[rows, config.hidden_size])?;
        self.q.multiply(backend, x, ViewMut::new(&mut a.q, &[rows, heads * dim])?)?;
        self.k.multiply(backend, x, ViewMut::new(&mut a.k, &[rows, kv_heads * dim])?)?;
        self.v.multiply(backend, x, ViewMut::new(&mut a.v, &[rows, kv_heads * dim])?)?;

        let (q_shape, kv_shape) = ([rows, heads, dim], [rows, kv_heads, dim]);
        if let Some([q_norm, k_norm]) = &self.head_norms {
            let eps = config.rms_norm_eps;
            norm::rmsnorm_in_place(backend, ViewMut::new(&mut a.q, &q_shape)?, q_norm.view(), eps)?;
            norm::rmsnorm_in_place(backend, ViewMut::new(&mut a.k, &kv_shape)?, k_norm.view(), eps)?;
        }
        let (q, k) = (ViewMut::new(&mut a.q, &q_shape)?, ViewMut::new(&mut a.k, &kv_shape)?);
        let positions = Positions::Ids(&step.positions);
        rope::apply_rope_with_cos_sin_cache(backend, q, k, positions, device.rope)?;

        let start = Instant::now();
        let new = Append {
            k: View::new(&a.k, &kv_shape)?,
            v: View::new(&a.v, &kv_shape)?,
            batch_indices: &step.batch_indices,
            positions: &step.positions,
        };
        let pages = KvCacheMut { k: cache.k.reborrow(), v: cache.v.reborrow() };
        append_paged_kv_cache(backend, &new, pages, KvPool::LAYOUT, &step.table())?;
        let o = ViewMut::new(&mut a.attended, &q_shape)?;
        let out = Output { o, lse: None, workspace: &mut a.workspace };
        device.attention.run(plan, View::new(&a.q, &q_shape)?, cache.as_cache(), out)?;
        a.attention_time += start.elapsed();

        let attended = View::new(&a.attended, &[rows, heads * dim])?;
        self.o.multiply(backend, attended, ViewMut::new(&mut a.x, &[rows, config.hidden_size])?)
    }

    /// `x ← (silu(x · Wgate) * x · Wup) · Wdown`
    fn feed_forward<B: Backend>(&self, pass: &Pass<'_, B>, a: &mut Activations) -> Result<()> {
        let (backend, hidden, inner) =
            (pass.device.backend, pass.config.hidden_size, pass.config.intermediate_size);
        let rows = a.x.len() / hidden;
        let x = View::new(&a.x, &[rows, hidden])?;
        for (linear, column) in [(&self.gate, 0), (&self.up, inner)] {
            let out = ViewMut::strided(&mut a.gate_up[column..], &[rows, inner], &[2 * inner, 1])?;
            linear.multiply(backend, x, out)?;
        }
        let activated = ViewMut::new(&mut a.activated, &[rows, inner])?;
        activation::silu_and_mul(backend, View::new(&a.gate_up, &[rows, 2 * inner])?, activated)?;
        let activated = View::new(&a.activated, &[rows, inner])?;
        self.down.multiply(backend, activated, ViewMut::new(&mut a.x, &[rows, hidden])?)
    }
}

impl Activations {
    fn resize(&mut self, config: &ModelConfig, rows: usize) {
        let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let sizes = [
            (&mut self.residual, hidden),
            (&mut self.x, hidden),
            (&mut self.q, q),
            (&mut self.k, kv),
            (&mut self.v, kv),
            (&mut self.attended, q),
            (&mut self.gate_up, 2 * inner),
            (&mut self.activated, inner),
        ];
        for (memory, width) in sizes {
            memory.resize(rows * width, 0.0);
        }
    }

    /// `residual += x; x ← norm(residual)`
    fn add_and_norm<B: Backend>(&mut self, backend: &B, weight: &Tensor, eps: f32) -> Result<()> {
        let hidden = weight.shape()[0];
        let shape = [self.x.len() / hidden, hidden];
        let (x, residual) = (ViewMut::new(&mut self.x, &shape)?, ViewMut::new(&mut self.residual, &shape)?);
        norm::fused_add_rmsnorm(backend, x, residual, weight.view(), eps)
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.shape().iter().product::<usize>() * tensor.dtype().size()
}
