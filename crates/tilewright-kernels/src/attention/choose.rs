//! Choice of a body for a problem, a variant, a device and an alignment promise, with the reasons against faster bodies.
//!
//! ```text
//! heads    Wgmma, Mma, Simt          latent heads    MlaWgmma, Mla, Simt          fastest first
//! ```
//!
//! The first body without a reason against it is chosen. `Simt` has no reasons here; recording its kernel reports its limits.

use super::{
    body::{
        Bodies, DeviceLimits, MAX_PAIRED_ROWS, MAX_SPLIT_KV_ROWS,
        mla::{self, MlaConfig},
        mla_wgmma::{self, MlaWgmmaConfig},
        mma::{self, MmaConfig},
        simt::{self, SimtConfig},
        wgmma::{self, WgmmaConfig},
    },
    params::{AttentionParams, KernelKind},
};
use std::fmt;
use tilewright::{
    Dtype, Problem,
    attention::variant::{ExpressionVariant, Hook, Variant},
};
use tilewright_ptx::{Invalid, Kernel};

/// A body, or the two of the `mma` kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Body {
    /// [`wgmma`] for more than [`MAX_SPLIT_KV_ROWS`] packed rows, on Hopper; `mma_split_kv` for others.
    Wgmma,
    /// `mma_split_kv` and `mma_split_q`, in [`mma`].
    Mma,
    /// [`mla_wgmma`], on Hopper.
    MlaWgmma,
    /// [`mla`].
    Mla,
    /// [`simt`].
    Simt,
}

/// Bodies for ordinary heads, fastest first.
const HEADS: &[Body] = &[Body::Wgmma, Body::Mma, Body::Simt];
/// Bodies for latent heads, fastest first.
const LATENT: &[Body] = &[Body::MlaWgmma, Body::Mla, Body::Simt];

impl Body {
    /// The name of the body's module.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wgmma => "wgmma",
            Self::Mma => "mma",
            Self::MlaWgmma => "mla_wgmma",
            Self::Mla => "mla",
            Self::Simt => "simt",
        }
    }
}

/// Promise of the caller about addresses and strides of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// Multiples of 16 bytes, of the output of 8; scales per page only in 8-bit caches. [`KernelConfig::accepts`] checks it.
    Vectors,
    /// Multiples of the element size.
    Elements,
}

/// Input of a choice.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceInput<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// The variant; `None` for the choice that serves a variant without hooks.
    pub variant: Option<&'a ExpressionVariant>,
    /// The device.
    pub device: DeviceLimits,
    /// The promise about the tensors of all runs.
    pub alignment: Alignment,
}

/// The configuration of the kernel of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelConfig {
    /// Of [`Body::Mma`].
    Mma(MmaConfig),
    /// Of [`Body::MlaWgmma`].
    MlaWgmma(MlaWgmmaConfig),
    /// Of [`Body::Mla`].
    Mla(MlaConfig),
    /// Of [`Body::Simt`].
    Simt(SimtConfig),
}

/// A chosen body, and the reasons why no faster one was chosen. `Display` prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The chosen body.
    pub body: Body,
    /// Its kernel for items of any number of rows, or for those of few rows.
    pub kernel: KernelConfig,
    /// Its kernel for segments of many rows; one for any mask is the same with `any_mask`.
    pub many_rows: Option<WgmmaConfig>,
    /// The bodies of its other kernels for items of few rows.
    pub few_rows: Vec<Bodies>,
    /// Faster bodies, fastest first, each with all reasons against it.
    pub rejected: Vec<(Body, Vec<String>)>,
}

/// Chooses the fastest body that supports the input.
pub fn choose(input: &ChoiceInput<'_>) -> Choice {
    let bodies = if input.problem.is_latent() { LATENT } else { HEADS };
    let mut rejected = Vec::new();
    for &body in bodies {
        match input.kernel(body) {
            Ok(kernel) => {
                let many_rows = (body == Body::Wgmma).then(|| input.wgmma());
                let few_rows = input.few_rows(body);
                return Choice { body, kernel, many_rows, few_rows, rejected };
            }
            Err(reasons) => rejected.push((body, reasons)),
        }
    }
    let kernel = KernelConfig::Simt(input.simt());
    Choice { body: Body::Simt, kernel, many_rows: None, few_rows: Vec::new(), rejected }
}

impl ChoiceInput<'_> {
    /// The kernel of a body, or all reasons against it.
    fn kernel(&self, body: Body) -> Result<KernelConfig, Vec<String>> {
        let (kernel, mut reasons) = match body {
            Body::Simt => return Ok(KernelConfig::Simt(self.simt())),
            // its items of few rows are those of `mma`
            Body::Wgmma => {
                (KernelConfig::Mma(self.mma()), [self.wgmma_reasons(), self.mma_reasons()].concat())
            }
            Body::Mma => (KernelConfig::Mma(self.mma()), self.mma_reasons()),
            Body::MlaWgmma => (KernelConfig::MlaWgmma(self.mla_wgmma()), self.mla_wgmma_reasons()),
            Body::Mla => (KernelConfig::Mla(self.mla()), self.mla_reasons()),
        };
        if self.alignment == Alignment::Elements {
            reasons.push("tensors may be aligned to elements only, expected 16 bytes".to_owned());
        }
        if reasons.is_empty() { Ok(kernel) } else { Err(reasons) }
    }

    /// Reasons against `wgmma` besides those of [`ChoiceInput::mma_reasons`].
    fn wgmma_reasons(&self) -> Vec<String> {
        let (arch, problem) = (self.device.arch, self.problem);
        let group = problem.heads().group();
        let mut reasons = Vec::new();
        if arch != wgmma::ARCH {
            reasons.push(format!("sm_{arch} has no wgmma, expected sm_{}", wgmma::ARCH));
        }
        if group > wgmma::Q_ROWS {
            reasons.push(format!("groups have {group} query heads, the most is {}", wgmma::Q_ROWS));
        }
        [reasons, self.wgmma().unsupported()].concat()
    }

    fn mma_reasons(&self) -> Vec<String> {
        let config = self.mma();
        let variant = |variant| mma::unsupported_variant(&config, variant);
        [config.unsupported(), self.variant.map_or_else(Vec::new, variant)].concat()
    }

    /// The bodies of the kernels for items of few rows beside that of [`Bodies::SplitKv`].
    fn few_rows(&self, body: Body) -> Vec<Bodies> {
        let pairs = (body == Body::Mma && self.has_pairs()).then_some(Bodies::SplitKvPairs);
        let boxes = [Bodies::SplitKvBoxes, Bodies::SplitKvRows].into_iter().filter(|of| self.has_boxes(*of));
        let boxes = boxes.filter(|_| matches!(body, Body::Wgmma | Body::Mma));
        pairs.into_iter().chain(boxes).collect()
    }

    /// Whether `mma` has a kernel of [`Bodies::SplitKvPairs`] for the problem and the variant.
    fn has_pairs(&self) -> bool {
        let config = MmaConfig { bodies: Bodies::SplitKvPairs, ..self.mma() };
        let has_rows = self.problem.heads().group() <= MAX_PAIRED_ROWS;
        has_rows && self.variant.is_some_and(|variant| mma::fits_pairs(&config, variant))
    }

    /// Whether `mma` has a kernel of `bodies`, whose keys TMA loads, for the problem and the variant.
    fn has_boxes(&self, bodies: Bodies) -> bool {
        let config = MmaConfig { bodies, ..self.mma() };
        let fits = |variant| mma::unsupported_variant(&config, variant).is_empty();
        self.problem.heads().group() <= MAX_SPLIT_KV_ROWS
            && config.unsupported().is_empty()
            && self.variant.is_some_and(fits)
    }

    fn wgmma(&self) -> WgmmaConfig {
        let any_mask = self.variant.is_some_and(|variant| variant.is_live(Hook::Mask));
        let problem = self.problem;
        WgmmaConfig {
            q: problem.dtype_q(),
            o: problem.dtype_o(),
            out: problem.dtype_out(),
            kv: problem.dtype_kv(),
            head_dim: problem.head_dim(),
            any_mask,
            pairs: false,
        }
    }

    fn mma(&self) -> MmaConfig {
        let problem = self.problem;
        MmaConfig {
            q: problem.dtype_q(),
            o: problem.dtype_o(),
            out: problem.dtype_out(),
            kv: problem.dtype_kv(),
            head_dim: problem.head_dim(),
            bodies: Bodies::Both,
            device: self.device,
        }
    }

    fn mla(&self) -> MlaConfig {
        let problem = self.problem;
        MlaConfig {
            dtype: problem.dtype_o(),
            out: problem.dtype_out(),
            head_dim: problem.head_dim(),
            heads: problem.heads().qo,
            bodies: Bodies::Both,
            device: self.device,
        }
    }

    fn mla_wgmma(&self) -> MlaWgmmaConfig {
        let problem = self.problem;
        let (dtype, head_dim, heads) = (problem.dtype_o(), problem.head_dim(), problem.heads().qo);
        let (kv, out) = (problem.dtype_kv(), problem.dtype_out());
        MlaWgmmaConfig { dtype, kv, out, head_dim, heads }
    }

    fn mla_wgmma_reasons(&self) -> Vec<String> {
        let arch = self.device.arch;
        let not_hopper =
            (arch != wgmma::ARCH).then(|| format!("sm_{arch} has no wgmma, expected sm_{}", wgmma::ARCH));
        let of_config = self.mla_wgmma().unsupported();
        not_hopper.into_iter().chain(of_config).chain(self.latent_reasons()).collect()
    }

    fn mla_reasons(&self) -> Vec<String> {
        let (qo, kv) = (self.problem.dtype_o(), self.problem.dtype_kv());
        let of_cache = (qo != kv).then(|| format!("the cache is {kv}, expected {qo} as queries"));
        self.mla().unsupported().into_iter().chain(of_cache).chain(self.latent_reasons()).collect()
    }

    /// Reasons against all tensor-core bodies for latent heads.
    fn latent_reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if let Some(variant) = self.variant {
            if !variant.has_softmax() {
                reasons.push("logits are weights, expected a softmax".to_owned());
            }
            let hooks = Hook::ALL.into_iter().filter(|hook| variant.is_live(*hook));
            reasons.extend(hooks.map(|hook| format!("there is a hook of {}, expected none", hook.name())));
        }
        reasons
    }

    fn simt(&self) -> SimtConfig {
        let problem = self.problem;
        SimtConfig {
            dtype_q: problem.dtype_q(),
            dtype_o: problem.dtype_out(),
            dtype_kv: problem.dtype_kv(),
            head_dim: problem.head_dim(),
            mla: problem.is_latent(),
        }
    }
}

impl Choice {
    /// The dtype to which softmax weights are rounded, with the least precision of the kernels.
    pub fn weights(&self) -> Dtype {
        self.many_rows.map_or(self.kernel.weights(), |config| config.weights(self.kernel.weights()))
    }
}

impl KernelConfig {
    /// The same with other bodies of the kernel; `MlaWgmma` and `Simt` have one for items of any size.
    #[must_use]
    pub fn with_bodies(self, bodies: Bodies) -> Self {
        match self {
            Self::Mma(config) => Self::Mma(MmaConfig { bodies, ..config }),
            Self::MlaWgmma(config) => Self::MlaWgmma(config),
            Self::Mla(config) => Self::Mla(MlaConfig { bodies, ..config }),
            Self::Simt(config) => Self::Simt(config),
        }
    }

    /// Query rows per tile: the value for `Tiling::q_rows`.
    pub fn q_rows(&self) -> usize {
        match self {
            Self::Mma(config) => config.q_rows(),
            Self::MlaWgmma(config) => config.q_rows(),
            Self::Mla(config) => config.q_rows(),
            Self::Simt(config) => config.rows() as usize,
        }
    }

    /// Cost of loading a KV tile, in packed query rows processed in that time. Latent rows are over four times longer, but their
    /// keys and values are loaded once. `MlaWgmma` pads rows, so all tiles take the same time.
    pub fn tile_load_rows(&self) -> usize {
        match self {
            Self::Mma(_) => 160,
            Self::MlaWgmma(_) => 1 << 12,
            Self::Mla(_) => 48,
            Self::Simt(_) => 8,
        }
    }

    /// Minimum number of resident CTAs per SM.
    pub fn ctas_per_sm(&self) -> u32 {
        match self {
            Self::Mma(config) => config.ctas_per_sm(),
            Self::MlaWgmma(_) | Self::Mla(_) => 1,
            Self::Simt(_) => 2,
        }
    }

    /// CTAs that execute the items of a worker side by side, each with rows of its own.
    pub fn ctas_per_item(&self) -> u32 {
        match self {
            Self::MlaWgmma(config) => config.ctas_per_item() as u32,
            Self::Mma(_) | Self::Mla(_) | Self::Simt(_) => 1,
        }
    }

    /// Its kind.
    pub fn kind(&self) -> KernelKind {
        match self {
            Self::Mma(config) => config.kind(),
            Self::MlaWgmma(_) => KernelKind::MlaWgmma,
            Self::Mla(_) => KernelKind::Mla,
            Self::Simt(config) => config.kind(),
        }
    }

    /// The dtype to which softmax weights are rounded.
    pub(crate) fn weights(&self) -> Dtype {
        match self {
            Self::Mma(config) => config.o,
            Self::MlaWgmma(config) => config.dtype,
            Self::Mla(config) => config.dtype,
            Self::Simt(_) => Dtype::F32,
        }
    }

    /// Whether these arguments keep the promise of [`Alignment::Vectors`], if the kernel needs it. It does not allocate.
    pub fn accepts(&self, params: &AttentionParams) -> bool {
        match self {
            Self::Mma(config) => config.accepts(params),
            Self::MlaWgmma(config) => config.accepts(params),
            Self::Mla(config) => config.accepts(params),
            Self::Simt(_) => true,
        }
    }

    /// Records the kernel.
    ///
    /// # Errors
    /// With the reasons of the body, if it does not support the configuration or the variant.
    pub fn record(&self, name: &str, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
        match self {
            Self::Mma(config) => mma::attention(name, config, variant),
            Self::MlaWgmma(config) => mla_wgmma::attention(name, config),
            Self::Mla(config) => mla::attention(name, config),
            Self::Simt(config) => simt::attention(name, *config, variant),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let note = match self.body {
            Body::Mma => {
                let has_pairs = self.few_rows.contains(&Bodies::SplitKvPairs);
                let rows = if has_pairs { MAX_PAIRED_ROWS } else { MAX_SPLIT_KV_ROWS };
                format!(": mma_split_kv up to {rows} packed rows, mma_split_q above")
            }
            Body::Wgmma => {
                format!(
                    ": above {MAX_SPLIT_KV_ROWS} packed rows; mma_split_kv up to {MAX_SPLIT_KV_ROWS}, side by side"
                )
            }
            Body::MlaWgmma | Body::Mla => String::new(),
            Body::Simt => ": fallback without tensor cores".to_owned(),
        };
        write!(f, "{}{note}", self.body.name())?;
        let against = |(body, reasons): &(Body, Vec<String>)| (body.name(), reasons.join("; "));
        self.rejected.iter().map(against).try_for_each(|(name, why)| write!(f, "\n  not {name}: {why}"))
    }
}
