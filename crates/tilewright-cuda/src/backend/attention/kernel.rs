//! Which kernel a problem and a variant get, and how their work is cut.
//!
//! Tensor cores where they can, otherwise the kernel that takes everything. The tiling follows from the problem alone, so that
//! operators of one problem share plans whatever their variants: a kernel does items of any number of rows.

use super::hooks::Tables;
use crate::{
    backend::Gpu,
    machine::{Limits, Machine},
};
use std::sync::OnceLock;
use tilewright::{
    Dtype, Problem, Result,
    attention::{
        Tiling,
        variant::{ExpressionVariant, Hook, Variant},
    },
};
use tilewright_kernels::attention::{
    call::Call,
    scalar,
    tensor_core::{self, Config, Device, Items, KV_TOKENS},
};

const OPERATOR: &str = "attention.new";
/// What an item costs beside its KV tiles, in KV tiles.
const SEGMENT_OVERHEAD: usize = 3;
/// What bringing a KV tile to the SM costs, in rows that tensor cores multiply with it meanwhile.
const TILE_LOAD_ROWS: usize = 160;
/// The same without tensor cores.
const SCALAR_TILE_LOAD_ROWS: usize = 8;
/// CTAs of the kernel without tensor cores that share an SM, at least.
const SCALAR_CTAS: u32 = 2;

/// Kernels that were made for an operator.
#[derive(Debug)]
pub(super) struct Built<M: Machine> {
    /// On tensor cores, if they do it.
    fast: Option<Fast<M>>,
    /// What takes everything: made at once where it is all that there is, otherwise when a call needs it.
    general: OnceLock<M::Function>,
    pub(super) tables: Tables,
}

/// Kernels on tensor cores. That of few rows is made with the operator, the other one by the first run that has more rows: a
/// process that only decodes does not wait for it.
#[derive(Debug)]
struct Fast<M: Machine> {
    config: Config,
    few: M::Function,
    any: OnceLock<M::Function>,
}

fn tensor_core(limits: &Limits, problem: &Problem) -> Config {
    let device = Device {
        arch: limits.arch,
        shared_of_cta: limits.shared_of_cta as usize,
        shared_of_sm: limits.shared_of_sm as usize,
    };
    let (qo, kv, head_dim) = (problem.dtype_qo(), problem.dtype_kv(), problem.head_dim());
    Config { qo, kv, head_dim, items: Items::Any, device }
}

/// The configuration for tensor cores, where they do this problem.
fn on_tensor_cores(limits: &Limits, problem: &Problem) -> Option<Config> {
    let config = tensor_core(limits, problem);
    (!problem.is_latent() && config.refuses().is_empty()).then_some(config)
}

fn without_tensor_cores(problem: &Problem) -> scalar::Config {
    let dim = problem.head_dim();
    scalar::Config {
        dtype_qo: problem.dtype_qo(),
        dtype_kv: problem.dtype_kv(),
        head_dim: (dim.qk as u32, dim.vo as u32),
        latent: problem.is_latent(),
    }
}

pub(super) fn tiling(limits: &Limits, problem: &Problem) -> Result<Tiling> {
    let dim = problem.head_dim();
    let too_large = [("head_dim.qk", dim.qk), ("head_dim.vo", dim.vo)];
    for (name, value) in too_large {
        let most = scalar::MAX_HEAD_DIM as usize;
        tilewright::ensure!(
            value <= most,
            OPERATOR,
            "a GPU cannot do this: {name} = {value} is above {most}"
        );
    }
    let group = problem.heads().group();
    let tiling = Tiling {
        q_rows: 0,
        kv_heads: 1,
        kv_tokens: KV_TOKENS,
        segment_overhead: SEGMENT_OVERHEAD,
        tile_load: 1,
        workers: 0,
        scratch: 0,
        weights: Dtype::F32,
    };
    Ok(match on_tensor_cores(limits, problem) {
        Some(config) => Tiling {
            q_rows: config.q_rows(),
            tile_load: TILE_LOAD_ROWS.div_ceil(group),
            workers: (limits.multiprocessors * config.ctas_per_sm()) as usize,
            weights: problem.dtype_qo(),
            ..tiling
        },
        None => Tiling {
            q_rows: without_tensor_cores(problem).rows() as usize,
            tile_load: SCALAR_TILE_LOAD_ROWS.div_ceil(group),
            workers: (limits.multiprocessors * SCALAR_CTAS) as usize,
            ..tiling
        },
    })
}

impl<M: Machine> Built<M> {
    pub(super) fn new(gpu: &Gpu<M>, problem: &Problem, variant: &ExpressionVariant) -> Result<Self> {
        let built = Self { fast: None, general: OnceLock::new(), tables: Tables::bring(gpu, variant)? };
        let config = on_tensor_cores(&gpu.limits, problem);
        match config.filter(|config| tensor_core::refuses_variant(config, variant).is_empty()) {
            Some(config) => {
                let few = on_cores(gpu, (problem, variant), Config { items: Items::Few, ..config })?;
                Ok(Self { fast: Some(Fast { config, few, any: OnceLock::new() }), ..built })
            }
            None => {
                built.general(gpu, (problem, variant))?;
                Ok(built)
            }
        }
    }

    /// The kernel for items and arguments: tensor cores want these aligned, for example.
    pub(super) fn for_call(
        &self,
        gpu: &Gpu<M>,
        asked: (&Problem, &ExpressionVariant),
        (items, call): (Items, &Call),
    ) -> Result<M::Function> {
        match &self.fast {
            Some(fast) if fast.config.takes(call) => fast.of(gpu, asked, items),
            _ => self.general(gpu, asked),
        }
    }

    fn general(
        &self,
        gpu: &Gpu<M>,
        (problem, variant): (&Problem, &ExpressionVariant),
    ) -> Result<M::Function> {
        if let Some(function) = self.general.get() {
            return Ok(function.clone());
        }
        let config = without_tensor_cores(problem);
        let latent = if problem.is_latent() { "_latent" } else { "" };
        let name = format!("attention_scalar_{}{latent}{}", shape(problem), hooks(variant));
        let function = gpu.kernel(OPERATOR, &name, |name| scalar::attention(name, config, variant))?;
        Ok(self.general.get_or_init(|| function).clone())
    }
}

impl<M: Machine> Fast<M> {
    fn of(&self, gpu: &Gpu<M>, asked: (&Problem, &ExpressionVariant), items: Items) -> Result<M::Function> {
        match (items, self.any.get()) {
            (Items::Few, _) => Ok(self.few.clone()),
            (Items::Any, Some(any)) => Ok(any.clone()),
            (Items::Any, None) => {
                let function = on_cores(gpu, asked, self.config)?;
                Ok(self.any.get_or_init(|| function).clone())
            }
        }
    }
}

fn on_cores<M: Machine>(
    gpu: &Gpu<M>,
    (problem, variant): (&Problem, &ExpressionVariant),
    config: Config,
) -> Result<M::Function> {
    let few = if config.items == Items::Few { "_few" } else { "" };
    let name = format!("attention_{}{few}{}", shape(problem), hooks(variant));
    gpu.kernel(OPERATOR, &name, |name| tensor_core::attention_with(name, &config, variant))
}

/// What kernels of a variant are called after; nothing if no hook does anything.
fn hooks(variant: &ExpressionVariant) -> String {
    let is_plain = variant.properties().softmax && !Hook::ALL.into_iter().any(|hook| variant.is_live(hook));
    if is_plain { String::new() } else { format!("_{:016x}", variant.fingerprint()) }
}

/// What kernels of a problem are called after.
fn shape(problem: &Problem) -> String {
    let (dim, qo, kv) = (problem.head_dim(), problem.dtype_qo(), problem.dtype_kv());
    format!("{qo}_{kv}_d{}_{}", dim.qk, dim.vo)
}
