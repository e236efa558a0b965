//! Kernels of an attention operator, and the tiling of its plans.
//!
//! [`choose`] decides which body runs. The tiling depends only on the problem, so operators of one problem share plans across
//! variants: a kernel supports items of any number of rows.

use super::hooks::VariantTables;
use crate::{
    backend::Gpu,
    cache::parallel,
    machine::{Limits, Machine},
};
use std::sync::OnceLock;
use tilewright::{
    Problem, Result,
    attention::{
        ManyRows, Tiling,
        variant::{ExpressionVariant, Hook, Variant},
    },
};
use tilewright_kernels::attention::{
    body::{
        Bodies, DeviceLimits, MAX_SPLIT_KV_ROWS,
        mla_wgmma::{self, MlaWgmmaConfig},
        mma::KV_TOKENS,
        simt::MAX_HEAD_DIM,
        wgmma::{self, WgmmaConfig},
    },
    choose::{Alignment, Body, Choice, ChoiceInput, KernelConfig, choose},
    params::AttentionParams,
};

const OPERATOR: &str = "attention.new";
/// Fixed cost of an item, in KV tiles.
const SEGMENT_OVERHEAD: usize = 3;
/// Cost of a cut, in KV tiles: with 16-bit caches of heads, and otherwise.
const CUT_OVERHEADS: [usize; 2] = [3, 6];

/// The kernels of an operator. The one for decode steps is built with the operator: that for few rows, unless one token already has
/// more. The other one is built by the first run that needs it, so a process that only decodes does not compile it.
#[derive(Debug)]
pub(super) struct AttentionKernels<M: Machine> {
    /// The body for aligned tensors, with the reasons why it is no faster one.
    pub(super) choice: Choice,
    split_kv: OnceLock<M::Function>,
    /// For items of any size.
    both: OnceLock<M::Function>,
    /// For runs whose rows see ranges of keys, and for any others.
    many_rows: [OnceLock<M::Function>; 2],
    /// For tensors that the chosen kernel does not accept.
    unaligned: OnceLock<M::Function>,
    /// Large merges of `mla_wgmma`.
    large_merges: OnceLock<M::Function>,
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

pub(super) fn tiling(limits: &Limits, problem: &Problem) -> Result<Tiling> {
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

/// Cost of a level of shared keys. 16 requests that share 2,048 tokens, 15 tiles per worker, took 40 µs with a level, and FlashInfer 31
/// without; 64 requests, 62 tiles, took 56, and FlashInfer 85: [record](../../../../../benches/record/h200/attention-decode-2026-11-24.csv).
const LEVEL_OVERHEAD: usize = 20;

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
    pub(super) fn new(gpu: &Gpu<M>, problem: &Problem, variant: &ExpressionVariant) -> Result<Self> {
        let kernels = Self {
            choice: choose(&input(&gpu.limits, problem, Some(variant), Alignment::Vectors)),
            split_kv: OnceLock::new(),
            both: OnceLock::new(),
            many_rows: [OnceLock::new(), OnceLock::new()],
            unaligned: OnceLock::new(),
            large_merges: OnceLock::new(),
            tables: VariantTables::upload(gpu, variant)?,
        };
        let split_kv = kernels.choice.body != Body::Simt && problem.heads().group() <= MAX_SPLIT_KV_ROWS;
        let bodies = if split_kv { Bodies::SplitKv } else { Bodies::Both };
        kernels.chosen(gpu, (problem, variant), bodies)?;
        Ok(kernels)
    }

    /// Loads every kernel that a run can need, in parallel: each takes up to a second to compile.
    pub(super) fn load_all(&self, gpu: &Gpu<M>, target: (&Problem, &ExpressionVariant)) -> Result<()> {
        let kernel = self.choice.kernel;
        let mut loads: Vec<Box<dyn Fn() -> Result<M::Function> + Sync + '_>> =
            vec![Box::new(move || self.of_items(gpu, target, Bodies::Both))];
        for config in self.choice.many_rows.into_iter().flat_map(with_masks) {
            loads.push(Box::new(move || self.many_rows(gpu, target, config)));
        }
        if let KernelConfig::MlaWgmma(config) = kernel {
            loads.push(Box::new(move || self.large_merges(gpu, target.0, &config)));
        }
        if !matches!(kernel, KernelConfig::Simt(_)) {
            loads.push(Box::new(move || Ok(self.fallback(gpu, target)?.0)));
            if target.0.heads().group() <= MAX_SPLIT_KV_ROWS {
                loads.push(Box::new(move || self.of_items(gpu, target, Bodies::SplitKv)));
            }
        }
        parallel::map(&loads, loads.len(), |load| load().map(drop)).into_iter().collect()
    }

    /// The kernel for these items and parameters, and its configuration; tensor-core kernels require alignment, for example.
    pub(super) fn select(
        &self,
        gpu: &Gpu<M>,
        target: (&Problem, &ExpressionVariant),
        (items, params): (Bodies, &AttentionParams),
    ) -> Result<(M::Function, KernelConfig)> {
        let kernel = self.choice.kernel;
        if kernel.accepts(params) {
            return Ok((self.chosen(gpu, target, items)?, kernel));
        }
        self.fallback(gpu, target)
    }

    /// The kernel for tensors of any alignment.
    fn fallback(
        &self,
        gpu: &Gpu<M>,
        target: (&Problem, &ExpressionVariant),
    ) -> Result<(M::Function, KernelConfig)> {
        let input = input(&gpu.limits, target.0, Some(target.1), Alignment::Elements);
        let kernel = choose(&input).kernel;
        Ok((get_or_build(&self.unaligned, gpu, target, || kernel)?, kernel))
    }

    /// The kernel of large merges.
    pub(super) fn large_merges(
        &self,
        gpu: &Gpu<M>,
        problem: &Problem,
        config: &MlaWgmmaConfig,
    ) -> Result<M::Function> {
        if let Some(function) = self.large_merges.get() {
            return Ok(function.clone());
        }
        let (dtype, dim) = (problem.dtype_o(), problem.head_dim());
        let name = format!("attention_{dtype}_d{}_{}_mla_large_merges", dim.qk, dim.vo);
        let function = gpu.kernel(OPERATOR, &name, |name| mla_wgmma::large_merges(name, config))?;
        Ok(self.large_merges.get_or_init(|| function).clone())
    }

    /// The kernel for runs with these parameters, and its configuration; `None` if they are executed like items of workers.
    pub(super) fn select_many_rows(
        &self,
        gpu: &Gpu<M>,
        target: (&Problem, &ExpressionVariant),
        params: &AttentionParams,
    ) -> Result<Option<(M::Function, WgmmaConfig)>> {
        let mut configs = self.choice.many_rows.into_iter().flat_map(with_masks);
        let Some(config) = configs.find(|config| config.accepts(params)) else { return Ok(None) };
        Ok(Some((self.many_rows(gpu, target, config)?, config)))
    }

    fn many_rows(
        &self,
        gpu: &Gpu<M>,
        (problem, variant): (&Problem, &ExpressionVariant),
        config: WgmmaConfig,
    ) -> Result<M::Function> {
        let slot = &self.many_rows[usize::from(config.any_mask)];
        if let Some(function) = slot.get() {
            return Ok(function.clone());
        }
        let masks = if config.any_mask { "_masks" } else { "" };
        let name = format!("{}_wgmma{masks}", kernel_name(&self.choice.kernel, problem, variant));
        let function = gpu.kernel(OPERATOR, &name, |name| wgmma::attention(name, &config, variant))?;
        Ok(slot.get_or_init(|| function).clone())
    }

    fn chosen(
        &self,
        gpu: &Gpu<M>,
        target: (&Problem, &ExpressionVariant),
        bodies: Bodies,
    ) -> Result<M::Function> {
        // a kernel for items of any size supports all others
        match bodies {
            Bodies::SplitKv if self.split_kv.get().is_some() || self.both.get().is_none() => {
                self.of_items(gpu, target, Bodies::SplitKv)
            }
            _ => self.of_items(gpu, target, Bodies::Both),
        }
    }

    fn of_items(
        &self,
        gpu: &Gpu<M>,
        target: (&Problem, &ExpressionVariant),
        bodies: Bodies,
    ) -> Result<M::Function> {
        let slot = if bodies == Bodies::SplitKv { &self.split_kv } else { &self.both };
        get_or_build(slot, gpu, target, || self.choice.kernel.with_bodies(bodies))
    }
}

/// The configurations for runs whose rows see ranges of keys, and for any others.
fn with_masks(config: WgmmaConfig) -> [WgmmaConfig; 2] {
    [config, WgmmaConfig { any_mask: true, ..config }]
}

fn get_or_build<M: Machine>(
    slot: &OnceLock<M::Function>,
    gpu: &Gpu<M>,
    (problem, variant): (&Problem, &ExpressionVariant),
    kernel: impl FnOnce() -> KernelConfig,
) -> Result<M::Function> {
    if let Some(function) = slot.get() {
        return Ok(function.clone());
    }
    let kernel = kernel();
    let name = kernel_name(&kernel, problem, variant);
    let function = gpu.kernel(OPERATOR, &name, |name| kernel.record(name, variant))?;
    Ok(slot.get_or_init(|| function).clone())
}

fn kernel_name(kernel: &KernelConfig, problem: &Problem, variant: &ExpressionVariant) -> String {
    let (dim, o, kv) = (problem.head_dim(), problem.dtype_o(), problem.dtype_kv());
    let fp8 = if problem.dtype_q() == o { "" } else { "fp8_" };
    let shape = format!("{fp8}{o}_{kv}_d{}_{}", dim.qk, dim.vo);
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
