//! Logits of every position of a text, for evaluation without engine and sampling.

use super::{Transformer, activations::Activations, transformer::ForwardContext};
use crate::{
    cache::KvPool,
    step::{Step, StepInputs},
};
use tilewright::{Backend, Dtype, Result, ViewMut, ensure, tensor::copy};

const PAGE_SIZE: usize = 16;

/// Dtypes of the computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Precision {
    /// Input dtype of matrix products and attention: f32, f16 or bf16. Outputs of matrix products and the residual stream are
    /// always f32.
    pub activations: Dtype,
    /// Dtype of keys and values in the KV cache.
    pub kv: Dtype,
}

impl From<Dtype> for Precision {
    /// f32 activations, keys and values in `kv`.
    fn from(kv: Dtype) -> Self {
        Self { activations: Dtype::F32, kv }
    }
}

impl Transformer {
    /// The logits after each of `tokens`, f32 `[tokens, vocab_size]`, computed in `precision`. On the CPU they are bit-identical to
    /// those that an [`Engine`](crate::Engine) samples from.
    ///
    /// # Errors
    /// When `tokens` is empty, exceeds the model's context, or has a token outside the vocabulary; when the weights are not in the
    /// memory of `backend` ([`Transformer::upload`]).
    pub fn score<B: Backend + Clone>(
        &self,
        backend: &B,
        tokens: &[u32],
        precision: impl Into<Precision>,
    ) -> Result<Vec<f32>> {
        const OPERATOR: &str = "model.score";
        let (vocab, max_len) = (self.config().vocab_size, self.config().max_position_embeddings);
        ensure!(
            (1..=max_len).contains(&tokens.len()),
            OPERATOR,
            "there are {} tokens, expected 1 to {max_len}",
            tokens.len()
        );
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
            return Err(tilewright::Error::new(OPERATOR, format!("token {token} is not in 0..{vocab}")));
        }
        let Precision { activations, kv } = precision.into();
        let num_pages = tokens.len().div_ceil(PAGE_SIZE);
        let mut cache = KvPool::for_model(backend, self.config(), num_pages, PAGE_SIZE, kv)?;
        let attention = self.attention(backend, activations, kv)?;
        let context = ForwardContext { backend, attention: &attention, ropes: &self.ropes(tokens.len())? };
        let step = StepInputs::new(backend, &attention, &Step::single_sequence(tokens, PAGE_SIZE))?;
        let mut activations = Activations::new(backend, self.config(), activations, self.sizes(&step))?;
        self.forward(&context, &step, &mut cache, &mut activations)?;
        let mut logits = vec![0.0; tokens.len() * vocab];
        let host = ViewMut::new(&mut logits, &[tokens.len(), vocab])?;
        copy(backend, activations.logits()?, host)?;
        Ok(logits)
    }
}
