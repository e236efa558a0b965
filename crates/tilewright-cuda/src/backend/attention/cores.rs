//! The kernels of tensor cores as one: that of ordinary heads, and that of latent attention.

use crate::machine::Limits;
use tilewright::{
    Dtype, Problem,
    attention::variant::{ExpressionVariant, Hook, Variant},
};
use tilewright_kernels::attention::{
    params::AttentionParams,
    tensor_core::{self, Bodies, DeviceLimits, MmaConfig, mla},
};
use tilewright_ptx::{ir::Kernel, verify::Invalid};

/// What bringing a KV tile to the SM costs, in rows that tensor cores multiply with it meanwhile.
const TILE_LOAD_ROWS: usize = 160;
/// The same of latent heads, whose rows are more than four times as long, and whose keys are brought once, not twice.
const LATENT_TILE_LOAD_ROWS: usize = 48;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cores {
    Heads(MmaConfig),
    Latent(mla::MlaConfig),
}

impl Cores {
    /// For items of any number of rows, where tensor cores do this problem.
    pub(super) fn of(limits: &Limits, problem: &Problem) -> Option<Self> {
        let device = DeviceLimits {
            arch: limits.arch,
            shared_per_cta: limits.shared_of_cta as usize,
            shared_per_sm: limits.shared_of_sm as usize,
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

    /// The same for other items.
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

    /// What of the kernel's name is not told by dtypes and head dims.
    pub(super) fn kind(&self) -> String {
        let few = if self.items() == Bodies::SplitKv { "_few" } else { "" };
        match self {
            Self::Heads(_) => few.to_owned(),
            Self::Latent(config) => format!("_latent{}{few}", config.q_rows()),
        }
    }

    /// Query rows of a tile.
    pub(super) fn q_rows(&self) -> usize {
        match self {
            Self::Heads(config) => config.q_rows(),
            Self::Latent(config) => config.q_rows(),
        }
    }

    /// What bringing a KV tile costs, in rows of so many heads each.
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

    pub(super) fn does(&self, variant: &ExpressionVariant) -> bool {
        match self {
            Self::Heads(config) => tensor_core::unsupported_variant(config, variant).is_empty(),
            Self::Latent(_) => is_plain(variant),
        }
    }

    /// Whether the kernel takes these arguments: it wants them aligned, for example.
    pub(super) fn takes(&self, call: &AttentionParams) -> bool {
        match self {
            Self::Heads(config) => config.accepts(call),
            Self::Latent(config) => config.accepts(call),
        }
    }

    /// Records the kernel.
    pub(super) fn record(&self, name: &str, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
        match self {
            Self::Heads(config) => tensor_core::attention_with(name, config, variant),
            Self::Latent(config) => mla::attention(name, config),
        }
    }

    /// What weights are rounded to.
    pub(super) fn weights(&self) -> Dtype {
        match self {
            Self::Heads(config) => config.qo,
            Self::Latent(config) => config.dtype,
        }
    }
}

/// Whether no hook does anything.
pub(super) fn is_plain(variant: &ExpressionVariant) -> bool {
    variant.properties().softmax && !Hook::ALL.into_iter().any(|hook| variant.is_live(hook))
}
