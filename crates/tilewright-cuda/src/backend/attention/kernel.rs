//! Which kernel a problem and a variant get, and how their work is cut.
//!
//! Tensor cores where they can, otherwise the kernel that takes everything. The tiling follows from the problem alone, so that
//! operators of one problem share plans whatever their variants: a kernel does items of any number of rows.

use super::{
    cores::{Cores, is_plain},
    hooks::Tables,
};
use crate::{
    backend::Gpu,
    machine::{Limits, Machine},
};
use std::sync::OnceLock;
use tilewright::{
    Dtype, Problem, Result,
    attention::{Tiling, variant::ExpressionVariant},
};
use tilewright_kernels::attention::{
    params::AttentionParams,
    scalar,
    tensor_core::{Bodies, KV_TOKENS, MAX_SPLIT_KV_ROWS},
};

const OPERATOR: &str = "attention.new";
/// What an item costs beside its KV tiles, in KV tiles.
const SEGMENT_OVERHEAD: usize = 3;
/// What bringing a KV tile to the SM costs without tensor cores, in rows that are multiplied with it meanwhile.
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

/// Kernels on tensor cores. The one that steps of decoding take is made with the operator: that of few rows, unless a token has more
/// rows than these. The other one is made by the first run that needs it: a process that only decodes does not wait for it.
#[derive(Debug)]
struct Fast<M: Machine> {
    cores: Cores,
    few: OnceLock<M::Function>,
    any: OnceLock<M::Function>,
}

fn without_tensor_cores(problem: &Problem) -> scalar::SimtConfig {
    let dim = problem.head_dim();
    scalar::SimtConfig {
        dtype_qo: problem.dtype_qo(),
        dtype_kv: problem.dtype_kv(),
        head_dim: (dim.qk as u32, dim.vo as u32),
        mla: problem.is_latent(),
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
    Ok(match Cores::of(limits, problem) {
        Some(cores) => Tiling {
            q_rows: cores.q_rows(),
            tile_load: cores.tile_load(group),
            workers: (limits.multiprocessors * cores.ctas_per_sm()) as usize,
            weights: cores.weights(),
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
        match Cores::of(&gpu.limits, problem).filter(|cores| cores.does(variant)) {
            Some(cores) => {
                let fast = Fast { cores, few: OnceLock::new(), any: OnceLock::new() };
                let few = problem.heads().group() <= MAX_SPLIT_KV_ROWS;
                fast.of(gpu, (problem, variant), if few { Bodies::SplitKv } else { Bodies::Both })?;
                Ok(Self { fast: Some(fast), ..built })
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
        (items, call): (Bodies, &AttentionParams),
    ) -> Result<M::Function> {
        match &self.fast {
            Some(fast) if fast.cores.takes(call) => fast.of(gpu, asked, items),
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
    fn of(&self, gpu: &Gpu<M>, asked: (&Problem, &ExpressionVariant), items: Bodies) -> Result<M::Function> {
        let made = match items {
            // a kernel for all items does these, too
            Bodies::SplitKv => self.few.get().or(self.any.get()),
            Bodies::Both => self.any.get(),
        };
        if let Some(made) = made {
            return Ok(made.clone());
        }
        let function = on_cores(gpu, asked, self.cores.with(items))?;
        let slot = if items == Bodies::SplitKv { &self.few } else { &self.any };
        Ok(slot.get_or_init(|| function).clone())
    }
}

fn on_cores<M: Machine>(
    gpu: &Gpu<M>,
    (problem, variant): (&Problem, &ExpressionVariant),
    cores: Cores,
) -> Result<M::Function> {
    let name = format!("attention_{}{}{}", shape(problem), cores.kind(), hooks(variant));
    gpu.kernel(OPERATOR, &name, |name| cores.record(name, variant))
}

/// What kernels of a variant are called after; nothing if no hook does anything.
fn hooks(variant: &ExpressionVariant) -> String {
    if is_plain(variant) { String::new() } else { format!("_{:016x}", variant.fingerprint()) }
}

/// What kernels of a problem are called after.
fn shape(problem: &Problem) -> String {
    let (dim, qo, kv) = (problem.head_dim(), problem.dtype_qo(), problem.dtype_kv());
    format!("{qo}_{kv}_d{}_{}", dim.qk, dim.vo)
}
