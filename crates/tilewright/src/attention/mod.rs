//! Batch attention: `new` once, `plan` each step, `run` each layer.
//!
//! For every query row `i`, query head `h` and its KV head `g = h / group`, over the keys `j` that the mask shows:
//!
//! ```text
//! s[j] = scale · q[i, h] · k[j, g]       o[i, h] = Σ_j softmax(s)[j] · v[j, g]       lse[i, h] = log2 Σ_j e^s[j]
//! ```
//!
//! A row that sees no key gives `o = 0, lse = -inf`.

mod batch;
mod capacity;
mod cascade;
mod mask;
mod plan;
mod planner;
mod problem;
mod requests;
mod resolve;
mod run;
mod schedule;
mod single;
mod state;
pub mod variant;

pub use batch::{Batch, Index, KvTable, Level, Shard};
pub use capacity::{Capacity, Room};
pub use cascade::SharedPrefix;
pub use mask::MaskBits;
pub use mask::{BitOrder, PackedMask, TreeMask, packbits, segment_packbits};
pub use plan::{Explanation, Plan, Workspace};
pub use planner::Planner;
pub use problem::{HeadDim, Heads, Mask, Problem, ProblemBuilder};
pub use requests::{KvSource, Request, Requests, Segment, SegmentMask};
pub use run::{Inputs, LatentCache, LatentQuery};
pub use schedule::{Merge, Schedule, Split, Tiling, WorkItem};
pub use state::{LSE_TO_NATURAL, merge_state, merge_states};
pub use variant::Variant;

pub(crate) use plan::Prepared;
pub(crate) use requests::ones;
pub(crate) use state::merge_weights;

use crate::{Backend, Dtype, Result, ViewMut, backend::Opaque, cpu::simd::hooks::Hooks};
use std::sync::Arc;

/// An attention operator: one problem, one variant, one backend.
#[derive(Clone)]
pub struct Attention<B> {
    problem: Problem,
    variant: Arc<dyn Hooks>,
    backend: B,
    tiling: Tiling,
    built: Option<Opaque>,
}

/// Everything that [`Attention::run`] writes.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[num_rows, num_qo_heads, head_dim_vo]` of the problem's q/o dtype.
    pub o: ViewMut<'a>,
    /// `[num_rows, num_qo_heads]` f32, base 2; left out when not wanted.
    pub lse: Option<ViewMut<'a>>,
    /// At least [`Plan::workspace_bytes`]; may be shared by all layers of a step.
    pub workspace: &'a mut Workspace,
}

impl<B: Backend> Attention<B> {
    /// Binds `problem` to `backend`. On a GPU this is where the kernel is built that decodes; the one that does everything is built
    /// by the first run that needs it.
    ///
    /// # Errors
    /// When the backend cannot do it, with all its reasons.
    pub fn new(problem: Problem, backend: B) -> Result<Self> {
        Self::with_variant(problem, variant::Plain, backend)
    }

    /// Binds `problem`, changed by `variant`, to `backend`.
    ///
    /// A plan fits all operators of the same problem and backend, whatever their variants: layers that differ only in a
    /// variant's parameters have an operator each and share each step's plan.
    ///
    /// # Errors
    /// As [`Attention::new`], and when the variant reads what it does not declare or what its hook does not have.
    pub fn with_variant(problem: Problem, variant: impl Variant, backend: B) -> Result<Self> {
        let tiling = backend.tiling(&problem)?;
        let variant = crate::cpu::simd::hooks::hooks(variant, &problem)?;
        let built = backend.build(&problem, variant.recorded())?;
        Ok(Self { problem, variant, backend, tiling, built })
    }

    /// The problem it was made for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Whether it has an LSE to give: not where its variant has no softmax.
    pub fn has_lse(&self) -> bool {
        self.variant.live().softmax
    }

    /// What softmax weights may be rounded to before they weigh values: f32, or bf16 where queries are bf16, the cache is nothing
    /// wider, and the device multiplies them as they are. The rows of a decode step, batch-invariant plans, and variants that
    /// change queries, keys or values may keep f32.
    pub fn weights_dtype(&self) -> Dtype {
        self.tiling.weights
    }

    /// Decides who computes what, balanced over the device.
    ///
    /// # Errors
    /// When anything about the batch is wrong: the text names request, array, value and expectation.
    pub fn plan(&self, batch: &Batch<'_>) -> Result<Plan> {
        self.plan_with(batch, Split::Balanced)
    }

    /// [`Attention::plan`] with a say in how keys are divided, for batch-invariant results.
    ///
    /// # Errors
    /// As [`Attention::plan`]; and when a fixed split is 0 tokens long, or so short that the items cannot be counted.
    pub fn plan_with(&self, batch: &Batch<'_>, split: Split) -> Result<Plan> {
        let mut plan = self.planner().plan_with(batch, split)?;
        plan.prepared = Prepared(self.backend.prepare(&plan, None)?);
        Ok(plan)
    }

    /// [`Attention::plan_with`] with room for larger batches: [`Attention::replan`] then makes it the plan of any batch within
    /// `capacity`, in place and without allocating, and neither its arrays on a device nor [`Plan::workspace_bytes`] change.
    /// Tensors of a run have the rows of the batch, or as many as the capacity; rows beyond those of the batch are not touched.
    ///
    /// # Errors
    /// As [`Attention::plan_with`]; when `batch` is beyond the capacity; when the capacity is so large that its items cannot be
    /// counted.
    pub fn plan_with_capacity(&self, capacity: &Capacity, batch: &Batch<'_>, split: Split) -> Result<Plan> {
        let mut plan = self.planner().plan_with_capacity(capacity, batch, split)?;
        plan.prepared = Prepared(self.backend.prepare(&plan, None)?);
        Ok(plan)
    }

    /// Makes `plan` the plan of `batch`, divided as before, in the memory that it has. One of fixed capacity keeps to it; others
    /// grow. Batches with levels, shards or blocks need some memory for a while.
    ///
    /// # Errors
    /// As [`Attention::plan_with`]; when the plan has a capacity and the batch is beyond it, or has keys of another kind or pages
    /// of another size; when another operator made the plan. The plan is then one of no requests, and can be replanned.
    pub fn replan(&self, plan: &mut Plan, batch: &Batch<'_>) -> Result<()> {
        // where the batch is refused, arrays on a device stay: a captured graph may still be launched
        self.planner().replan(plan, batch)?;
        let previous = plan.prepared.0.take();
        plan.prepared = Prepared(self.backend.prepare(plan, previous)?);
        Ok(())
    }

    /// Plans as this operator does, without its backend: such a plan shows itself, but is not run.
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
