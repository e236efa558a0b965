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
mod plan;
mod problem;
mod schedule;
mod state;

pub use batch::{Batch, Index, KvTable};
pub use plan::{Explanation, Plan, Workspace};
pub use problem::{HeadDim, Heads, Mask, Problem, ProblemBuilder};
pub use schedule::{Merge, Schedule, Split, Tiling, WorkItem};
pub use state::{LSE_TO_NATURAL, merge_state, merge_states};

pub(crate) use batch::{KvSource, Request};
pub(crate) use state::merge_weights;

use crate::{
    Backend, Result, View, ViewMut,
    kv::KvCache,
    tensor::{check_dtype, check_shape},
};

/// An attention operator: one problem on one backend.
#[derive(Debug, Clone)]
pub struct Attention<B> {
    problem: Problem,
    backend: B,
    tiling: Tiling,
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
    /// Binds `problem` to `backend`; on a GPU this is where the kernel is built.
    ///
    /// # Errors
    /// When the backend cannot do it, with all its reasons.
    pub fn new(problem: Problem, backend: B) -> Result<Self> {
        let tiling = backend.tiling(&problem)?;
        Ok(Self { problem, backend, tiling })
    }

    /// The problem it was made for.
    pub fn problem(&self) -> &Problem {
        &self.problem
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
        const OPERATOR: &str = "attention.plan";
        crate::ensure!(
            split != Split::Fixed { tokens: 0 },
            OPERATOR,
            "split = 0 tokens, expected at least 1 (or Split::Never)"
        );
        let requests = batch.resolve(OPERATOR)?;
        let schedule = Schedule::new(&self.problem, &requests, &self.tiling, split)?;
        Ok(Plan { problem: self.problem, tiling: self.tiling, requests, schedule, split })
    }

    /// Executes `plan`: no decision, no allocation beyond the first call, no waiting for anything but the result.
    ///
    /// `q`: `[num_rows, num_qo_heads, head_dim_qk]`; `kv`: see [`KvCache`]. Strides are free but for the last
    /// axis of each tensor, which must be 1.
    ///
    /// # Errors
    /// When a shape, stride or dtype does not fit the plan, a page of the plan lies outside the cache, the plan
    /// was made for another problem, or the workspace is too small.
    pub fn run(&self, plan: &Plan, q: View<'_>, kv: KvCache<'_>, mut out: Output<'_>) -> Result<()> {
        self.check(plan, q, kv, &mut out)?;
        self.backend.attention(plan, q, kv, out)
    }

    fn check(&self, plan: &Plan, q: View<'_>, kv: KvCache<'_>, out: &mut Output<'_>) -> Result<()> {
        const OPERATOR: &str = "attention.run";
        crate::ensure!(
            plan.problem == self.problem && plan.tiling == self.tiling,
            OPERATOR,
            "the plan was made by another operator: for {}, this is {}",
            plan.problem,
            self.problem
        );
        let (rows, heads, dim) = (plan.num_rows(), self.problem.heads(), self.problem.head_dim());
        check_shape(
            OPERATOR,
            "q",
            (q.shape(), &[rows, heads.qo, dim.qk]),
            "[num_rows, num_qo_heads, head_dim]",
        )?;
        check_shape(
            OPERATOR,
            "o",
            (out.o.shape(), &[rows, heads.qo, dim.vo]),
            "[num_rows, num_qo_heads, head_dim]",
        )?;
        check_dtype(OPERATOR, "q", q.dtype(), self.problem.dtype_qo())?;
        check_dtype(OPERATOR, "o", out.o.dtype(), self.problem.dtype_qo())?;
        for (name, strides, dim) in [("q", q.strides(), dim.qk), ("o", out.o.strides(), dim.vo)] {
            crate::ensure!(
                strides[2] == 1 || dim == 1,
                OPERATOR,
                "{name} has strides {strides:?}: head_dim, the last axis, must have stride 1"
            );
        }
        if let Some(lse) = &out.lse {
            check_shape(OPERATOR, "lse", (lse.shape(), &[rows, heads.qo]), "[num_rows, num_qo_heads]")?;
            check_dtype(OPERATOR, "lse", lse.dtype(), crate::Dtype::F32)?;
            crate::ensure!(
                lse.is_contiguous(),
                OPERATOR,
                "lse has strides {:?}, expected a contiguous tensor",
                lse.strides()
            );
        }
        plan.check_cache(OPERATOR, kv)?;
        out.workspace.check(OPERATOR, plan)
    }
}
