//! The forward pass of a Llama-family decoder, layer by layer, on any backend.
//!
//! ```text
//! x = embedding[tokens]                                              [rows, hidden]
//! for each layer:
//!     q, k, v = norm(x) · Wq, Wk, Wv (+ bias)                        [rows, heads, head_dim]
//!     q, k = rope(head_norm(q), head_norm(k))                        head_norm: Qwen3 only
//!     pages ← k, v;  x += attention(q, pages) · Wo
//!     x += (silu(norm(x) · Wgate) * norm(x) · Wup) · Wdown
//! logits = norm(x)[logit_rows] · Woutput                             [num_logits, vocab], f32
//! ```
//!
//! Matrix products and attention read the requested dtype and accumulate in f32 (see [`Activations`]). Weights keep the
//! checkpoint's dtype, or are rounded once at load time.

use super::{
    ModelConfig, RopeScaling, Tensor, Weights,
    activations::{Activations, Sizes},
    layer::{Layer, LayerContext, Linear},
};
use crate::{cache::KvPool, step_inputs::StepInputs};
use tilewright::{
    Attention, Backend, Dtype, HeadDim, Heads, Problem, Result, ensure,
    gather::gather_rows,
    rope::{self, CosSinCache},
};

/// A model's weights, ready to run.
#[derive(Debug)]
pub struct Transformer {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    output: Linear,
}

/// Backend, attention operator and RoPE table of a forward pass.
pub(crate) struct ForwardContext<'a, B> {
    pub(crate) backend: &'a B,
    pub(crate) attention: &'a Attention<B>,
    pub(crate) rope: &'a CosSinCache,
}

impl Transformer {
    /// Assembles the weights of `config`, rounded to `dtype` if it is `Some`.
    ///
    /// # Errors
    /// When a tensor is missing or unexpected, its shape or dtype differs from the configuration, or `dtype` is cache-only.
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
        let layers = layers.collect::<Result<_>>()?;
        let embedding = get(ModelConfig::EMBEDDING, &[vocab, hidden])?;
        let output = match config.output_matrix() {
            ModelConfig::EMBEDDING => embedding.clone(),
            name => get(name, &[vocab, hidden])?,
        };
        Ok(Self {
            embedding,
            layers,
            norm: get("model.norm.weight", &[hidden])?,
            output: Linear { weight: output, bias: None },
            config,
        })
    }

    /// Uploads the weights to the memory of `backend`; does nothing for a backend that computes on the host. Calls `progress` with
    /// the bytes uploaded so far after each weight, up to [`Transformer::bytes`].
    ///
    /// # Errors
    /// When the backend has too little memory.
    pub fn upload<B: Backend>(mut self, backend: &B, mut progress: impl FnMut(u64)) -> Result<Self> {
        if backend.computes_on_host() {
            return Ok(self);
        }
        let tied = self.config.tie_word_embeddings;
        let mut done = 0;
        let layers = self.layers.iter_mut().flat_map(Layer::tensors_mut);
        let output = (!tied).then_some(&mut self.output.weight);
        for tensor in layers.chain([&mut self.norm, &mut self.embedding]).chain(output) {
            *tensor = tensor.upload(backend)?;
            done += tensor.bytes() as u64;
            progress(done);
        }
        if tied {
            self.output.weight = self.embedding.clone();
        }
        Ok(self)
    }

    /// The configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> Dtype {
        self.embedding.dtype()
    }

    /// Bytes of all weights; a tied embedding counts once.
    pub fn bytes(&self) -> u64 {
        let output = (!self.config.tie_word_embeddings).then_some(&self.output.weight);
        let all = self.layers.iter().flat_map(Layer::tensors).chain([&self.norm, &self.embedding]);
        all.chain(output).map(|tensor| tensor.bytes() as u64).sum()
    }

    /// Bytes of weights that a decode step reads: all except the embedding, of which it reads one row per token.
    pub fn bytes_per_step(&self) -> usize {
        let layers = self.layers.iter().flat_map(Layer::matrices).map(Tensor::bytes).sum::<usize>();
        layers + self.output.weight.bytes()
    }

    /// Multiplications and additions per token, without attention.
    pub fn flops_per_token(&self) -> usize {
        2 * self.bytes_per_step() / self.dtype().size()
    }

    /// The attention problem of every layer.
    pub(crate) fn attention_problem(&self, activations: Dtype, kv_dtype: Dtype) -> Result<Problem> {
        let ModelConfig { num_attention_heads: qo, num_key_value_heads: kv, head_dim, .. } = self.config;
        Problem::builder(Heads { qo, kv }, HeadDim::same(head_dim))
            .dtypes(activations, kv_dtype)
            .layout(KvPool::LAYOUT)
            .build()
    }

    /// The RoPE table for positions below `context`.
    pub(crate) fn rope(&self, context: usize) -> Result<CosSinCache> {
        let config = self.config.rope;
        let scaling = match config.scaling {
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
        let rope = rope::Rope::new(self.config.head_dim, config.theta)?.with_scaling(scaling)?;
        CosSinCache::new(&rope, context as u32)
    }

    /// Runs a step: appends its keys and values to `cache` and writes the logits to `activations`, which must have the
    /// [`sizes`](Self::sizes) of the step. It only enqueues work on the backend, so it can be captured.
    pub(crate) fn forward<B: Backend>(
        &self,
        context: &ForwardContext<'_, B>,
        inputs: &StepInputs,
        cache: &mut KvPool,
        activations: &mut Activations,
    ) -> Result<()> {
        let (backend, config, rows) = (context.backend, &self.config, inputs.rows);
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let residual = activations.residual.view_mut(&[rows, hidden])?;
        gather_rows(backend, self.embedding.view(), inputs.tokens()?, residual)?;
        let layer_context = LayerContext { config, forward: context, inputs };
        for (index, layer) in self.layers.iter().enumerate() {
            activations.norm(backend, (rows, &layer.input_norm), eps, index == 0)?;
            layer.attend(&layer_context, cache.layer(index)?, activations)?;
            activations.norm(backend, (rows, &layer.post_attention_norm), eps, false)?;
            layer.feed_forward(&layer_context, activations)?;
        }
        activations.norm(backend, (rows, &self.norm), eps, self.layers.is_empty())?;
        self.logits(backend, inputs, activations)
    }

    fn logits<B: Backend>(&self, backend: &B, step: &StepInputs, a: &mut Activations) -> Result<()> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let mut x = a.x.view(&[step.rows, hidden])?;
        if !step.all_logits {
            gather_rows(
                backend,
                x,
                step.logit_rows()?,
                a.logit_inputs.view_mut(&[step.num_logits, hidden])?,
            )?;
            x = a.logit_inputs.view(&[step.num_logits, hidden])?;
        }
        a.logits_rows = step.num_logits;
        self.output.multiply(backend, x, a.logits.view_mut(&[step.num_logits, vocab])?)
    }

    /// The activation sizes that a step needs.
    pub(crate) fn sizes(&self, step: &StepInputs) -> Sizes {
        Sizes { rows: step.rows, num_logits: step.num_logits, workspace: step.plan.workspace_bytes() }
    }
}
