//! The seam: what a device must be able to do. Everything above it is the same on every device.
//!
//! Operators check their arguments once, in their own file; a backend may rely on what they document and
//! executes.

use crate::{
    Result, View, ViewMut,
    activation::Activation,
    attention::{Inputs, Output, Plan, Problem, Tiling, variant::ExpressionVariant},
    kv::{ScaleMut, Slots},
    norm::NormWeight,
    rope::{CosSinCache, Rope},
    sampling::{
        ChainOutput, Choice, Drafts, Filter, LogitsEdit, Logprobs, Sampled, SamplingParams, Scores, TopK,
    },
};
use std::{any::Any, sync::Arc};

/// What only the backend that made it understands.
pub type Opaque = Arc<dyn Any + Send + Sync>;

/// A device that executes operators.
pub trait Backend {
    /// What runs, for a person to read, for example `cpu: 2 threads, AVX-512`.
    fn describe(&self) -> String;

    /// How this device wants attention to be cut.
    ///
    /// # Errors
    /// When it cannot do `problem`, with all the reasons.
    fn tiling(&self, problem: &Problem) -> Result<Tiling>;

    /// Makes what attention needs of `problem` and `variant`, kernels for example; it comes back in
    /// [`Inputs::built`]. Done when an operator is made.
    ///
    /// # Errors
    /// When the device cannot do this variant, with all the reasons.
    fn build(&self, problem: &Problem, variant: &ExpressionVariant) -> Result<Option<Opaque>> {
        let _ = (problem, variant); // a device that interprets hooks has nothing to make
        Ok(None)
    }

    /// Brings a plan to the device; it comes back in [`Plan::prepared`]. Done when a plan is made, and when it is rewritten:
    /// then `previous` is what was made of it before. A plan of fixed capacity keeps its addresses.
    ///
    /// # Errors
    /// When the device has no room for it.
    fn prepare(&self, plan: &Plan, previous: Option<Opaque>) -> Result<Option<Opaque>> {
        let _ = (plan, previous); // a device that reads host memory has it already
        Ok(None)
    }

    /// Executes every work item of `plan`, then every merge.
    ///
    /// # Errors
    /// When the device fails.
    fn attention(&self, plan: &Plan, inputs: &Inputs<'_>, out: Output<'_>) -> Result<()>;

    /// [`crate::attention::merge_states`]
    ///
    /// # Errors
    /// When the device fails.
    fn merge_states(&self, states: (View<'_>, View<'_>), out: (ViewMut<'_>, ViewMut<'_>)) -> Result<()>;

    /// [`crate::attention::merge_state`]
    ///
    /// # Errors
    /// When the device fails.
    fn merge_state(&self, state: (ViewMut<'_>, ViewMut<'_>), other: (View<'_>, View<'_>)) -> Result<()>;

    /// [`crate::gemm::linear`]
    ///
    /// # Errors
    /// When the device fails.
    fn linear(&self, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, out: ViewMut<'_>) -> Result<()>;

    /// One tensor of [`crate::kv::append::append_paged_kv_cache_quantized`]: `new` is `[num_tokens, num_kv_heads, dim]`.
    ///
    /// # Errors
    /// When the device fails.
    fn append(&self, new: View<'_>, cache: ViewMut<'_>, slots: &Slots<'_>, scale: ScaleMut<'_>)
    -> Result<()>;

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

    /// [`crate::sampling::distribution`]
    ///
    /// # Errors
    /// When the device fails.
    fn distribution(&self, scores: Scores<'_>, params: &[SamplingParams], out: ViewMut<'_>) -> Result<()>;

    /// [`crate::sampling::apply_token_bitmask`] and the other edits of [`LogitsEdit`]
    ///
    /// # Errors
    /// When the device fails.
    fn edit_logits(&self, edit: &LogitsEdit<'_>, logits: ViewMut<'_>) -> Result<()>;

    /// [`crate::sampling::top_k`]
    ///
    /// # Errors
    /// When the device fails.
    fn top_k(&self, scores: View<'_>, top_k: TopK, values: ViewMut<'_>, indices: &mut [i32]) -> Result<()>;

    /// [`crate::sampling::logprobs`]; `params` has one element per row.
    ///
    /// # Errors
    /// When the device fails; a row that has no distribution is told in `out`.
    fn logprobs(
        &self,
        logits: View<'_>,
        params: &[SamplingParams],
        choices: &[Choice],
        out: &mut [Result<Logprobs>],
    ) -> Result<()>;

    /// [`crate::sampling::chain_speculative_sampling`]
    ///
    /// # Errors
    /// When the device fails; a row that cannot be sampled is told in `out`.
    fn chain_speculative_sampling(
        &self,
        drafts: Drafts<'_>,
        target: Scores<'_>,
        params: &[SamplingParams],
        out: ChainOutput<'_>,
    ) -> Result<()>;
}
