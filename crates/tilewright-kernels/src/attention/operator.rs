//! Kernels of an attention operator: which parts it has, and the name and the text of each, for backends, lists and bundles.
//!
//! Equal names imply equal text for one target. A name has the body, its dtypes, head dims and tile rows, the architecture where the
//! text depends on it, and the fingerprint of the hooks.

use super::{
    body::{
        Bodies, DeviceLimits, MAX_SPLIT_KV_ROWS,
        mla_wgmma::{self, MlaWgmmaConfig},
        wgmma::{self, WgmmaConfig},
    },
    choose::{Alignment, Body, Choice, ChoiceInput, KernelConfig, choose},
};
use tilewright::{
    Dtype, HeadDim, Problem,
    attention::variant::{ExpressionVariant, Hook, Variant},
};
use tilewright_ptx::{Invalid, Kernel};

/// A kernel of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// Items of few rows.
    SplitKv,
    /// The same for caches that TMA loads.
    SplitKvBoxes,
    /// The same for such caches in pages of one token.
    SplitKvRows,
    /// Items of at most twice as many rows, if no runs have them.
    SplitKvPairs,
    /// Items of any number of rows.
    Both,
    /// Runs whose rows see ranges of keys.
    ManyRows,
    /// Runs with any mask.
    ManyRowsAnyMask,
    /// Runs that pairs of CTAs execute.
    ManyRowsPairs,
    /// Merges of rows with keys in runs and in other items.
    LevelMerges,
    /// Large merges of `mla_wgmma`.
    LargeMerges,
    /// Tensors that the chosen kernel does not accept.
    Unaligned,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 11] = [
        Self::SplitKv,
        Self::SplitKvBoxes,
        Self::SplitKvRows,
        Self::SplitKvPairs,
        Self::Both,
        Self::ManyRows,
        Self::ManyRowsAnyMask,
        Self::ManyRowsPairs,
        Self::LevelMerges,
        Self::LargeMerges,
        Self::Unaligned,
    ];
}

/// A kernel in one configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionKernel {
    /// Of work items.
    Items(KernelConfig),
    /// Of runs of many rows, by `wgmma`.
    Runs(WgmmaConfig),
    /// Of merges after runs and other items of the same rows.
    LevelMerges(WgmmaConfig),
    /// Of large merges after `mla_wgmma`.
    LargeMerges(MlaWgmmaConfig),
}

/// The kernels of an operator: those of a problem and a variant on a device.
#[derive(Debug, Clone)]
pub struct OperatorKernels {
    problem: Problem,
    /// The body for aligned tensors, with the reasons why it is no faster one.
    pub choice: Choice,
    /// The kernel for tensors of any alignment.
    pub unaligned: KernelConfig,
}

impl OperatorKernels {
    /// Chooses the kernels.
    pub fn new(problem: &Problem, variant: &ExpressionVariant, device: DeviceLimits) -> Self {
        let choose = |alignment| choose(&ChoiceInput { problem, variant: Some(variant), device, alignment });
        let (choice, unaligned) = (choose(Alignment::Vectors), choose(Alignment::Elements).kernel);
        Self { problem: *problem, choice, unaligned }
    }

    /// The kernel of a part; `None` if the operator has no such part.
    pub fn part(&self, part: Part) -> Option<AttentionKernel> {
        let items = |bodies| AttentionKernel::Items(self.choice.kernel.with_bodies(bodies));
        let few_rows = |bodies| self.choice.few_rows.contains(&bodies).then(|| items(bodies));
        let is_simt = self.choice.body == Body::Simt;
        match part {
            Part::Both => Some(items(Bodies::Both)),
            Part::SplitKv if is_simt || self.problem.heads().group() > MAX_SPLIT_KV_ROWS => None,
            Part::SplitKv => Some(items(Bodies::SplitKv)),
            Part::SplitKvBoxes => few_rows(Bodies::SplitKvBoxes),
            Part::SplitKvRows => few_rows(Bodies::SplitKvRows),
            Part::SplitKvPairs => few_rows(Bodies::SplitKvPairs),
            Part::ManyRows | Part::ManyRowsAnyMask | Part::ManyRowsPairs => {
                self.many_rows(part).map(AttentionKernel::Runs)
            }
            Part::LevelMerges => self.many_rows(Part::ManyRows).map(AttentionKernel::LevelMerges),
            Part::LargeMerges => match self.choice.kernel {
                KernelConfig::MlaWgmma(config) => {
                    let of_states = MlaWgmmaConfig { kv: config.dtype, ..config };
                    Some(AttentionKernel::LargeMerges(of_states))
                }
                _ => None,
            },
            Part::Unaligned => (!is_simt).then_some(AttentionKernel::Items(self.unaligned)),
        }
    }

    /// The configuration of a kernel for runs.
    pub fn many_rows(&self, part: Part) -> Option<WgmmaConfig> {
        let config = self.choice.many_rows?;
        let any_mask = config.any_mask || part == Part::ManyRowsAnyMask;
        let pairs = part == Part::ManyRowsPairs;
        (!pairs || config.can_pair()).then_some(WgmmaConfig { any_mask, pairs, ..config })
    }

    /// All kernels, each once.
    pub fn all(&self) -> Vec<AttentionKernel> {
        let mut all = Vec::new();
        for kernel in Part::ALL.into_iter().filter_map(|part| self.part(part)) {
            if !all.contains(&kernel) {
                all.push(kernel);
            }
        }
        all
    }
}

impl AttentionKernel {
    /// The name, which is the entry of the PTX.
    pub fn name(&self, variant: &ExpressionVariant) -> String {
        let is_plain = variant.has_softmax() && !Hook::ALL.into_iter().any(|hook| variant.is_live(hook));
        let hooks = if is_plain { String::new() } else { format!("_{:016x}", variant.fingerprint()) };
        format!("attention_{}{hooks}", self.configuration())
    }

    fn configuration(&self) -> String {
        let few = |bodies| match bodies {
            Bodies::SplitKv => "_few",
            Bodies::SplitKvPairs => "_few32",
            Bodies::SplitKvBoxes => "_few_boxes",
            Bodies::SplitKvRows => "_few_rows",
            Bodies::Both => "",
        };
        match self {
            Self::Items(KernelConfig::Mma(config)) => {
                let shape = shape([config.q, config.o, config.out, config.kv], config.head_dim);
                format!("{shape}{}_sm{}", few(config.bodies), config.device.arch)
            }
            Self::Items(KernelConfig::MlaWgmma(config)) => {
                let shape = shape([config.dtype, config.dtype, config.out, config.kv], config.head_dim);
                format!("{shape}_mla_wgmma{}", config.q_rows())
            }
            Self::Items(KernelConfig::Mla(config)) => {
                let shape = latent_shape(config.dtype, config.out, config.head_dim);
                let few = few(config.bodies);
                format!("{shape}_latent{}{few}_sm{}", config.q_rows(), config.device.arch)
            }
            Self::Items(KernelConfig::Simt(config)) => {
                let dtypes = [config.dtype_q, config.dtype_q, config.dtype_o, config.dtype_kv];
                let latent = if config.mla { "_latent" } else { "" };
                format!("scalar_{}{latent}", shape(dtypes, config.head_dim))
            }
            Self::Runs(config) => {
                let shape = shape([config.q, config.o, config.out, config.kv], config.head_dim);
                let masks = if config.any_mask { "_masks" } else { "" };
                format!("{shape}_wgmma{}{masks}", if config.pairs { "_pairs" } else { "" })
            }
            Self::LevelMerges(config) => {
                let shape = shape([config.q, config.o, config.out, config.kv], config.head_dim);
                format!("{shape}_level_merges")
            }
            Self::LargeMerges(config) => {
                let shape = latent_shape(config.dtype, config.out, config.head_dim);
                format!("{shape}_mla_large_merges")
            }
        }
    }

    /// Records the kernel.
    ///
    /// # Errors
    /// With the reasons of the body, if it does not support the configuration or the variant.
    pub fn record(&self, name: &str, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
        match self {
            Self::Items(config) => config.record(name, variant),
            Self::Runs(config) => wgmma::attention(name, config, variant),
            Self::LevelMerges(config) => wgmma::level_merges(name, config, variant),
            Self::LargeMerges(config) => mla_wgmma::large_merges(name, config),
        }
    }

    /// The only architecture that the kernel is for; `None` if it is for all.
    pub fn arch(&self) -> Option<u32> {
        match self {
            Self::Items(KernelConfig::Mma(config)) => Some(config.device.arch),
            Self::Items(KernelConfig::Mla(config)) => Some(config.device.arch),
            Self::Items(KernelConfig::Simt(_)) => None,
            Self::Items(KernelConfig::MlaWgmma(_))
            | Self::Runs(_)
            | Self::LevelMerges(_)
            | Self::LargeMerges(_) => Some(wgmma::ARCH),
        }
    }
}

/// The part of a name with the dtypes of queries, products, outputs and caches, and the head dims.
fn shape([q, o, out, kv]: [Dtype; 4], dim: HeadDim) -> String {
    let fp8 = if q == o { "" } else { "fp8_" };
    let to = if out == o { String::new() } else { format!("_to_{out}") };
    format!("{fp8}{o}_{kv}_d{}_{}{to}", dim.qk, dim.vo)
}

fn latent_shape(dtype: Dtype, out: Dtype, dim: HeadDim) -> String {
    shape([dtype, dtype, out, dtype], dim)
}
