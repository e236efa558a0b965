//! The tensor-core kernels: one for ordinary heads (MHA, GQA, MQA), one for latent attention (MLA).

use crate::machine::Limits;
use tilewright::{
    Dtype, Problem,
    attention::variant::{ExpressionVariant, Hook, Variant},
};
use tilewright_kernels::attention::{
    body::{
        Bodies, DeviceLimits, mla,
        mma::{self, MmaConfig},
    },
    params::AttentionParams,
};
use tilewright_ptx::{ir::Kernel, verify::Invalid};

/// Cost of loading a KV tile to the SM, in query rows that tensor cores could process in that time.
const TILE_LOAD_ROWS: usize = 160;
/// Same for latent heads: their rows are more than four times as long, and K and V are one tensor.
const LATENT_TILE_LOAD_ROWS: usize = 48;

/// The configuration of a tensor-core kernel.
#[derive(Debug, Clone, Copy)]
pub(super) enum TensorCoreKernel {
    Heads(MmaConfig),
    Latent(mla::MlaConfig),
}

impl TensorCoreKernel {
    /// The kernel for items of any number of rows; `None` if tensor cores do not support the problem.
    pub(super) fn of(limits: &Limits, problem: &Problem) -> Option<Self> {
        let device = DeviceLimits {
            arch: limits.arch,
            shared_per_cta: limits.shared_per_cta as usize,
            shared_per_sm: limits.shared_per_sm as usize,
        };
        let (qo, kv, head_dim) = (problem.dtype_qo(), problem.dtype_kv(), problem.head_dim());
        let bodies = Bodies::Both;
        if problem.is_latent() {
            let config = mla::MlaConfig { dtype: qo, head_dim, heads: problem.heads().qo, bodies, device };
            return (qo == kv && config.unsupported().is_empty()).then_some(Self::Latent(config));
        }
        let config = MmaConfig { qo, kv, head_dim, bodies, device };
        config.unsupported().is_empty().then_some(Self::Heads(config))
    }

    /// Same, for items of another kind.
    pub(super) fn with(self, bodies: Bodies) -> Self {
        match self {
            Self::Heads(config) => Self::Heads(MmaConfig { bodies, ..config }),
            Self::Latent(config) => Self::Latent(mla::MlaConfig { bodies, ..config }),
        }
    }

    fn items(&self) -> Bodies {
        match self {
            Self::Heads(config) => config.bodies,
            Self::Latent(config) => config.bodies,
        }
    }

    /// The part of the kernel's name that dtypes and head dims do not determine.
    pub(super) fn kind(&self) -> String {
        let few = if self.items() == Bodies::SplitKv { "_few" } else { "" };
        match self {
            Self::Heads(_) => few.to_owned(),
            Self::Latent(config) => format!("_latent{}{few}", config.q_rows()),
        }
    }

    /// Query rows per tile.
    pub(super) fn q_rows(&self) -> usize {
        match self {
            Self::Heads(config) => config.q_rows(),
            Self::Latent(config) => config.q_rows(),
        }
    }

    /// Cost of loading a KV tile, in query tokens of `group` heads each.
    pub(super) fn tile_load(&self, group: usize) -> usize {
        let rows = match self {
            Self::Heads(_) => TILE_LOAD_ROWS,
            Self::Latent(_) => LATENT_TILE_LOAD_ROWS,
        };
        rows.div_ceil(group)
    }

    pub(super) fn ctas_per_sm(&self) -> u32 {
        match self {
            Self::Heads(config) => config.ctas_per_sm(),
            Self::Latent(_) => 1,
        }
    }

    pub(super) fn supports(&self, variant: &ExpressionVariant) -> bool {
        match self {
            Self::Heads(config) => mma::unsupported_variant(config, variant).is_empty(),
            Self::Latent(_) => is_plain(variant),
        }
    }

    /// Whether the kernel supports these parameters, for example their alignment.
    pub(super) fn accepts(&self, call: &AttentionParams) -> bool {
        match self {
            Self::Heads(config) => config.accepts(call),
            Self::Latent(config) => config.accepts(call),
        }
    }

    /// Records the kernel.
    pub(super) fn record(&self, name: &str, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
        match self {
            Self::Heads(config) => mma::attention_with(name, config, variant),
            Self::Latent(config) => mla::attention(name, config),
        }
    }

    /// The dtype of softmax weights.
    pub(super) fn weights(&self) -> Dtype {
        match self {
            Self::Heads(config) => config.qo,
            Self::Latent(config) => config.dtype,
        }
    }
}

/// Whether no hook has an effect.
pub(super) fn is_plain(variant: &ExpressionVariant) -> bool {
    variant.has_softmax() && !Hook::ALL.into_iter().any(|hook| variant.is_live(hook))
}
