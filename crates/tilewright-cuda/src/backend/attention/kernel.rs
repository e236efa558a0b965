//! Kernel selection and tiling for a problem and a variant.
//!
//! Problems that tensor kernel support use them; others use a general scalar kernel. The tiling depends only on the problem, so
//! operators of one problem share plans across variants: a kernel supports items of any number of rows.

use super::{
    hooks::VariantTables,
    tensor_core::{TensorCoreKernel, is_plain},
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
    body::{Bodies, MAX_SPLIT_KV_ROWS, mma::KV_TOKENS, simt},
    params::AttentionParams,
};

const OPERATOR: &str = "attention.new";
/// Fixed cost of an item, in KV tiles.
const SEGMENT_OVERHEAD: usize = 3;
/// Cost of loading a KV tile to the SM without tensor kernel, in query rows processed in that time.
const SCALAR_TILE_LOAD_ROWS: usize = 8;
/// Minimum number of resident CTAs of the scalar kernel per SM.
const SCALAR_CTAS: u32 = 2;

/// The kernels of an operator.
#[derive(Debug)]
pub(super) struct AttentionKernels<M: Machine> {
    /// Kernels on tensor kernel, if they support the problem.
    tensor_core: Option<TensorCoreKernels<M>>,
    /// The general kernel: built with the operator if there is no other, else when a call first needs it.
    general: OnceLock<M::Function>,
    pub(super) tables: VariantTables,
}

/// Kernels on tensor kernel. The one for decode steps is built with the operator: that for few rows, unless one token already has
/// more. The other one is built by the first run that needs it, so a process that only decodes does not compile it.
#[derive(Debug)]
struct TensorCoreKernels<M: Machine> {
    kernel: TensorCoreKernel,
    split_kv: OnceLock<M::Function>,
    split_q: OnceLock<M::Function>,
}

fn without_tensor_cores(problem: &Problem) -> simt::SimtConfig {
    let dim = problem.head_dim();
    simt::SimtConfig {
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
        let most = simt::MAX_HEAD_DIM as usize;
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
    Ok(match TensorCoreKernel::of(limits, problem) {
        Some(kernel) => Tiling {
            q_rows: kernel.q_rows(),
            tile_load: kernel.tile_load(group),
            workers: (limits.multiprocessors * kernel.ctas_per_sm()) as usize,
            weights: kernel.weights(),
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

impl<M: Machine> AttentionKernels<M> {
    pub(super) fn new(gpu: &Gpu<M>, problem: &Problem, variant: &ExpressionVariant) -> Result<Self> {
        let kernels = Self {
            tensor_core: None,
            general: OnceLock::new(),
            tables: VariantTables::upload(gpu, variant)?,
        };
        match TensorCoreKernel::of(&gpu.limits, problem).filter(|kernel| kernel.supports(variant)) {
            Some(kernel) => {
                let tensor_core =
                    TensorCoreKernels { kernel, split_kv: OnceLock::new(), split_q: OnceLock::new() };
                let split_kv = problem.heads().group() <= MAX_SPLIT_KV_ROWS;
                tensor_core.get(
                    gpu,
                    (problem, variant),
                    if split_kv { Bodies::SplitKv } else { Bodies::Both },
                )?;
                Ok(Self { tensor_core: Some(tensor_core), ..kernels })
            }
            None => {
                kernels.general(gpu, (problem, variant))?;
                Ok(kernels)
            }
        }
    }

    /// The kernel for these items and parameters; tensor-core kernels require alignment, for example.
    pub(super) fn select(
        &self,
        gpu: &Gpu<M>,
        target: (&Problem, &ExpressionVariant),
        (items, call): (Bodies, &AttentionParams),
    ) -> Result<M::Function> {
        match &self.tensor_core {
            Some(tensor_core) if tensor_core.kernel.accepts(call) => tensor_core.get(gpu, target, items),
            _ => self.general(gpu, target),
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
        let function = gpu.kernel(OPERATOR, &name, |name| simt::attention(name, config, variant))?;
        Ok(self.general.get_or_init(|| function).clone())
    }
}

impl<M: Machine> TensorCoreKernels<M> {
    fn get(
        &self,
        gpu: &Gpu<M>,
        target: (&Problem, &ExpressionVariant),
        items: Bodies,
    ) -> Result<M::Function> {
        let built = match items {
            // a kernel for items of any number of rows supports these too
            Bodies::SplitKv => self.split_kv.get().or(self.split_q.get()),
            Bodies::Both => self.split_q.get(),
        };
        if let Some(built) = built {
            return Ok(built.clone());
        }
        let function = build_tensor_core(gpu, target, self.kernel.with(items))?;
        let slot = if items == Bodies::SplitKv { &self.split_kv } else { &self.split_q };
        Ok(slot.get_or_init(|| function).clone())
    }
}

fn build_tensor_core<M: Machine>(
    gpu: &Gpu<M>,
    (problem, variant): (&Problem, &ExpressionVariant),
    kernel: TensorCoreKernel,
) -> Result<M::Function> {
    let name = format!("attention_{}{}{}", shape(problem), kernel.kind(), hooks(variant));
    gpu.kernel(OPERATOR, &name, |name| kernel.record(name, variant))
}

/// The part of a kernel's name for the variant; empty if no hook has an effect.
fn hooks(variant: &ExpressionVariant) -> String {
    if is_plain(variant) { String::new() } else { format!("_{:016x}", variant.fingerprint()) }
}

/// The part of a kernel's name for the problem.
fn shape(problem: &Problem) -> String {
    let (dim, qo, kv) = (problem.head_dim(), problem.dtype_qo(), problem.dtype_kv());
    format!("{qo}_{kv}_d{}_{}", dim.qk, dim.vo)
}
