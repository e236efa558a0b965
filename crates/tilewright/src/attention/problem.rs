//! The static shape of an attention operator: everything that a kernel is compiled for. [`super::Batch`] holds the
//! inputs of one step.

use super::mask::Mask;
use crate::{Dtype, Result, kv::KvLayout};
use std::fmt;

/// Maximum number of query heads, so that products of counts do not overflow.
const MAX_HEADS: usize = 1 << 16;

/// Numbers of heads. `qo / kv` query heads share one KV head (GQA; 1 is MHA, `kv == 1` is MQA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Query and output heads, a multiple of `kv`.
    pub qo: usize,
    /// Key and value heads.
    pub kv: usize,
}

impl Heads {
    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.qo / self.kv
    }
}

/// Elements per head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadDim {
    /// Of queries and keys.
    pub qk: usize,
    /// Of values and outputs.
    pub vo: usize,
}

impl HeadDim {
    /// The same for queries, keys, values and outputs.
    pub fn same(dim: usize) -> Self {
        Self { qk: dim, vo: dim }
    }
}

/// The static shape of an attention operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Problem {
    heads: Heads,
    head_dim: HeadDim,
    dtype_q: Dtype,
    dtype_o: Dtype,
    /// Whether outputs are rounded to e4m3.
    fp8_outputs: bool,
    dtype_kv: Dtype,
    layout: KvLayout,
    mask: Mask,
    /// Bits of the f32 scale, for hashing.
    scale: u32,
    latent: bool,
}

impl Problem {
    /// Whether plans of this problem serve runs of `other`: it differs in the scale only, or in a mask within this one.
    pub(crate) fn serves(&self, other: &Self) -> bool {
        Self { mask: self.mask, scale: self.scale, ..*other } == *self && self.mask.contains(other.mask)
    }

    /// Starts a builder. Defaults: f32, NHD, causal, scale `1 / sqrt(head_dim.qk)`.
    pub fn builder(heads: Heads, head_dim: HeadDim) -> ProblemBuilder {
        let problem = Self {
            heads,
            head_dim,
            dtype_q: Dtype::F32,
            dtype_o: Dtype::F32,
            fp8_outputs: false,
            dtype_kv: Dtype::F32,
            layout: KvLayout::default(),
            mask: Mask::default(),
            scale: 0,
            latent: false,
        };
        ProblemBuilder { problem, scale: None }
    }

    /// Multi-head latent attention (DeepSeek MLA) in absorbed form: `num_heads` query heads over one latent `ckv` and
    /// one rotary part `kpe` per token, `s = scale · (q_nope · ckv + q_pe · kpe)`. `ckv` is also the value.
    ///
    /// `head_dim.qk` is `ckv + kpe`, `head_dim.vo` is `ckv`. There is no default scale, because it is that of the heads
    /// before absorption: `1 / sqrt(128 + 64)` in DeepSeek-V3.
    pub fn latent(num_heads: usize, ckv: usize, kpe: usize) -> ProblemBuilder {
        let head_dim = HeadDim { qk: ckv.saturating_add(kpe), vo: ckv };
        let mut builder = Self::builder(Heads { qo: num_heads, kv: 1 }, head_dim);
        builder.problem.latent = true;
        builder
    }

    /// Numbers of heads.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// Elements per head.
    pub fn head_dim(&self) -> HeadDim {
        self.head_dim
    }

    /// Dtype of queries: that of products, or e4m3.
    pub fn dtype_q(&self) -> Dtype {
        self.dtype_q
    }

    /// Dtype of products, and of outputs unless these are e4m3.
    pub fn dtype_o(&self) -> Dtype {
        self.dtype_o
    }

    /// Dtype of outputs in memory: [`dtype_o`](Self::dtype_o), or e4m3.
    pub fn dtype_out(&self) -> Dtype {
        if self.fp8_outputs { Dtype::E4m3 } else { self.dtype_o }
    }

    /// Dtype of keys and values.
    pub fn dtype_kv(&self) -> Dtype {
        self.dtype_kv
    }

    /// Axis order of the KV cache.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// The keys visible to a row.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// The factor on `q · k` before the softmax.
    pub fn scale(&self) -> f32 {
        f32::from_bits(self.scale)
    }

    /// Whether this is latent attention ([`Problem::latent`]): values are the first `head_dim.vo` elements of keys.
    pub fn is_latent(&self) -> bool {
        self.latent
    }

    /// Elements of K and V per token and KV head.
    pub(crate) fn kv_width(&self) -> usize {
        self.head_dim.qk + if self.latent { 0 } else { self.head_dim.vo }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { heads, head_dim, dtype_q, dtype_o, dtype_kv, layout, mask, .. } = self;
        write!(f, "{}/{} heads, head_dim {}", heads.qo, heads.kv, head_dim.qk)?;
        if head_dim.qk != head_dim.vo {
            write!(f, "/{}", head_dim.vo)?;
        }
        if self.latent {
            f.write_str(" latent")?;
        }
        match dtype_q == dtype_o {
            true => write!(f, ", {dtype_o} q/o")?,
            false => write!(f, ", {dtype_q} q, {dtype_o} o")?,
        }
        if self.fp8_outputs {
            f.write_str(" to e4m3")?;
        }
        write!(f, ", {dtype_kv} KV, {layout}, {mask}")
    }
}

/// Collects the options of a [`Problem`]; [`ProblemBuilder::build`] checks them.
#[derive(Debug, Clone)]
pub struct ProblemBuilder {
    /// Not yet checked, and without its scale.
    problem: Problem,
    scale: Option<f32>,
}

impl ProblemBuilder {
    /// Dtypes of queries and outputs, and of keys and values.
    #[must_use]
    pub fn dtypes(mut self, qo: Dtype, kv: Dtype) -> Self {
        (self.problem.dtype_q, self.problem.dtype_o, self.problem.dtype_kv) = (qo, qo, kv);
        self
    }

    /// FP8 attention: queries of e4m3 over keys and values of e4m3; outputs keep their dtype. Call it after
    /// [`dtypes`](Self::dtypes). A scale of queries is a factor of [`scale`](Self::scale) or of the scale of keys.
    #[must_use]
    pub fn fp8_queries(mut self) -> Self {
        self.problem.dtype_q = Dtype::E4m3;
        self
    }

    /// Outputs of e4m3, rounded from f32 to nearest; those out of range become the largest. The scale of values is their factor:
    /// that of the cache, divided by the scale of outputs.
    #[must_use]
    pub fn fp8_outputs(mut self) -> Self {
        self.problem.fp8_outputs = true;
        self
    }

    /// Axis order of the KV cache.
    #[must_use]
    pub fn layout(mut self, layout: KvLayout) -> Self {
        self.problem.layout = layout;
        self
    }

    /// The keys visible to a row.
    #[must_use]
    pub fn mask(mut self, mask: Mask) -> Self {
        self.problem.mask = mask;
        self
    }

    /// The factor on `q · k`, instead of `1 / sqrt(head_dim.qk)`.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Checks and builds.
    ///
    /// # Errors
    /// When a count is 0; query heads are not a multiple of KV heads or exceed 65536; the dtype of outputs has 8
    /// bits; queries of e4m3 are used with other keys or with latent attention; the scale is not finite and positive, or missing for latent attention.
    pub fn build(self) -> Result<Problem> {
        const OPERATOR: &str = "attention.problem";
        let Self { problem, scale } = self;
        let Problem { heads, head_dim, dtype_q, dtype_o, dtype_kv, latent, .. } = problem;
        let counts = [
            ("qo heads", heads.qo),
            ("kv heads", heads.kv),
            ("head_dim.qk", head_dim.qk),
            ("head_dim.vo", head_dim.vo),
        ];
        for (name, value) in counts {
            crate::ensure!(value > 0, OPERATOR, "{name} = 0, expected at least 1");
        }
        crate::ensure!(
            heads.qo.is_multiple_of(heads.kv),
            OPERATOR,
            "qo heads = {} is not a multiple of kv heads = {}",
            heads.qo,
            heads.kv
        );
        crate::ensure!(heads.qo <= MAX_HEADS, OPERATOR, "qo heads = {} is above {MAX_HEADS}", heads.qo);
        crate::ensure!(
            !dtype_o.is_cache_only(),
            OPERATOR,
            "q/o dtype = {dtype_o}, expected f32, f16 or bf16"
        );
        crate::ensure!(
            dtype_q == dtype_o || dtype_kv == Dtype::E4m3,
            OPERATOR,
            "queries are {dtype_q} and the cache is {dtype_kv}, expected e4m3"
        );
        crate::ensure!(
            dtype_q == dtype_o || !latent,
            OPERATOR,
            "queries of latent attention are {dtype_q}, expected {dtype_o} as outputs"
        );
        crate::ensure!(
            !latent || scale.is_some(),
            OPERATOR,
            "latent attention has no default scale, expected that of the heads before absorption"
        );
        crate::ensure!(
            !latent || head_dim.qk < usize::MAX,
            OPERATOR,
            "ckv + kpe is above {}",
            usize::MAX - 1
        );
        crate::ensure!(
            !latent || head_dim.qk > head_dim.vo,
            OPERATOR,
            "kpe = 0, expected at least 1 (without a rotated part this is MQA with K and V the same)"
        );
        let scale = scale.unwrap_or_else(|| (head_dim.qk as f32).sqrt().recip());
        crate::ensure!(
            scale.is_finite() && scale > 0.0,
            OPERATOR,
            "scale = {scale}, expected a finite number above 0"
        );
        Ok(Problem { scale: scale.to_bits(), ..problem })
    }
}
