//! The seam: what a device must be able to do. Everything above it is the same on every device.
//!
//! Operators check their arguments once, in their own file; a backend may rely on what they document and
//! executes.

use crate::{
    Dtype, Result, View, ViewMut, Workspace,
    activation::Activation,
    attention::{Inputs, Output, Plan, Problem, Tiling, variant::ExpressionVariant},
    kv::{AppendPlan, ScaleMut, Slots, copy_pages_on_host},
    norm::NormWeight,
    rope::{CosSinCache, Rope},
    sampling::{
        ChainOutput, Choice, Drafts, Filter, LogitsEdit, Logprobs, Sampled, SamplingParams, Scores, TopK,
    },
    tensor::{Buffer, IndexBuffer, Indices, copy_on_host},
};
use std::{any::Any, fmt::Debug, sync::Arc};

/// What only the backend that made it understands.
pub type Opaque = Arc<dyn Any + Send + Sync>;

/// Work that a backend has recorded, to be done again and again.
pub trait Recorded: Debug + Send + Sync {
    /// Does all of it once more, in the order of the work given before and behind: it reads what is at its addresses now.
    ///
    /// # Errors
    /// When the device fails.
    fn replay(&self) -> Result<()>;
}

/// A device that executes operators.
pub trait Backend {
    /// What runs, for a person to read, for example `cpu: 2 threads, AVX-512`.
    fn describe(&self) -> String;

    /// Whether operators compute in host memory, and so take views of whatever the caller has. A backend that does not says so and
    /// has methods of its own for all that is about memory.
    fn computes_on_host(&self) -> bool {
        true
    }

    /// Memory for `len` elements where this backend computes. They are 0 on the host; on a device nobody has written them.
    ///
    /// # Errors
    /// When there is too little.
    fn allocate(&self, dtype: Dtype, len: usize) -> Result<Buffer> {
        Buffer::on_host(dtype, len)
    }

    /// Memory for `len` indices where this backend computes.
    ///
    /// # Errors
    /// When there is too little.
    fn allocate_indices(&self, len: usize) -> Result<IndexBuffer> {
        Ok(IndexBuffer::on_host(len))
    }

    /// A workspace of at least `bytes` bytes where this backend computes.
    ///
    /// # Errors
    /// When there is too little memory.
    fn workspace(&self, bytes: usize) -> Result<Workspace> {
        Ok(Workspace::with_bytes(bytes.next_multiple_of(size_of::<f32>())))
    }

    /// [`crate::tensor::copy`]
    ///
    /// # Errors
    /// When the device fails, or a view is of another.
    fn copy(&self, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
        copy_on_host(from, to);
        Ok(())
    }

    /// Makes the first of the indices `to` those of `from`, which may be changed as soon as this returns.
    ///
    /// # Errors
    /// When there are fewer, or the device fails.
    fn write_indices(&self, from: &[i32], to: &mut IndexBuffer) -> Result<()> {
        let len = to.len();
        crate::ensure!(
            from.len() <= len,
            "tensor.write_indices",
            "there are {} indices, the buffer has room for {len}",
            from.len()
        );
        if let Some(to) = to.host_mut() {
            to[..from.len()].copy_from_slice(from);
        }
        Ok(())
    }

    /// [`crate::kv::copy_pages`]; there is at least one page to copy.
    ///
    /// # Errors
    /// When the device fails.
    fn copy_pages(&self, pages: ViewMut<'_>, copies: &[(usize, usize)]) -> Result<()> {
        copy_pages_on_host(pages, copies);
        Ok(())
    }

    /// Records what `work` asks of this backend instead of doing it: launches, and copies to the device. Memory that it uses has to
    /// stay where it is as long as the record is replayed. `None`: this backend does not record, and `work` was not called.
    ///
    /// # Errors
    /// Those of `work`, which may not allocate, wait, or fetch results.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Box<dyn Recorded>>> {
        let _ = work; // a device that computes at once has nothing to win
        Ok(None)
    }

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

    /// Brings the places of a step's new tokens to the device; it comes back in [`Slots::prepared`]. Done when a plan is made and
    /// when it is refilled: [`AppendPlan::prepared`] is what was made then, which is to be rewritten where it is, as recorded work
    /// reads it there. Tokens up to [`AppendPlan::capacity`] that the plan does not have are skipped.
    ///
    /// # Errors
    /// When the device has no room for it.
    fn prepare_append(&self, plan: &AppendPlan) -> Result<Option<Opaque>> {
        let _ = plan; // a device that reads host memory has it already
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

    /// [`crate::gather::gather_rows`]; ids on the host are numbers of rows.
    ///
    /// # Errors
    /// When the device fails.
    fn gather_rows(&self, table: View<'_>, ids: Indices<'_>, out: ViewMut<'_>) -> Result<()>;

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

    /// [`crate::norm::add_rmsnorm`]
    ///
    /// # Errors
    /// When the device fails.
    fn add_rmsnorm(
        &self,
        x: View<'_>,
        residual: ViewMut<'_>,
        weight_and_eps: (&NormWeight<'_>, f32),
        out: ViewMut<'_>,
    ) -> Result<()>;

    /// [`crate::rope::apply_rope`]; `positions` has one element per token, none negative as far as they are on the host.
    ///
    /// # Errors
    /// When the device fails.
    fn rope(&self, q: ViewMut<'_>, k: ViewMut<'_>, positions: Indices<'_>, rope: &Rope) -> Result<()>;

    /// [`crate::rope::apply_rope_with_cos_sin_cache`]; `positions` has one element per token, all in the table as far as they are on
    /// the host.
    ///
    /// # Errors
    /// When the device fails.
    fn rope_with_cos_sin_cache(
        &self,
        q: ViewMut<'_>,
        k: ViewMut<'_>,
        positions: Indices<'_>,
        cache: &CosSinCache,
    ) -> Result<()>;

    /// [`crate::rope::rotate_with_cos_sin_cache`]: both tensors to others; `positions` as there.
    ///
    /// # Errors
    /// When the device fails.
    fn rotate_with_cos_sin_cache(
        &self,
        from: [View<'_>; 2],
        to: [ViewMut<'_>; 2],
        positions: Indices<'_>,
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
