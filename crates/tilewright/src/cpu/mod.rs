//! The CPU backend: executes the same plans as a GPU, on a pool of threads.

mod activation;
mod norm;
mod parallel;
mod rope;
mod sampling;
mod threshold;

use crate::{
    Backend, Result, View, ViewMut,
    activation::Activation,
    norm::NormWeight,
    rope::{CosSinCache, Rope},
    sampling::{Filter, Sampled, SamplingParams, Scores},
};
use std::sync::Arc;

/// The CPU backend: a thread pool. Cheap to clone; clones share the pool.
#[derive(Debug, Clone)]
pub struct Cpu {
    pub(crate) pool: Arc<rayon::ThreadPool>,
}

impl Cpu {
    /// As many threads as the machine has.
    pub fn new() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Exactly `threads` threads, at least one.
    pub fn with_threads(threads: usize) -> Self {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("tilewright-{i}"))
            .build()
            .expect("the operating system gives threads");
        Self { pool: Arc::new(pool) }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for Cpu {
    fn describe(&self) -> String {
        format!("cpu: {} threads", self.pool.current_num_threads())
    }

    fn rmsnorm(&self, x: View<'_>, weight: &NormWeight<'_>, eps: f32, out: ViewMut<'_>) -> Result<()> {
        norm::rmsnorm(self, x, weight, eps, out);
        Ok(())
    }

    fn rmsnorm_in_place(&self, x: ViewMut<'_>, weight: &NormWeight<'_>, eps: f32) -> Result<()> {
        norm::rmsnorm_in_place(self, x, weight, eps);
        Ok(())
    }

    fn fused_add_rmsnorm(
        &self,
        x: ViewMut<'_>,
        residual: ViewMut<'_>,
        weight: &NormWeight<'_>,
        eps: f32,
    ) -> Result<()> {
        norm::fused_add_rmsnorm(self, x, residual, weight, eps);
        Ok(())
    }

    fn rope(&self, q: ViewMut<'_>, k: ViewMut<'_>, positions: &[i32], rope: &Rope) -> Result<()> {
        rope::rope(self, q, k, positions, rope);
        Ok(())
    }

    fn rope_with_cos_sin_cache(
        &self,
        q: ViewMut<'_>,
        k: ViewMut<'_>,
        positions: &[i32],
        cache: &CosSinCache,
    ) -> Result<()> {
        rope::rope_with_cos_sin_cache(self, q, k, positions, cache);
        Ok(())
    }

    fn act_and_mul(&self, activation: Activation, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        activation::act_and_mul(self, activation, x, out);
        Ok(())
    }

    fn softmax(&self, logits: View<'_>, temperature: &[f32], out: ViewMut<'_>) -> Result<()> {
        sampling::softmax(self, logits, temperature, out);
        Ok(())
    }

    fn filter(&self, filter: Filter<'_>, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        sampling::filter(self, filter, x, out);
        Ok(())
    }

    fn sample(&self, scores: Scores<'_>, params: &[SamplingParams], out: &mut [Sampled]) -> Result<()> {
        sampling::sample(self, scores, params, out);
        Ok(())
    }
}
