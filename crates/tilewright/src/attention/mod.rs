//! Batch attention: `new` once, `plan` each step, `run` each layer.
//!
//! For query row `i`, query head `h` and its KV head `g = h / group`, over the visible keys `j`:
//!
//! ```text
//! s[j] = scale · q[i, h] · k[j, g]       o[i, h] = Σ_j softmax(s)[j] · v[j, g]       lse[i, h] = log2 Σ_j e^s[j]
//! ```
//!
//! A row without visible keys has `o = 0, lse = -inf`.

mod batch;
mod capacity;
mod cascade;
mod explanation;
mod inputs;
mod mask;
mod on_device;
mod picture;
mod plan;
mod planner;
mod problem;
mod requests;
mod resolve;
mod run;
mod schedule;
mod side_by_side;
mod single;
mod state;
pub mod variant;

pub use batch::{Batch, Index, KvTable, Level, Shard};
pub use capacity::{ArraySizes, Capacity};
pub use cascade::SharedPrefix;
pub use explanation::Explanation;
pub use inputs::{Inputs, KvTensor, LatentCache, LatentQuery, QuantizedLatentCache};
pub use mask::{BitOrder, Mask, MaskBits, PackedMask, TreeMask, packbits, segment_packbits};
pub use on_device::{DeviceBatch, DevicePages, packbits_on_device, segment_packbits_on_device};
pub use plan::{Plan, Workspace};
pub use planner::Planner;
pub use problem::{HeadDim, Heads, Problem, ProblemBuilder};
pub use requests::{KvSource, Request, Requests, Segment, SegmentMask};
pub use run::{AttentionRun, BoundAttention};
pub use schedule::{ManyRows, Merge, Schedule, Split, Tiling, WorkItem};
pub use state::{LSE_TO_NATURAL, StateMerge, merge_state, merge_states};
pub use variant::Variant;

pub(crate) use plan::BackendData;
pub(crate) use requests::ones;

use crate::{Backend, Dtype, ErrorKind, Result, ViewMut, backend::Opaque};
use std::sync::Arc;
use variant::ExpressionVariant;

/// An attention operator: one problem, one variant, one backend.
#[derive(Clone)]
pub struct Attention<B> {
    problem: Problem,
    variant: Arc<ExpressionVariant>,
    backend: B,
    tiling: Tiling,
    built: Option<Opaque>,
}

/// The tensors that [`Attention::run`] writes.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[num_rows, num_qo_heads, head_dim_vo]` of the problem's [`Problem::dtype_out`].
    pub o: ViewMut<'a>,
    /// Optional `[num_rows, num_qo_heads]` f32, base 2.
    pub lse: Option<ViewMut<'a>>,
    /// At least [`Plan::workspace_bytes`]; all layers of a step may share it.
    pub workspace: &'a mut Workspace,
}

impl<B: Backend> Attention<B> {
    /// Binds `problem` to `backend`. A GPU backend JIT-compiles kernels in the first plan that needs them, or in
    /// [`Attention::prepare`].
    ///
    /// # Errors
    /// When the backend does not support the problem; the error lists all reasons.
    pub fn new(problem: Problem, backend: B) -> Result<Self> {
        Self::with_variant(problem, variant::Plain, backend)
    }

    /// Binds `problem`, modified by `variant`, to `backend`.
    ///
    /// One plan serves all operators of the same problem and backend, independent of the variant, and those that differ in
    /// their scale, or in a mask within the planned one: runs skip its other keys, but the plan balances them. Layers that
    /// differ in these use one operator each and share the plan of the step.
    ///
    /// # Errors
    /// As [`Attention::new`], and when a hook reads an input that it does not have.
    pub fn with_variant(problem: Problem, variant: impl Variant, backend: B) -> Result<Self> {
        let tiling = backend.tiling(&problem).map_err(|error| error.with_kind(ErrorKind::Unsupported))?;
        let recorded = variant::check(&variant, &problem)?;
        let built = backend.build(&problem, variant, &recorded)?;
        Ok(Self { problem, variant: Arc::new(recorded), backend, tiling, built })
    }

    /// Loads every kernel that a run can need, for any batch, mask and alignment. A plan then loads none. Without this call,
    /// plans load the kernels of their batch, and runs load one only with the plan of an operator with other hooks.
    ///
    /// # Errors
    /// When a kernel cannot be compiled or loaded.
    pub fn prepare(&self) -> Result<()> {
        self.backend.load_attention(&self.problem, &self.variant, self.built.as_ref())
    }

    /// The problem of the operator.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The problem, the variant, and the kernel that the backend chose, with the reasons why no faster one was chosen.
    ///
    /// ```
    /// use tilewright::*;
    ///
    /// let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim::same(64)).build()?;
    /// let text = Attention::new(problem, Cpu::with_threads(2)?)?.describe();
    /// assert!(text.contains("variant plain: cpu: 2 threads, "), "{text}");
    /// # Ok::<(), Error>(())
    /// ```
    pub fn describe(&self) -> String {
        let kernel = self.backend.describe_attention(&self.problem, self.built.as_ref());
        format!("{}, variant {}: {kernel}", self.problem, self.variant.name())
    }

    /// Whether it computes an LSE; false for a variant without softmax.
    pub fn has_lse(&self) -> bool {
        self.variant.has_softmax()
    }

    /// The dtype of the softmax weights in `P · V`. It is bf16 if queries are bf16, cache elements are no wider, and
    /// the device multiplies bf16; otherwise f32. Decode rows, batch-invariant plans, and variants with query, key or
    /// value hooks may keep f32.
    pub fn weights_dtype(&self) -> Dtype {
        self.tiling.weights
    }

    /// Builds the schedule of a batch, balanced over the workers of the device.
    ///
    /// # Errors
    /// When the batch is invalid; the error names request, array, value and expectation.
    pub fn plan(&self, batch: &Batch<'_>) -> Result<Plan> {
        self.plan_with(batch, Split::Balanced)
    }

    /// [`Attention::plan`] with a choice of KV split, for batch-invariant results.
    ///
    /// # Errors
    /// As [`Attention::plan`], and when a fixed split has 0 tokens or yields too many work items.
    pub fn plan_with(&self, batch: &Batch<'_>, split: Split) -> Result<Plan> {
        self.prepare_plan(self.planner().plan_with(batch, split)?)
    }

    /// [`Attention::plan_with`] with capacity for larger batches. [`Attention::replan`] then rewrites the plan in place
    /// for any batch within `capacity`, without allocation. Device arrays keep their addresses and
    /// [`Plan::workspace_bytes`] is constant. Tensors of a run have as many rows as the batch or as the capacity; rows
    /// after those of the batch are not accessed.
    ///
    /// # Errors
    /// As [`Attention::plan_with`], when `batch` exceeds the capacity, and when the capacity yields too many work
    /// items.
    pub fn plan_with_capacity(&self, capacity: &Capacity, batch: &Batch<'_>, split: Split) -> Result<Plan> {
        self.prepare_plan(self.planner().plan_with_capacity(capacity, batch, split)?)
    }

    /// Rewrites `plan` in place for `batch` with the same KV split. A plan of fixed capacity never grows; others do.
    /// Batches with levels, shards or blocks allocate temporary memory.
    ///
    /// # Errors
    /// As [`Attention::plan_with`]; when the batch exceeds the plan's capacity, or differs in KV storage or page size;
    /// when another operator made the plan. After an error the plan is empty and can be replanned.
    pub fn replan(&self, plan: &mut Plan, batch: &Batch<'_>) -> Result<()> {
        // device arrays survive a rejected batch, because a captured graph may still be launched
        self.planner().replan(plan, batch)?;
        plan.built = BackendData(self.built.clone());
        let previous = plan.prepared.0.take();
        plan.prepared = BackendData(self.backend.prepare(plan, previous)?);
        Ok(())
    }

    fn prepare_plan(&self, mut plan: Plan) -> Result<Plan> {
        plan.built = BackendData(self.built.clone());
        plan.prepared = BackendData(self.backend.prepare(&plan, None)?);
        Ok(plan)
    }

    /// The operator's planner, without the backend. Its plans can be inspected but not run.
    pub fn planner(&self) -> Planner {
        Planner::new(self.problem, self.tiling)
    }
}

impl<B: std::fmt::Debug> std::fmt::Debug for Attention<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { problem, variant, backend, .. } = self;
        write!(f, "Attention {{ {problem}, variant {}, {backend:?} }}", variant.name())
    }
}
