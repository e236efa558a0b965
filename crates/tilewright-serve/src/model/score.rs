//! Logits of every position of a text, for evaluation: no engine, no sampling.

use super::Transformer;
use crate::{
    cache::KvPool,
    engine::SPLIT,
    model::transformer::{Activations, Device},
    step::Step,
};
use tilewright::{Attention, Backend, Dtype, Result, ensure};

const PAGE_SIZE: usize = 16;

impl Transformer {
    /// The logits `[tokens, vocab_size]` after each of `tokens`, in f32, with keys and values kept in `kv_dtype`. To
    /// the last bit they are those that an [`Engine`](crate::Engine) draws from.
    ///
    /// # Errors
    /// When there is no token, one is outside the vocabulary, or there are more than the model's context.
    pub fn score<B: Backend + Clone>(
        &self,
        backend: &B,
        tokens: &[u32],
        kv_dtype: Dtype,
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
        let num_pages = tokens.len().div_ceil(PAGE_SIZE);
        let mut cache = KvPool::for_model(self.config(), (num_pages, PAGE_SIZE), kv_dtype)?;
        let attention = Attention::new(self.attention_problem(kv_dtype)?, backend.clone())?;
        let device = Device { backend, attention: &attention, rope: &self.rope(tokens.len())? };
        let step = Step::whole(tokens, PAGE_SIZE);
        let plan = attention.plan_with(&step.batch(), SPLIT)?;
        let mut activations = Activations::default();
        self.forward(&device, (&step, &plan), &mut cache, &mut activations)?;
        Ok(activations.logits)
    }
}
