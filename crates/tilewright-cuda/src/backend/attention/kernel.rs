//! Which kernel a problem gets, and how its work is cut for it.

use super::hooks::Tables;
use crate::{
    backend::Gpu,
    machine::{Limits, Machine},
};
use tilewright::{
    Error, Problem, Result,
    attention::{
        Tiling,
        variant::{ExpressionVariant, Hook, Variant},
    },
};
use tilewright_kernels::attention::tensor_core::{self, Config, Device, KV_TOKENS};

/// What an item costs beside its KV tiles, in KV tiles.
const SEGMENT_OVERHEAD: usize = 3;
/// What bringing a KV tile to the SM costs, in rows that are multiplied with it meanwhile.
const TILE_LOAD_ROWS: usize = 160;

/// A kernel that was made for an operator.
#[derive(Debug)]
pub(super) struct Built<M: Machine> {
    pub(super) function: M::Function,
    pub(super) tables: Tables,
}

fn config(limits: &Limits, problem: &Problem) -> Config {
    let device = Device {
        arch: limits.arch,
        shared_of_cta: limits.shared_of_cta as usize,
        shared_of_sm: limits.shared_of_sm as usize,
    };
    Config { qo: problem.dtype_qo(), kv: problem.dtype_kv(), head_dim: problem.head_dim(), device }
}

/// Why tensor cores do not do this problem; nothing if they do.
fn refused(limits: &Limits, problem: &Problem) -> Vec<String> {
    let mut reasons = config(limits, problem).refuses();
    if problem.is_latent() {
        reasons.push("it is latent attention".to_owned());
    }
    reasons
}

pub(super) fn tiling(limits: &Limits, problem: &Problem) -> Result<Tiling> {
    let config = config(limits, problem);
    let reasons = refused(limits, problem);
    if !reasons.is_empty() {
        return Err(Error::new("attention.new", reasons.join("; ")));
    }
    Ok(Tiling {
        q_rows: config.q_rows(),
        kv_heads: 1,
        kv_tokens: KV_TOKENS,
        segment_overhead: SEGMENT_OVERHEAD,
        tile_load: TILE_LOAD_ROWS.div_ceil(problem.heads().group()),
        workers: (limits.multiprocessors * config.ctas_per_sm()) as usize,
        scratch: 0,
        weights: problem.dtype_qo(),
    })
}

impl<M: Machine> Built<M> {
    pub(super) fn new(gpu: &Gpu<M>, problem: &Problem, variant: &ExpressionVariant) -> Result<Self> {
        const OPERATOR: &str = "attention.new";
        if Hook::ALL.into_iter().any(|hook| variant.is_live(hook)) || !variant.properties().softmax {
            return Err(Error::new(OPERATOR, "a variant, which is not built yet on a GPU"));
        }
        let config = config(&gpu.limits, problem);
        let (dim, qo, kv) = (problem.head_dim(), problem.dtype_qo(), problem.dtype_kv());
        let name = format!("attention_{qo}_{kv}_d{}_{}", dim.qk, dim.vo);
        let function = gpu.kernel(OPERATOR, &name, |name| tensor_core::attention(name, &config))?;
        Ok(Self { function, tables: Tables::bring(gpu, variant)? })
    }
}
