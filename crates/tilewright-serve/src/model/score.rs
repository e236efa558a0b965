//! Logits of every position of a text, for evaluation: no engine, no sampling.

use super::{Transformer, activations::Activations, transformer::Device};
use crate::{arguments::Arguments, cache::KvPool, step::Step};
use tilewright::{Attention, Backend, Dtype, Result, ViewMut, ensure, tensor::copy};

const PAGE_SIZE: usize = 16;

/// What a text is computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Precision {
    /// Of what products and attention read, and so of what tensor cores multiply: f32, f16 or bf16. Results of products, and the
    /// residual stream, are f32 whatever this is.
    pub activations: Dtype,
    /// Of keys and values in their pages.
    pub kv: Dtype,
}

impl From<Dtype> for Precision {
    /// Activations in f32, keys and values in `kv`.
    fn from(kv: Dtype) -> Self {
        Self { activations: Dtype::F32, kv }
    }
}

impl Transformer {
    /// The logits `[tokens, vocab_size]` after each of `tokens`, in f32, computed in `precision`. On the CPU they are, to the last
    /// bit, those that an [`Engine`](crate::Engine) draws from.
    ///
    /// # Errors
    /// When there is no token, one is outside the vocabulary, or there are more than the model's context; when the weights are not
    /// where `backend` reads them ([`Transformer::on`]).
    pub fn score<B: Backend + Clone>(
        &self,
        backend: &B,
        tokens: &[u32],
        precision: impl Into<Precision>,
    ) -> Result<Vec<f32>> {
        const OPERATOR: &str = "model.score";
        let (vocab, context) = (self.config().vocab_size, self.config().max_position_embeddings);
        ensure!(
            (1..=context).contains(&tokens.len()),
            OPERATOR,
            "there are {} tokens, expected 1 to {context}",
            tokens.len()
        );
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
            return Err(tilewright::Error::new(OPERATOR, format!("token {token} is not in 0..{vocab}")));
        }
        let Precision { activations, kv } = precision.into();
        let num_pages = tokens.len().div_ceil(PAGE_SIZE);
        let mut cache = KvPool::for_model(backend, self.config(), (num_pages, PAGE_SIZE), kv)?;
        let attention = Attention::new(self.attention_problem(activations, kv)?, backend.clone())?;
        let device = Device { backend, attention: &attention, rope: &self.rope(tokens.len())? };
        let step = Arguments::new(backend, &attention, &Step::whole(tokens, PAGE_SIZE))?;
        let mut activations = Activations::new(backend, self.config(), activations, self.sizes(&step))?;
        self.forward(&device, &step, &mut cache, &mut activations)?;
        let mut logits = vec![0.0; tokens.len() * vocab];
        let there = ViewMut::new(&mut logits, &[tokens.len(), vocab])?;
        copy(backend, activations.logits()?, there)?;
        Ok(logits)
    }
}
