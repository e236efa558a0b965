//! The seam: what a device must be able to do. Everything above it is the same on every device.
//!
//! Operators check their arguments once, in their own file; a backend may rely on that and executes.

use crate::{
    Result, View, ViewMut,
    activation::Activation,
    norm::NormWeight,
    rope::{CosSinCache, Rope},
    sampling::{Filter, Sampled, SamplingParams, Scores},
};

/// A device that executes operators.
pub trait Backend {
    /// What runs, for a person to read, for example `cpu: 2 threads, avx512`.
    fn describe(&self) -> String;

    /// [`crate::norm::rmsnorm`]
    ///
    /// # Errors
    /// When the device fails.
    fn rmsnorm(&self, x: View<'_>, weight: &NormWeight<'_>, eps: f32, out: ViewMut<'_>) -> Result<()>;

    /// [`crate::norm::rmsnorm_in_place`]
    ///
    /// # Errors
    /// When the device fails.
    fn rmsnorm_in_place(&self, x: ViewMut<'_>, weight: &NormWeight<'_>, eps: f32) -> Result<()>;

    /// [`crate::norm::fused_add_rmsnorm`]
    ///
    /// # Errors
    /// When the device fails.
    fn fused_add_rmsnorm(
        &self,
        x: ViewMut<'_>,
        residual: ViewMut<'_>,
        weight: &NormWeight<'_>,
        eps: f32,
    ) -> Result<()>;

    /// [`crate::rope::apply_rope`]; `positions` has one element per token, none negative.
    ///
    /// # Errors
    /// When the device fails.
    fn rope(&self, q: ViewMut<'_>, k: ViewMut<'_>, positions: &[i32], rope: &Rope) -> Result<()>;

    /// [`crate::rope::apply_rope_with_cos_sin_cache`]; `positions` has one element per token, all in the table.
    ///
    /// # Errors
    /// When the device fails.
    fn rope_with_cos_sin_cache(
        &self,
        q: ViewMut<'_>,
        k: ViewMut<'_>,
        positions: &[i32],
        cache: &CosSinCache,
    ) -> Result<()>;

    /// [`crate::activation::act_and_mul`]
    ///
    /// # Errors
    /// When the device fails.
    fn act_and_mul(&self, activation: Activation, x: View<'_>, out: ViewMut<'_>) -> Result<()>;

    /// [`crate::sampling::softmax`]
    ///
    /// # Errors
    /// When the device fails.
    fn softmax(&self, logits: View<'_>, temperature: &[f32], out: ViewMut<'_>) -> Result<()>;

    /// [`crate::sampling::top_k_renorm_probs`] and the other filters of [`Filter`]
    ///
    /// # Errors
    /// When the device fails.
    fn filter(&self, filter: Filter<'_>, x: View<'_>, out: ViewMut<'_>) -> Result<()>;

    /// [`crate::sampling::sample`] and [`crate::sampling::sampling_from_probs`]
    ///
    /// # Errors
    /// When the device fails; a row that cannot be sampled is told in `out`.
    fn sample(&self, scores: Scores<'_>, params: &[SamplingParams], out: &mut [Sampled]) -> Result<()>;
}
