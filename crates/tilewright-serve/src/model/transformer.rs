//! The forward pass of a decoder, layer by layer, on any backend.
//!
//! ```text
//! x = embedding[tokens] (· multiplier)                               [rows, hidden]
//! for each layer:
//!     q, k, v = norm(x) · Wq, Wk, Wv (+ bias)                        [rows, heads, head_dim]
//!     q, k = rope(qk_norm(q), qk_norm(k))                            qk_norm: Qwen3, Gemma 3, OLMo 2
//!     pages ← k, v;  x += attention(q, pages) · Wo
//!     x += (activation(norm(x) · Wgate) * norm(x) · Wup) · Wdown
//! logits = norm(x)[logit_rows] · Woutput                             [num_logits, vocab], f32
//! ```
//!
//! [`ModelConfig`] says which norms, multipliers, soft caps, windows and rotations a model has; an absent one costs nothing.
//! Layers with the same window share an attention operator and its plan of the step.
//!
//! Matrix products and attention read the requested dtype and accumulate in f32 (see [`Activations`]). Weights keep the
//! checkpoint's dtype, or are rounded once at load time.

use super::{
    ModelConfig, Tensor, Weights,
    activations::{Activations, Sizes, scale},
    layer::{Layer, LayerContext, WeightLoader},
    linear::{Linear, Weight},
};
use crate::{cache::KvPool, step::StepInputs};
use half::{bf16, f16};
use tilewright::{
    Attention, Backend, Dtype, Error, Plan, Result,
    elementwise::{self, ElementFunction},
    ensure,
    gather::gather_rows,
    gemm::WeightFormat,
    rope::CosSinCache,
};

/// A model's weights, ready to run.
#[derive(Debug)]
pub struct Transformer {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    output: Linear,
    /// A tensor that the checkpoint stores as integers, with its type.
    quantized: Option<(String, String)>,
}

/// Backend, attention operators and RoPE tables of a forward pass.
pub(crate) struct ForwardContext<'a, B> {
    pub(crate) backend: &'a B,
    /// As [`Transformer::attention`] returns them.
    pub(crate) attention: &'a [Attention<B>],
    /// As [`Transformer::ropes`] returns them.
    pub(crate) ropes: &'a [CosSinCache],
}

impl Transformer {
    /// Assembles the weights of `config`, rounded to `dtype` if it is `Some`. `None` keeps the storage: matrices in Q8_0 and Q4_0 keep
    /// their integers in packed matrices, which only a CPU multiplies, and other blocks are dequantized to bf16. An `lm_head.weight` that differs from a tied
    /// embedding is used, and [`Transformer::config`] then says that the two are not tied.
    ///
    /// # Errors
    /// When a tensor is missing or unexpected, its shape or dtype differs from the configuration, or `dtype` is cache-only.
    pub fn new(mut config: ModelConfig, weights: &Weights, dtype: Option<Dtype>) -> Result<Self> {
        if let Some(dtype) = dtype {
            ensure!(!dtype.is_cache_only(), "model.new", "dtype = {dtype}, expected f32, f16 or bf16");
        }
        let (layers, ropes) = (config.layers.len(), config.ropes.len());
        let described =
            layers == config.num_hidden_layers && config.layers.iter().all(|layer| layer.rope < Some(ropes));
        ensure!(
            described,
            "model.new",
            "layers describes {layers} layers with {ropes} rotations, expected num_hidden_layers = {}",
            config.num_hidden_layers
        );
        weights.check(&config)?;
        if weights.has_own_output(&config)? {
            config.tie_word_embeddings = false;
        }
        let loader = WeightLoader { config: &config, weights, dtype };
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let layers = (0..config.num_hidden_layers).map(|index| loader.layer(index)).collect::<Result<_>>()?;
        let embedding = loader.tensor(ModelConfig::EMBEDDING, &[vocab, hidden])?;
        let output = match loader.packed(config.output_matrix(), [vocab, hidden])? {
            Some(packed) => Weight::Packed(packed),
            None if config.tie_word_embeddings => Weight::Rows(embedding.clone()),
            None => Weight::Rows(loader.tensor(ModelConfig::OUTPUT, &[vocab, hidden])?),
        };
        let norm = loader.norm("model.norm", hidden)?;
        Ok(Self {
            embedding,
            layers,
            norm,
            output: Linear { weight: output, bias: None },
            quantized: weights.quantized().map(|(name, kind)| (name.to_owned(), kind)),
            config,
        })
    }

    /// Moves the weights to where `backend` reads them: a device backend to its memory, a backend that packs weights to panels in
    /// the memory of the process, after which only the embedding is read from the files. Calls `progress` with the bytes moved so
    /// far after each weight, up to [`Transformer::bytes`].
    ///
    /// # Errors
    /// When the backend has too little memory.
    pub fn upload<B: Backend>(mut self, backend: &B, mut progress: impl FnMut(u64)) -> Result<Self> {
        if backend.computes_on_host() {
            self.pack(backend, None)?;
            return Ok(self);
        }
        let tied = self.config.tie_word_embeddings;
        let mut done = 0;
        let layers = self.layers.iter_mut().flat_map(Layer::tensors_mut);
        let output = (!tied).then_some(&mut self.output).into_iter().flat_map(Linear::tensors_mut);
        for tensor in layers.chain([&mut self.norm, &mut self.embedding]).chain(output) {
            *tensor = tensor.upload(backend)?;
            done += tensor.bytes() as u64;
            progress(done);
        }
        self.layers.iter_mut().try_for_each(|layer| layer.join_projections(backend))?;
        if tied {
            self.output.weight = Weight::Rows(self.embedding.clone());
        }
        Ok(self)
    }

    /// Packs all weight matrices, rounded as `format` says; embedding, norms and biases keep their dtype.
    ///
    /// # Errors
    /// When the checkpoint is quantized, the backend does not multiply packed weights, the weights are packed already, or memory is
    /// exhausted.
    pub fn quantize<B: Backend>(mut self, backend: &B, format: WeightFormat) -> Result<Self> {
        const OPERATOR: &str = "model.quantize";
        if let Some((name, kind)) = &self.quantized {
            let message =
                format!("format = {format:?}, but {name} is stored as {kind}, expected f32, f16 or bf16");
            return Err(Error::new(OPERATOR, message));
        }
        let is_packed = |weight: &Weight| matches!(weight, Weight::Packed(_));
        ensure!(!is_packed(&self.output.weight), OPERATOR, "the weights are already packed");
        self.pack(backend, Some(format))?;
        ensure!(
            is_packed(&self.output.weight),
            OPERATOR,
            "{} does not multiply {format:?} weights",
            backend.describe()
        );
        Ok(self)
    }

    fn pack<B: Backend>(&mut self, backend: &B, format: Option<WeightFormat>) -> Result<()> {
        let matrices = self.layers.iter_mut().flat_map(Layer::matrices_mut);
        matrices.chain([&mut self.output.weight]).try_for_each(|weight| weight.pack(backend, format))
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
        let output = if self.config.tie_word_embeddings { 0 } else { self.output.bytes() };
        let layers = self.layers.iter().map(Layer::bytes).sum::<usize>();
        (layers + self.norm.bytes() + self.embedding.bytes() + output) as u64
    }

    /// The weight matrices that a decode step reads: all except the embedding, of which it reads one row per token.
    fn matrices(&self) -> impl Iterator<Item = &Weight> {
        self.layers.iter().flat_map(Layer::matrices).chain([&self.output.weight])
    }

    /// Bytes of weights that a decode step reads.
    pub fn bytes_per_step(&self) -> usize {
        self.matrices().map(Weight::bytes).sum()
    }

    /// Multiplications and additions per token, without attention.
    pub fn flops_per_token(&self) -> usize {
        2 * self.matrices().map(Weight::elements).sum::<usize>()
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
        let (backend, config) = (context.backend, &self.config);
        activations.rows = inputs.rows;
        self.embed(backend, inputs, activations)?;
        let layer_context = LayerContext { config, forward: context, inputs };
        for (index, layer) in self.layers.iter().enumerate() {
            let norms = &layer.attention_norms;
            activations.norm(backend, norms.before.as_ref(), index == 0)?;
            layer.attend(&layer_context, cache.layer(index)?, activations)?;
            activations.end_block(backend, norms.after.as_ref(), config.residual_multiplier)?;
            let norms = &layer.mlp_norms;
            activations.norm(backend, norms.before.as_ref(), false)?;
            layer.feed_forward(&layer_context, activations)?;
            activations.end_block(backend, norms.after.as_ref(), config.residual_multiplier)?;
        }
        activations.norm(backend, Some(&self.norm), self.layers.is_empty())?;
        self.logits(backend, inputs, activations)
    }

    /// `residual ← multiplier · embedding[tokens]`, and `x` likewise if the first block has no norm.
    fn embed<B: Backend>(&self, backend: &B, inputs: &StepInputs, a: &mut Activations) -> Result<()> {
        let shape = [inputs.rows, self.config.hidden_size];
        let multiplier = match self.embedding.dtype() {
            Dtype::Bf16 if self.config.rounds_embedding_multiplier => {
                bf16::from_f32(self.config.embedding_multiplier).to_f32()
            }
            Dtype::F16 if self.config.rounds_embedding_multiplier => {
                f16::from_f32(self.config.embedding_multiplier).to_f32()
            }
            _ => self.config.embedding_multiplier,
        };
        let needs_x = self.layers.first().is_some_and(|layer| layer.attention_norms.before.is_none());
        for buffer in [Some(&mut a.residual), needs_x.then_some(&mut a.x)].into_iter().flatten() {
            gather_rows(backend, self.embedding.view(), inputs.tokens()?, buffer.view_mut(&shape)?)?;
            scale(backend, buffer.view_mut(&shape)?, multiplier)?;
        }
        Ok(())
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
        let shape = [step.num_logits, vocab];
        self.output.multiply(backend, x, a.logits.view_mut(&shape)?)?;
        scale(backend, a.logits.view_mut(&shape)?, self.config.logits_divisor.recip())?;
        if let Some(cap) = self.config.logits_soft_cap {
            let capped = ElementFunction::SoftCap { cap };
            elementwise::map_in_place(backend, capped, a.logits.view_mut(&shape)?)?;
        }
        Ok(())
    }

    /// The activation sizes that a step needs.
    pub(crate) fn sizes(&self, step: &StepInputs) -> Sizes {
        let workspace = step.plans.iter().map(Plan::workspace_bytes).max().unwrap_or(0);
        Sizes { rows: step.rows, num_logits: step.num_logits, workspace }
    }
}
