//! Kernels of an attention operator, and the tiling of its plans.
//!
//! [`choose`] decides which body runs. The tiling depends only on the problem, so operators of one problem share plans across
//! variants: a kernel supports items of any number of rows.

use super::{device_plan::DevicePlan, hooks::VariantTables};
use crate::{
    backend::Gpu,
    cache::parallel,
    machine::{Limits, Machine},
};
use std::sync::OnceLock;
use tilewright::{
    Error, Opaque, Problem, Result,
    attention::{ManyRows, Tiling, variant::ExpressionVariant},
};
use tilewright_kernels::attention::{
    body::{
        Bodies, DeviceLimits, MAX_SPLIT_KV_ROWS,
        mma::KV_TOKENS,
        simt::MAX_HEAD_DIM,
        wgmma::{self, WgmmaConfig},
    },
    choose::{Alignment, ChoiceInput, KernelConfig, choose},
    operator::{OperatorKernels, Part},
};

const OPERATOR: &str = "attention.new";
const LOAD: &str = "attention.plan";
/// Fixed cost of an item, in KV tiles.
const SEGMENT_OVERHEAD: usize = 3;
/// Cost of a cut, in KV tiles: with 16-bit caches of heads, and otherwise.
const CUT_OVERHEADS: [usize; 2] = [3, 6];

/// The kernels of an operator. No run loads one: compiling takes up to a second, and a run may be captured.
///
/// Planning loads those of the plan's items, runs and merges, for tensors of any alignment, in parallel: the first plan takes as
/// long as its largest kernel. A process that only decodes compiles no others. The exception is a run with the plan of an operator
/// with other hooks, which has loaded other kernels.
#[derive(Debug)]
pub(in crate::backend) struct AttentionKernels<M: Machine> {
    problem: Problem,
    variant: ExpressionVariant,
    pub(in crate::backend) parts: OperatorKernels,
    /// By part.
    pub(super) functions: [OnceLock<M::Function>; Part::ALL.len()],
    pub(super) tables: VariantTables,
}

fn device(limits: &Limits) -> DeviceLimits {
    DeviceLimits {
        arch: limits.arch,
        shared_per_cta: limits.shared_per_cta as usize,
        shared_per_sm: limits.shared_per_sm as usize,
    }
}

pub(in crate::backend) fn tiling(limits: &Limits, problem: &Problem) -> Result<Tiling> {
    let dim = problem.head_dim();
    let too_large = [("head_dim.qk", dim.qk), ("head_dim.vo", dim.vo)];
    for (name, value) in too_large {
        let most = MAX_HEAD_DIM as usize;
        tilewright::ensure!(
            value <= most,
            OPERATOR,
            "a GPU cannot do this: {name} = {value} is above {most}"
        );
    }
    let (variant, alignment) = (None, Alignment::Vectors);
    let choice = choose(&ChoiceInput { problem, variant, device: device(limits), alignment });
    let (kernel, many_rows) = (choice.kernel, choice.many_rows);
    let workers = (limits.multiprocessors * kernel.ctas_per_sm() / kernel.ctas_per_item()).max(1) as usize;
    Ok(Tiling {
        q_rows: kernel.q_rows(),
        kv_heads: 1,
        kv_tokens: KV_TOKENS,
        segment_overhead: SEGMENT_OVERHEAD,
        cut_overhead: cut_overhead(&kernel, problem),
        tile_load: kernel.tile_load_rows().div_ceil(problem.heads().group()),
        workers,
        shares: workers,
        scratch: 0,
        weights: choice.weights(),
        many_rows: many_rows.map(|config| many_rows_tiling(limits, problem, &config)),
    })
}

/// Cost of a cut, in KV tiles. Memory limits 16-bit caches of heads: it is busy during merges, but idle when items that are all
/// equal begin together. Measured on an H200, [record](../../../../../benches/record/h200/attention-mla-2026-11-23.csv).
fn cut_overhead(kernel: &KernelConfig, problem: &Problem) -> usize {
    let is_latent = matches!(kernel, KernelConfig::Mla(_) | KernelConfig::MlaWgmma(_));
    CUT_OVERHEADS[usize::from(is_latent || problem.dtype_kv().size() == 1)]
}

/// Cost of a level of shared keys. 16 requests that share 2,048 tokens, 15 tiles per worker, take 31 µs with a level on an H100, and 43
/// without. The launch itself costs about 6 tiles by these figures:
/// [record](../../../../../benches/record/h100/attention-cascades-2026-11-26.csv).
const LEVEL_OVERHEAD: usize = 8;

/// The granularity of `wgmma`. A section of keys and values leaves room in the L2 cache for other data.
fn many_rows_tiling(limits: &Limits, problem: &Problem, config: &WgmmaConfig) -> ManyRows {
    const RESIDENT_BYTES: usize = 16 << 20;
    const PAIR_KEYS: usize = 1 << 9; // per run, on average: with windows of 128 keys, pairs of CTAs were 4 % slower
    let dim = problem.head_dim();
    ManyRows {
        min_rows: MAX_SPLIT_KV_ROWS + 1,
        q_rows: wgmma::Q_ROWS,
        kv_tokens: config.kv_tokens(),
        workers: limits.multiprocessors as usize,
        level_overhead: LEVEL_OVERHEAD,
        resident_keys: RESIDENT_BYTES / (problem.dtype_kv().size() * (dim.qk + dim.vo)),
        pair_tiles: if config.can_pair() { PAIR_KEYS / config.kv_tokens() } else { usize::MAX },
    }
}

impl<M: Machine> AttentionKernels<M> {
    pub(in crate::backend) fn new(
        gpu: &Gpu<M>,
        problem: &Problem,
        variant: &ExpressionVariant,
    ) -> Result<Self> {
        Ok(Self {
            problem: *problem,
            variant: variant.clone(),
            parts: OperatorKernels::new(problem, variant, device(&gpu.limits)),
            functions: Default::default(),
            tables: VariantTables::upload(gpu, variant)?,
        })
    }

    /// The kernels that `build` has returned.
    pub(in crate::backend) fn of(built: Option<&Opaque>) -> Option<&Self> {
        built.and_then(|built| built.downcast_ref())
    }

    /// Loads every kernel that a run can need.
    pub(in crate::backend) fn load_all(&self, gpu: &Gpu<M>) -> Result<()> {
        self.load_parts(gpu, Part::ALL)
    }

    /// Loads every kernel that a run of a plan can need.
    pub(super) fn load_for(&self, gpu: &Gpu<M>, plan: &DevicePlan) -> Result<()> {
        let parts = [
            plan.items.map(|kind| self.part_of(kind)),
            plan.part_of_runs(),
            plan.runs.as_ref().map(|_| self.part_of_refused_runs()),
            (plan.level_merges > 0).then_some(Part::LevelMerges),
            plan.has_large_merges.then_some(Part::LargeMerges),
            Some(Part::Unaligned),
        ];
        self.load_parts(gpu, parts.into_iter().flatten())
    }

    /// Loads kernels in parallel: each takes up to a second to compile.
    fn load_parts(&self, gpu: &Gpu<M>, parts: impl IntoIterator<Item = Part>) -> Result<()> {
        let is_missing =
            |part: &Part| self.functions[*part as usize].get().is_none() && self.parts.part(*part).is_some();
        let missing: Vec<Part> = parts.into_iter().filter(is_missing).collect();
        match missing[..] {
            [] => Ok(()),
            [part] => self.load(gpu, part).map(drop),
            _ => parallel::map(&missing, missing.len(), |part| self.load(gpu, *part).map(drop))
                .into_iter()
                .collect(),
        }
    }

    /// The kernel of items; one for any number of rows supports all.
    pub(super) fn part_of(&self, items: Bodies) -> Part {
        let parts: &[Part] = match items {
            Bodies::SplitKvBoxes => &[Part::SplitKvBoxes, Part::SplitKv],
            Bodies::SplitKvRows => &[Part::SplitKvRows, Part::SplitKv],
            Bodies::SplitKv => &[Part::SplitKv],
            Bodies::SplitKvPairs => &[Part::SplitKvPairs],
            Bodies::Both => &[],
        };
        parts.iter().copied().find(|part| self.parts.part(*part).is_some()).unwrap_or(Part::Both)
    }

    /// The kernel of runs with tensors that `wgmma` does not accept, which are executed like items: caches of 8 bits with scales of
    /// pages, or unaligned ones.
    pub(super) fn part_of_refused_runs(&self) -> Part {
        if self.problem.dtype_kv().size() == 1 { Part::Both } else { Part::Unaligned }
    }

    /// Loads a kernel; [`Part::Both`] if the operator does not have this part.
    pub(super) fn load(&self, gpu: &Gpu<M>, part: Part) -> Result<M::Function> {
        let kernel = self.parts.part(part).or_else(|| self.parts.part(Part::Both));
        let kernel = kernel.ok_or_else(|| Error::new(LOAD, "the operator has no kernel"))?;
        let variant = &self.variant;
        let function = gpu.kernel(LOAD, &kernel.name(variant), |name| kernel.record(name, variant))?;
        Ok(self.functions[part as usize].get_or_init(|| function).clone())
    }
}
