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
    Opaque, Problem, Result,
    attention::{
        ManyRows, Tiling,
        variant::{ExpressionVariant, Hook, Variant},
    },
};
use tilewright_kernels::attention::{
    body::{
        Bodies, DeviceLimits, MAX_SPLIT_KV_ROWS, mla_wgmma,
        mma::KV_TOKENS,
        simt::MAX_HEAD_DIM,
        wgmma::{self, WgmmaConfig},
    },
    choose::{Alignment, Body, Choice, ChoiceInput, KernelConfig, choose},
    params::KvLayout,
};

const OPERATOR: &str = "attention.new";
const LOAD: &str = "attention.plan";
/// Fixed cost of an item, in KV tiles.
const SEGMENT_OVERHEAD: usize = 3;
/// Cost of a cut, in KV tiles: with 16-bit caches of heads, and otherwise.
const CUT_OVERHEADS: [usize; 2] = [3, 6];

/// A kernel of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Items of few rows.
    SplitKv,
    /// Items of any number of rows.
    Both,
    /// Runs whose rows see ranges of keys.
    ManyRows,
    /// Runs with any mask.
    ManyRowsAnyMask,
    /// Large merges of `mla_wgmma`.
    LargeMerges,
    /// Tensors that the chosen kernel does not accept.
    Unaligned,
}

impl Part {
    const ALL: [Self; 6] = [
        Self::SplitKv,
        Self::Both,
        Self::ManyRows,
        Self::ManyRowsAnyMask,
        Self::LargeMerges,
        Self::Unaligned,
    ];
}

/// The kernels of an operator. No run loads one: compiling takes up to a second, and a run may be captured.
///
/// Planning loads those of the plan's items, runs and merges, for tensors of any alignment, in parallel: the first plan takes as
/// long as its largest kernel. A process that only decodes compiles no others. The exception is a run with the plan of an operator
/// with other hooks, which has loaded other kernels.
#[derive(Debug)]
pub(in crate::backend) struct AttentionKernels<M: Machine> {
    problem: Problem,
    variant: ExpressionVariant,
    /// The body for aligned tensors, with the reasons why it is no faster one.
    pub(in crate::backend) choice: Choice,
    /// The kernel for tensors of any alignment.
    pub(super) unaligned: KernelConfig,
    /// By [`Part`].
    pub(super) functions: [OnceLock<M::Function>; Part::ALL.len()],
    pub(super) tables: VariantTables,
}

fn input<'a>(
    limits: &Limits,
    problem: &'a Problem,
    variant: Option<&'a ExpressionVariant>,
    alignment: Alignment,
) -> ChoiceInput<'a> {
    let device = DeviceLimits {
        arch: limits.arch,
        shared_per_cta: limits.shared_per_cta as usize,
        shared_per_sm: limits.shared_per_sm as usize,
    };
    ChoiceInput { problem, variant, device, alignment }
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
    let choice = choose(&input(limits, problem, None, Alignment::Vectors));
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
    let dim = problem.head_dim();
    ManyRows {
        min_rows: MAX_SPLIT_KV_ROWS + 1,
        q_rows: wgmma::Q_ROWS,
        kv_tokens: config.kv_tokens(),
        workers: limits.multiprocessors as usize,
        level_overhead: LEVEL_OVERHEAD,
        resident_keys: RESIDENT_BYTES / (problem.dtype_kv().size() * (dim.qk + dim.vo)),
    }
}

impl<M: Machine> AttentionKernels<M> {
    pub(in crate::backend) fn new(
        gpu: &Gpu<M>,
        problem: &Problem,
        variant: &ExpressionVariant,
    ) -> Result<Self> {
        let choose = |alignment| choose(&input(&gpu.limits, problem, Some(variant), alignment));
        Ok(Self {
            problem: *problem,
            variant: variant.clone(),
            choice: choose(Alignment::Vectors),
            unaligned: choose(Alignment::Elements).kernel,
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
        let has_any_mask = plan.layout == KvLayout::Blocks || plan.args.mask_bits != 0;
        let of_runs = if has_any_mask { Part::ManyRowsAnyMask } else { Part::ManyRows };
        let parts = [
            plan.items.map(|kind| self.part_of(kind)),
            plan.runs.as_ref().map(|_| of_runs),
            plan.runs.as_ref().map(|_| self.part_of_refused_runs()),
            plan.has_large_merges.then_some(Part::LargeMerges),
            Some(Part::Unaligned),
        ];
        self.load_parts(gpu, parts.into_iter().flatten())
    }

    /// Loads kernels in parallel: each takes up to a second to compile.
    fn load_parts(&self, gpu: &Gpu<M>, parts: impl IntoIterator<Item = Part>) -> Result<()> {
        let is_missing = |part: &Part| self.functions[*part as usize].get().is_none() && self.has(*part);
        let missing: Vec<Part> = parts.into_iter().filter(is_missing).collect();
        match missing[..] {
            [] => Ok(()),
            [part] => self.load(gpu, part).map(drop),
            _ => parallel::map(&missing, missing.len(), |part| self.load(gpu, *part).map(drop))
                .into_iter()
                .collect(),
        }
    }

    /// Whether the operator has this kernel.
    fn has(&self, part: Part) -> bool {
        let Choice { body, many_rows, .. } = &self.choice;
        match part {
            Part::Both => true,
            Part::SplitKv => *body != Body::Simt && self.problem.heads().group() <= MAX_SPLIT_KV_ROWS,
            Part::ManyRows | Part::ManyRowsAnyMask => many_rows.is_some(),
            Part::LargeMerges => *body == Body::MlaWgmma,
            Part::Unaligned => *body != Body::Simt,
        }
    }

    /// The kernel of items; one for any number of rows supports all.
    pub(super) fn part_of(&self, items: Bodies) -> Part {
        if items == Bodies::SplitKv && self.has(Part::SplitKv) { Part::SplitKv } else { Part::Both }
    }

    /// The kernel of runs with tensors that `wgmma` does not accept, which are executed like items: caches of 8 bits with scales of
    /// pages, or unaligned ones.
    pub(super) fn part_of_refused_runs(&self) -> Part {
        if self.problem.dtype_kv().size() == 1 { Part::Both } else { Part::Unaligned }
    }

    /// The configuration of a kernel for runs.
    pub(super) fn many_rows(&self, part: Part) -> Option<WgmmaConfig> {
        let config = self.choice.many_rows?;
        Some(WgmmaConfig { any_mask: config.any_mask || part == Part::ManyRowsAnyMask, ..config })
    }

    /// Loads a kernel.
    pub(super) fn load(&self, gpu: &Gpu<M>, part: Part) -> Result<M::Function> {
        let (kernel, problem, variant) = (self.choice.kernel, &self.problem, &self.variant);
        let items = |kernel: KernelConfig| {
            let name = kernel_name(&kernel, problem, variant);
            gpu.kernel(LOAD, &name, |name| kernel.record(name, variant))
        };
        let function = match (part, self.many_rows(part), kernel) {
            (Part::ManyRows | Part::ManyRowsAnyMask, Some(config), _) => {
                let masks = if config.any_mask { "_masks" } else { "" };
                let name = format!("{}_wgmma{masks}", kernel_name(&kernel, problem, variant));
                gpu.kernel(LOAD, &name, |name| wgmma::attention(name, &config, variant))
            }
            (Part::LargeMerges, _, KernelConfig::MlaWgmma(config)) => {
                let (dtype, dim) = (problem.dtype_o(), problem.head_dim());
                let out = problem.dtype_out();
                let name = format!("attention_{dtype}_d{}_{}_mla_large_merges_{out}", dim.qk, dim.vo);
                gpu.kernel(LOAD, &name, |name| mla_wgmma::large_merges(name, &config))
            }
            (Part::SplitKv, ..) => items(kernel.with_bodies(Bodies::SplitKv)),
            (Part::Unaligned, ..) => items(self.unaligned),
            _ => items(kernel.with_bodies(Bodies::Both)),
        }?;
        Ok(self.functions[part as usize].get_or_init(|| function).clone())
    }
}

fn kernel_name(kernel: &KernelConfig, problem: &Problem, variant: &ExpressionVariant) -> String {
    let (dim, o, kv) = (problem.head_dim(), problem.dtype_o(), problem.dtype_kv());
    let fp8 = if problem.dtype_q() == o { "" } else { "fp8_" };
    let narrow = if problem.dtype_out() == o { "" } else { "_to_e4m3" };
    let shape = format!("{fp8}{o}_{kv}_d{}_{}{narrow}", dim.qk, dim.vo);
    let plain = variant.has_softmax() && !Hook::ALL.into_iter().any(|hook| variant.is_live(hook));
    let hooks = if plain { String::new() } else { format!("_{:016x}", variant.fingerprint()) };
    let few = |bodies| if bodies == Bodies::SplitKv { "_few" } else { "" };
    match kernel {
        KernelConfig::Mma(config) => format!("attention_{shape}{}{hooks}", few(config.bodies)),
        KernelConfig::MlaWgmma(config) => {
            format!("attention_{shape}_mla_wgmma{}{hooks}", config.q_rows())
        }
        KernelConfig::Mla(config) => {
            format!("attention_{shape}_latent{}{}{hooks}", config.q_rows(), few(config.bodies))
        }
        KernelConfig::Simt(config) => {
            format!("attention_scalar_{shape}{}{hooks}", if config.mla { "_latent" } else { "" })
        }
    }
}
