//! A plan: the batch, checked, with its schedule. A value: it prints itself, explains itself and never changes.

use super::{
    batch::{KvSource, Requests},
    problem::Problem,
    schedule::{Schedule, Split, Tiling},
};
use crate::{
    Estimate, Result, Roofline,
    kv::{KvCache, layout::KvShape},
};
use std::fmt;

/// What [`super::Attention::run`] needs to know about a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub(crate) problem: Problem,
    pub(crate) tiling: Tiling,
    pub(crate) requests: Requests,
    pub(crate) schedule: Schedule,
    pub(crate) split: Split,
}

impl Plan {
    /// Total query rows of the batch.
    pub fn num_rows(&self) -> usize {
        self.requests.num_rows()
    }

    /// Who computes what.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The memory that [`super::Attention::run`] needs beside its arguments: f32 partial states with their LSE,
    /// and scratch of the workers.
    pub fn workspace_bytes(&self) -> usize {
        size_of::<f32>() * self.workspace_len()
    }

    fn workspace_len(&self) -> usize {
        self.schedule.partial_rows * (self.problem.head_dim().vo + 1) + self.tiling.scratch
    }

    /// Counts what the schedule makes the device do.
    pub fn explain(&self) -> Explanation {
        let (problem, schedule) = (&self.problem, &self.schedule);
        let (dim, group) = (problem.head_dim(), problem.heads().group());
        let loads = schedule.worker_indptr.windows(2).map(|w| {
            let items = &schedule.items[w[0] as usize..w[1] as usize];
            let pairs = items.iter().map(|item| item.kv.len() * item.qo.len() * item.kv_heads.len() * group);
            pairs.fold(0, usize::saturating_add)
        });
        let visible: usize = self
            .requests
            .requests
            .iter()
            .flat_map(|request| request.qo.clone().map(|row| request.visible(problem, row)))
            .fold(0, usize::saturating_add);
        let kv_read: usize = schedule.items.iter().map(|item| item.kv.len() * item.kv_heads.len()).sum();
        let rows = self.num_rows() * problem.heads().qo;
        Explanation {
            problem: *problem,
            split: self.split,
            requests: self.requests.requests.len(),
            rows: self.num_rows(),
            items: schedule.items.len(),
            merges: schedule.merges.len(),
            workers: schedule.num_workers(),
            busiest: loads.clone().max().unwrap_or(0),
            mean: loads.map(|load| load as f64).sum::<f64>() / schedule.num_workers() as f64,
            kv_bytes: kv_read * (dim.qk + dim.vo) * problem.dtype_kv().size(),
            qo_bytes: rows * (dim.qk + dim.vo) * problem.dtype_qo().size(),
            flops: visible.saturating_mul(2 * problem.heads().qo * (dim.qk + dim.vo)),
            workspace_bytes: self.workspace_bytes(),
        }
    }

    /// Checks that a cache has the plan's shape, layout and dtype, and holds all its pages or tokens.
    pub(super) fn check_cache(&self, operator: &'static str, kv: KvCache<'_>) -> Result<()> {
        let page_size = match self.requests.source {
            KvSource::Paged { page_size, .. } => Some(page_size),
            KvSource::Ragged { .. } => None,
        };
        let dim = self.problem.head_dim();
        for (name, view, head_dim) in [("k", kv.k, dim.qk), ("v", kv.v, dim.vo)] {
            let shape = KvShape {
                layout: self.problem.layout(),
                page_size,
                heads: self.problem.heads().kv,
                head_dim,
                dtype: self.problem.dtype_kv(),
            };
            let count = shape.check(operator, name, (view.shape(), view.strides(), view.dtype()))?;
            match self.requests.source {
                KvSource::Paged { max_page, .. } => crate::ensure!(
                    max_page < 0 || (max_page as usize) < count,
                    operator,
                    "page = {max_page} is not in 0..{count}, the pages of {name}"
                ),
                KvSource::Ragged { tokens } => crate::ensure!(
                    tokens == count,
                    operator,
                    "{name} has {count} tokens, kv_indptr ends at {tokens}"
                ),
            }
        }
        Ok(())
    }
}

/// Memory for partial states and scratch. Grows with [`Workspace::fit`], never inside `run`.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(crate) memory: Vec<f32>,
}

impl Workspace {
    /// Memory that fits `plan`.
    pub fn for_plan(plan: &Plan) -> Self {
        let mut workspace = Self::default();
        workspace.fit(plan);
        workspace
    }

    /// Exactly `bytes`, for callers with a fixed budget.
    pub fn with_bytes(bytes: usize) -> Self {
        Self { memory: vec![0.0; bytes / size_of::<f32>()] }
    }

    /// Grows, if need be, until `plan` fits.
    pub fn fit(&mut self, plan: &Plan) {
        if self.memory.len() < plan.workspace_len() {
            self.memory.resize(plan.workspace_len(), 0.0);
        }
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * self.memory.len()
    }

    pub(super) fn check(&self, operator: &'static str, plan: &Plan) -> Result<()> {
        crate::ensure!(
            self.bytes() >= plan.workspace_bytes(),
            operator,
            "workspace has {} bytes, the plan needs {}",
            self.bytes(),
            plan.workspace_bytes()
        );
        Ok(())
    }
}

/// What a plan makes the device do; prints as a short report.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// What was asked.
    pub problem: Problem,
    /// How keys were divided.
    pub split: Split,
    /// Requests of the batch.
    pub requests: usize,
    /// Query rows of the batch.
    pub rows: usize,
    /// Work items.
    pub items: usize,
    /// Merges of split units.
    pub merges: usize,
    /// Workers.
    pub workers: usize,
    /// (row, key) pairs of the busiest worker, per query head of a group.
    pub busiest: usize,
    /// (row, key) pairs of the mean worker.
    pub mean: f64,
    /// Bytes of K and V that items read.
    pub kv_bytes: usize,
    /// Bytes of Q and O.
    pub qo_bytes: usize,
    /// Floating-point operations on visible (row, key) pairs: 2 per multiply-add, `q · k` and `p · v`.
    pub flops: usize,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
}

impl Explanation {
    /// The bound that `roofline` sets.
    pub fn estimate(&self, roofline: &Roofline) -> Estimate {
        roofline.estimate((self.kv_bytes + self.qo_bytes) as f64, self.flops as f64)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let balance = if self.busiest == 0 { 1.0 } else { self.mean / self.busiest as f64 };
        writeln!(f, "{}", self.problem)?;
        writeln!(f, "  {} requests, {} query rows, keys split: {}", self.requests, self.rows, self.split)?;
        writeln!(
            f,
            "  {} work items on {} workers ({:.0} % balanced), {} merges",
            self.items,
            self.workers,
            100.0 * balance,
            self.merges
        )?;
        writeln!(
            f,
            "  reads {:.3} MB of KV, moves {:.3} MB of Q and O, {:.3} GFLOP",
            self.kv_bytes as f64 / 1e6,
            self.qo_bytes as f64 / 1e6,
            self.flops as f64 / 1e9
        )?;
        write!(f, "  workspace {:.3} MB", self.workspace_bytes as f64 / 1e6)
    }
}
