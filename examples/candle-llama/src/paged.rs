//! A Llama of candle's layers with paged attention, for a batch of requests.
//!
//! Rows are ragged, `[num_tokens, ...]`: the new tokens of request 0, then those of request 1, and so on.

use crate::Checkpoint;
use candle_core::{D, DType, Result, Tensor};
use candle_nn::{
    Embedding, Linear, Module, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm, rotary_emb,
};
use candle_transformers::models::llama::Config;
use tilewright::{HeadDim, Heads, Mask, PageTable, Problem};
use tilewright_candle::{PagedAttention, Step};

/// The model with its paged caches.
pub(crate) struct PagedLlama {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    attention: PagedAttention,
    cos: Tensor,
    sin: Tensor,
    page_size: usize,
}

struct Layer {
    norms: [RmsNorm; 2],
    q: Linear,
    k: Linear,
    v: Linear,
    output: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    cache: Tensor,
}

impl PagedLlama {
    pub(crate) fn load(checkpoint: &Checkpoint, num_pages: usize, page_size: usize) -> Result<Self> {
        let Checkpoint { config, weights, device } = checkpoint;
        let heads = Heads { qo: config.num_attention_heads, kv: config.num_key_value_heads };
        let head_dim = config.hidden_size / heads.qo;
        let problem = Problem::builder(heads, HeadDim::same(head_dim)).mask(Mask::Causal).build();
        let attention = PagedAttention::new(problem.map_err(candle_core::Error::wrap)?, device)?;
        let layer = |index| {
            let cache = attention.cache(num_pages, page_size)?;
            Layer::load(&weights.pp(format!("model.layers.{index}")), config, cache)
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
        let embedding = embedding(config.vocab_size, config.hidden_size, weights.pp("model.embed_tokens"))?;
        let head = match config.tie_word_embeddings {
            true => Linear::new(embedding.embeddings().clone(), None),
            false => linear_no_bias(config.hidden_size, config.vocab_size, weights.pp("lm_head"))?,
        };
        let norm = rms_norm(config.hidden_size, config.rms_norm_eps, weights.pp("model.norm"))?;
        let frequency = |i| 1.0 / config.rope_theta.powf(i as f32 / head_dim as f32);
        let frequencies = Tensor::from_iter((0..head_dim).step_by(2).map(frequency), device)?.unsqueeze(0)?;
        let positions = Tensor::arange(0, config.max_position_embeddings as u32, device)?;
        let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&frequencies)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        Ok(Self { embedding, layers, norm, head, attention, cos, sin, page_size })
    }

    /// The next token of each request. `new` are its new tokens, after `done` tokens in the cache.
    pub(crate) fn forward(&mut self, new: &[&[u32]], done: &[usize]) -> Result<Vec<u32>> {
        let device = self.cos.device();
        let mut qo_indptr = vec![0];
        let (mut page_indptr, mut pages, mut last_page_len) = (vec![0], vec![], vec![]);
        let mut positions = vec![];
        for (request, (tokens, done)) in new.iter().zip(done).enumerate() {
            let len = done + tokens.len();
            positions.extend(*done as u32..len as u32);
            qo_indptr.push(positions.len() as i32);
            // page `i` of a request follows page `i` of the request before it
            pages.extend((0..len.div_ceil(self.page_size)).map(|page| (page * new.len() + request) as i32));
            page_indptr.push(pages.len() as i32);
            last_page_len.push(((len - 1) % self.page_size + 1) as i32);
        }
        let table = PageTable::new(&page_indptr, &pages, &last_page_len, self.page_size);
        let step = self.attention.step(&qo_indptr, table)?;

        let positions = Tensor::new(positions, device)?;
        let angles = [self.cos.index_select(&positions, 0)?, self.sin.index_select(&positions, 0)?];
        let mut x = self.embedding.forward(&Tensor::new(new.concat(), device)?)?;
        for layer in &self.layers {
            x = layer.forward(&x, &angles, &step)?;
        }
        let last: Vec<u32> = qo_indptr[1..].iter().map(|end| (end - 1) as u32).collect();
        let x = self.norm.forward(&x.index_select(&Tensor::new(last, device)?, 0)?)?;
        self.head.forward(&x)?.argmax(D::Minus1)?.to_vec1()
    }
}

impl Layer {
    fn load(weights: &VarBuilder<'_>, config: &Config, cache: Tensor) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let kv = hidden / config.num_attention_heads * config.num_key_value_heads;
        let norm = |name| rms_norm(hidden, config.rms_norm_eps, weights.pp(name));
        let linear = |name: &str, rows, columns| linear_no_bias(rows, columns, weights.pp(name));
        Ok(Self {
            norms: [norm("input_layernorm")?, norm("post_attention_layernorm")?],
            q: linear("self_attn.q_proj", hidden, hidden)?,
            k: linear("self_attn.k_proj", hidden, kv)?,
            v: linear("self_attn.v_proj", hidden, kv)?,
            output: linear("self_attn.o_proj", hidden, hidden)?,
            gate: linear("mlp.gate_proj", hidden, inner)?,
            up: linear("mlp.up_proj", hidden, inner)?,
            down: linear("mlp.down_proj", inner, hidden)?,
            cache,
        })
    }

    fn forward(&self, x: &Tensor, angles: &[Tensor; 2], step: &Step<'_>) -> Result<Tensor> {
        let [attention_norm, feed_forward_norm] = &self.norms;
        let head_dim = self.cache.dim(D::Minus1)?;
        let heads = |rows: Tensor| rows.reshape((rows.dim(0)?, (), head_dim));

        let y = attention_norm.forward(x)?;
        let q = rope(&heads(self.q.forward(&y)?)?, angles)?;
        let k = rope(&heads(self.k.forward(&y)?)?, angles)?;
        step.append(&self.cache, &k, &heads(self.v.forward(&y)?)?)?;
        let y = step.attend(&q, &self.cache)?.flatten_from(1)?;
        let x = (x + self.output.forward(&y)?)?;

        let y = feed_forward_norm.forward(&x)?;
        let y = (self.gate.forward(&y)?.silu()? * self.up.forward(&y)?)?;
        x + self.down.forward(&y)?
    }
}

/// RoPE of `[num_tokens, num_heads, head_dim]`. The result is a transposed tensor; its strides need no copy.
fn rope(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let x = x.transpose(0, 1)?.unsqueeze(0)?.contiguous()?;
    rotary_emb::rope(&x, cos, sin)?.squeeze(0)?.transpose(0, 1)
}
