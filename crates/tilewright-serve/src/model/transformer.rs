//! The forward pass of a Llama-family decoder, layer by layer, on any backend.
//!
//! ```text
//! x = embedding[tokens]                                              [rows, hidden]
//! for each layer:
//!     q, k, v = norm(x) · Wq, Wk, Wv (+ bias)                        [rows, heads, head_dim]
//!     q, k = rope(head_norm(q), head_norm(k))                        head_norm: Qwen3 only
//!     pages ← k, v;  x += attention(q, pages) · Wo
//!     x += (silu(norm(x) · Wgate) * norm(x) · Wup) · Wdown
//! logits = norm(x)[wanted] · Woutput                                 [wanted, vocab], f32
//! ```
//!
//! What products and attention read is of the dtype that is asked for; what they add up stays in f32, as [`Activations`] says. Weights
//! stay in the checkpoint's dtype, or are rounded once, when they are loaded.

use super::{
    ModelConfig, RopeScaling, Tensor, Weights,
    activations::{Activations, Sizes},
    layer::{Layer, Linear, Pass},
};
use crate::{arguments::Arguments, cache::KvPool};
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

/// What a forward pass runs on, beside the model.
pub(crate) struct Device<'a, B> {
    pub(crate) backend: &'a B,
    pub(crate) attention: &'a Attention<B>,
    pub(crate) rope: &'a CosSinCache,
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

    /// The same model with its weights where `backend` reads them: nothing is done for one that computes on the host. `progress` is
    /// told how many bytes have been brought, weight by weight; the last call says [`Transformer::bytes`].
    ///
    /// # Errors
    /// When there is no room for them.
    pub fn on<B: Backend>(mut self, backend: &B, mut progress: impl FnMut(u64)) -> Result<Self> {
        if backend.computes_on_host() {
            return Ok(self);
        }
        let tied = self.config.tie_word_embeddings;
        let mut done = 0;
        let layers = self.layers.iter_mut().flat_map(Layer::tensors_mut);
        let output = (!tied).then_some(&mut self.output.weight);
        for tensor in layers.chain([&mut self.norm, &mut self.embedding]).chain(output) {
            *tensor = tensor.on(backend)?;
            done += tensor.bytes() as u64;
            progress(done);
        }
        if tied {
            self.output.weight = self.embedding.clone();
        }
        Ok(self)
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> Dtype {
        self.embedding.dtype()
    }

    /// Bytes of all weights; a matrix that is embedding and output counts once.
    pub fn bytes(&self) -> u64 {
        let output = (!self.config.tie_word_embeddings).then_some(&self.output.weight);
        let all = self.layers.iter().flat_map(Layer::tensors).chain([&self.norm, &self.embedding]);
        all.chain(output).map(|tensor| tensor.bytes() as u64).sum()
    }

    /// Bytes of weights that a decoding step reads: all but the embedding, of which it reads a row per token.
    pub fn bytes_per_step(&self) -> usize {
        let layers = self.layers.iter().flat_map(Layer::matrices).map(Tensor::bytes).sum::<usize>();
        layers + self.output.weight.bytes()
    }

    /// Multiplications and additions per token, without attention.
    pub fn flops_per_token(&self) -> usize {
        2 * self.bytes_per_step() / self.dtype().size()
    }

    /// The attention that every layer asks for.
    pub(crate) fn attention_problem(&self, activations: Dtype, kv_dtype: Dtype) -> Result<Problem> {
        let ModelConfig { num_attention_heads: qo, num_key_value_heads: kv, head_dim, .. } = self.config;
        Problem::builder(Heads { qo, kv }, HeadDim::same(head_dim))
            .dtypes(activations, kv_dtype)
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

    /// Runs a step, appends its keys and values to `cache`, and leaves the wanted rows' logits in `activations`, which have
    /// room for it. All it does is ask `device` for work.
    pub(crate) fn forward<B: Backend>(
        &self,
        device: &Device<'_, B>,
        arguments: &Arguments,
        cache: &mut KvPool,
        activations: &mut Activations,
    ) -> Result<()> {
        let (backend, config, rows) = (device.backend, &self.config, arguments.rows);
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let residual = activations.residual.view_mut(&[rows, hidden])?;
        gather_rows(backend, self.embedding.view(), arguments.tokens()?, residual)?;
        let pass = Pass { config, device, arguments };
        for (index, layer) in self.layers.iter().enumerate() {
            activations.norm(backend, (rows, &layer.input_norm), eps, index == 0)?;
            layer.attend(&pass, cache.layer(index)?, activations)?;
            activations.norm(backend, (rows, &layer.post_attention_norm), eps, false)?;
            layer.feed_forward(&pass, activations)?;
        }
        activations.norm(backend, (rows, &self.norm), eps, self.layers.is_empty())?;
        self.logits(backend, arguments, activations)
    }

    fn logits<B: Backend>(&self, backend: &B, step: &Arguments, a: &mut Activations) -> Result<()> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let mut x = a.x.view(&[step.rows, hidden])?;
        if !step.all_wanted {
            gather_rows(backend, x, step.wanted_rows()?, a.wanted.view_mut(&[step.wanted, hidden])?)?;
            x = a.wanted.view(&[step.wanted, hidden])?;
        }
        a.logits_rows = step.wanted;
        self.output.multiply(backend, x, a.logits.view_mut(&[step.wanted, vocab])?)
    }

    /// What a step needs of activations.
    pub(crate) fn sizes(&self, step: &Arguments) -> Sizes {
        Sizes { rows: step.rows, wanted: step.wanted, workspace: step.plan.workspace_bytes() }
    }
}
