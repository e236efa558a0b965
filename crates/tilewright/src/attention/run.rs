//! `run`: the arguments of a layer, and their checks against the plan.

use super::{
    Attention, BoundAttention, Output, Plan, Planner, Problem, Variant, requests::KvSource,
    variant::ExpressionVariant,
};
use crate::{
    Backend, Dtype, Error, Operator, Result, View,
    backend::Opaque,
    kv::{
        KvCache, KvScales, QuantizedCache, Scale,
        layout::{KvShape, KvStrides},
    },
    operator::{TensorRef, TensorVisitor, dispatch},
    tensor::{check_dtype, check_shape},
};

pub(super) const OPERATOR: &str = "attention.run";
pub(super) const ROW_AXES: &str = "[num_rows, num_qo_heads, head_dim]";
/// The first position not distinct from its successor in f32; variants compute with f32 positions.
const MAX_VARIANT_POSITION: usize = 1 << 24;

/// Queries of latent attention, in the two parts that models compute.
#[derive(Debug, Clone, Copy)]
pub struct LatentQuery<'a> {
    /// `[num_rows, num_heads, ckv]`, absorbed.
    pub nope: View<'a>,
    /// `[num_rows, num_heads, kpe]`, rotated.
    pub pe: View<'a>,
}

/// KV cache of latent attention: paged `[num_pages, page_size, dim]` or ragged `[num_tokens, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct LatentCache<'a> {
    /// The compressed keys, also the values.
    pub ckv: View<'a>,
    /// The rotary part of keys.
    pub kpe: View<'a>,
}

/// A latent cache of 8 bits: true value = stored value times scale. If the scale of `kpe` differs, multiply `q.pe` by the ratio of
/// the two.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedLatentCache<'a> {
    /// Both tensors.
    pub cache: LatentCache<'a>,
    /// Their scale: [`Scale::Tensor`] or [`Scale::Values`] of one element, or [`Scale::One`] for any dtype.
    pub scale: Scale<'a>,
}

/// Validated inputs of a backend's attention call.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The operator's problem, which may differ from the plan's in scale and mask.
    pub(crate) problem: &'a Problem,
    /// Queries, and their trailing elements if they are in a second tensor.
    pub(crate) q: (View<'a>, Option<View<'a>>),
    /// Keys.
    pub(crate) k: (View<'a>, KvStrides),
    /// Trailing elements of keys, if they are in a second tensor.
    pub(crate) k_pe: Option<(View<'a>, KvStrides)>,
    /// Values.
    pub(crate) v: (View<'a>, KvStrides),
    pub(crate) scales: KvScales<'a>,
    pub(crate) variant: &'a ExpressionVariant,
    pub(crate) built: Option<&'a Opaque>,
}

impl<'a> Inputs<'a> {
    /// The operator's problem, whose scale and mask apply. The plan's may have another scale and a wider mask.
    pub fn problem(&self) -> &'a Problem {
        self.problem
    }

    /// Queries `[num_rows, num_qo_heads, head_dim_qk]`. In latent attention the second tensor has the trailing
    /// elements.
    pub fn q(&self) -> (View<'a>, Option<View<'a>>) {
        self.q
    }

    /// Keys and their strides.
    pub fn k(&self) -> (View<'a>, KvStrides) {
        self.k
    }

    /// Trailing elements of keys, if they are in a second tensor.
    pub fn k_pe(&self) -> Option<(View<'a>, KvStrides)> {
        self.k_pe
    }

    /// Values and their strides.
    pub fn v(&self) -> (View<'a>, KvStrides) {
        self.v
    }

    /// Scales of stored keys and values.
    pub fn scales(&self) -> KvScales<'a> {
        self.scales
    }

    /// The recorded hooks.
    pub fn variant(&self) -> &'a ExpressionVariant {
        self.variant
    }

    /// The result of the backend's [`build`](Backend::build) for this operator.
    pub fn built(&self) -> Option<&'a Opaque> {
        self.built
    }
}

/// The arguments of a run, made by [`Attention::run`].
#[derive(Debug)]
pub struct AttentionRun<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The validated inputs.
    pub inputs: Inputs<'a>,
    /// Index and values of each table that the run binds, contiguous.
    pub tables: Vec<(usize, View<'a>)>,
    /// The tensors to write.
    pub out: Output<'a>,
}

impl<'a> Operator<'a> for AttentionRun<'a> {
    fn name(&self) -> &'static str {
        OPERATOR
    }

    /// Checks the outputs. [`Attention::run`] has checked the inputs.
    fn check(&self) -> Result<()> {
        let Self { plan, inputs: Inputs { variant, .. }, out, .. } = self;
        let rows = plan.tensor_rows(out.o.shape().first());
        let (heads, dim) = (plan.problem.heads(), plan.problem.head_dim());
        let dtype = plan.problem.dtype_out();
        RowShape { shape: [rows, heads.qo, dim.vo], axes: ROW_AXES, dtype }.check("o", &out.o.as_view())?;
        if let Some(lse) = &out.lse {
            crate::ensure!(
                variant.has_softmax(),
                OPERATOR,
                "variant {} has no softmax, so there is no lse",
                variant.name()
            );
            check_shape(OPERATOR, "lse", lse.shape(), &[rows, heads.qo], "[num_rows, num_qo_heads]")?;
            check_dtype(OPERATOR, "lse", lse.dtype(), Dtype::F32)?;
            crate::ensure!(
                lse.is_contiguous(),
                OPERATOR,
                "lse has strides {:?}, expected a contiguous tensor",
                lse.strides()
            );
        }
        if variant.reads_positions() {
            let longest = plan.requests.longest();
            crate::ensure!(
                longest <= MAX_VARIANT_POSITION,
                OPERATOR,
                "variant {} reads positions, which go up to {longest} here, the most is {MAX_VARIANT_POSITION}",
                variant.name()
            );
        }
        out.workspace.check(OPERATOR, plan)
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        let Inputs { q, k, k_pe, v, scales, .. } = &mut self.inputs;
        visit("q", TensorRef::Input(&mut q.0))?;
        if let (Some(q), Some(k)) = (&mut q.1, k_pe) {
            visit("q.pe", TensorRef::Input(q))?;
            visit("kpe", TensorRef::Input(&mut k.0))?;
        }
        visit("k", TensorRef::Input(&mut k.0))?;
        visit("v", TensorRef::Input(&mut v.0))?;
        for (name, scale) in [("k scale", &mut scales.k), ("v scale", &mut scales.v)] {
            if let Scale::Page(scales) | Scale::Values(scales) = scale {
                visit(name, TensorRef::Input(scales))?;
            }
        }
        for (at, table) in &mut self.tables {
            visit(&self.inputs.variant.tables()[*at].0, TensorRef::Input(table))?;
        }
        visit("o", TensorRef::Output(&mut self.out.o))?;
        if let Some(lse) = &mut self.out.lse {
            visit("lse", TensorRef::Output(lse))?;
        }
        visit("workspace", TensorRef::Workspace(&mut self.out.workspace))
    }

    fn num_bytes(&mut self) -> usize {
        let explanation = self.plan.explain();
        explanation.kv_bytes + explanation.qo_bytes
    }

    dispatch!(attention);
}

impl<B: Backend> Attention<B> {
    /// Executes `plan`, without scheduling. A CPU returns after the result is written; only its first call and bound tables allocate. A GPU
    /// returns after the launches and allocates lists of arguments on the host. It waits for uploads of new scales and copies of hook buffers.
    ///
    /// `q`: `[num_rows, num_qo_heads, head_dim_qk]`; `kv`: see [`KvCache`]. Strides are arbitrary, except that the last
    /// axis of each tensor has stride 1.
    ///
    /// # Errors
    /// When a shape, stride or dtype does not fit the plan; a page of the plan is not in the cache; the plan is for
    /// another problem; the workspace is too small; an LSE is requested from a variant that has none; or a variant
    /// reads positions and a request is longer than 16,777,216 tokens.
    pub fn run(&self, plan: &Plan, q: View<'_>, kv: KvCache<'_>, out: Output<'_>) -> Result<()> {
        self.run_scaled(plan, q, QuantizedCache { cache: kv, scales: KvScales::default() }, out)
    }

    /// [`Attention::run`] over a quantized cache: true value = stored value times scale.
    ///
    /// The `key` and `value` hooks of a variant transform stored values, the `logits` hook scaled ones: see [`variant`](super::variant).
    ///
    /// # Errors
    /// As [`Attention::run`], and when a scale is missing, or not finite and positive.
    pub fn run_scaled(
        &self,
        plan: &Plan,
        q: View<'_>,
        kv: QuantizedCache<'_>,
        out: Output<'_>,
    ) -> Result<()> {
        self.bind(&[]).run_scaled(plan, q, kv, out)
    }

    /// Executes a plan of [`super::Problem::latent`].
    ///
    /// # Errors
    /// As [`Attention::run`].
    pub fn run_latent(
        &self,
        plan: &Plan,
        q: LatentQuery<'_>,
        kv: LatentCache<'_>,
        out: Output<'_>,
    ) -> Result<()> {
        self.run_latent_scaled(plan, q, QuantizedLatentCache { cache: kv, scale: Scale::One }, out)
    }

    /// [`Attention::run_latent`] over a cache of 8 bits.
    ///
    /// # Errors
    /// As [`Attention::run`], and when the scale is not finite and positive, of another kind than [`QuantizedLatentCache::scale`], or
    /// for a cache of another size of elements.
    pub fn run_latent_scaled(
        &self,
        plan: &Plan,
        q: LatentQuery<'_>,
        kv: QuantizedLatentCache<'_>,
        out: Output<'_>,
    ) -> Result<()> {
        self.bind(&[]).run_latent_scaled(plan, q, kv, out)
    }

    /// Binds the tables of the variant that [`Variant::bound_tables`] lists, by name, for runs: contiguous f32 in the backend's memory,
    /// whose values each run reads.
    pub fn bind<'t>(&'t self, tables: &'t [(&'t str, View<'t>)]) -> BoundAttention<'t, B> {
        BoundAttention { attention: self, tables }
    }

    /// Rejects a plan of another operator.
    pub(super) fn check(&self, plan: &Plan) -> Result<()> {
        let of = Planner::new(self.problem, self.tiling);
        plan.check_origin(OPERATOR, &of, plan.problem.serves(&self.problem))
    }
}

/// The expected form of queries or outputs.
pub(super) struct RowShape {
    pub(super) shape: [usize; 3],
    /// The axes in errors.
    pub(super) axes: &'static str,
    pub(super) dtype: Dtype,
}

impl RowShape {
    pub(super) fn check(&self, name: &str, view: &View<'_>) -> Result<()> {
        check_shape(OPERATOR, name, view.shape(), &self.shape, self.axes)?;
        check_dtype(OPERATOR, name, view.dtype(), self.dtype)?;
        crate::ensure!(
            view.strides()[2] == 1 || self.shape[2] == 1,
            OPERATOR,
            "{name} has strides {:?}: head_dim, the last axis, must have stride 1",
            view.strides()
        );
        Ok(())
    }
}

impl Plan {
    /// Checks that a cache has the plan's shape, layout and dtype, and all its pages or tokens. Returns the number of
    /// pages of a paged one.
    pub(super) fn check_cache(&self, kv: KvCache<'_>) -> Result<Option<usize>> {
        let page_size = match self.requests.source {
            KvSource::Paged { page_size, .. } => Some(page_size),
            KvSource::Ragged { .. } | KvSource::Blocks { .. } => None,
        };
        let dim = self.problem.head_dim();
        let mut pages = None;
        for (name, view, head_dim) in [("k", kv.k, dim.qk), ("v", kv.v, dim.vo)] {
            let shape = KvShape {
                layout: self.problem.layout(),
                page_size,
                heads: self.problem.heads().kv,
                head_dim,
                dtype: self.problem.dtype_kv(),
            };
            let count = shape.check(OPERATOR, name, &view)?;
            self.check_count(name, count)?;
            let min_pages = pages.map_or(count, |pages: usize| pages.min(count));
            pages = page_size.map(|_| min_pages);
        }
        Ok(pages)
    }

    /// Checks one tensor of a latent cache.
    pub(super) fn check_latent(&self, name: &str, view: &View<'_>, dim: usize) -> Result<()> {
        let count = view.shape().first().copied().unwrap_or(0);
        let (shape, axes): (&[usize], _) = match self.requests.source {
            KvSource::Paged { page_size, .. } => (&[count, page_size, dim], "[num_pages, page_size, dim]"),
            KvSource::Ragged { .. } | KvSource::Blocks { .. } => (&[count, dim], "[num_tokens, dim]"),
        };
        check_shape(OPERATOR, name, view.shape(), shape, axes)?;
        check_dtype(OPERATOR, name, view.dtype(), self.problem.dtype_kv())?;
        crate::ensure!(
            view.strides().last() == Some(&1) || dim == 1,
            OPERATOR,
            "{name} has strides {:?}: the last axis must have stride 1",
            view.strides()
        );
        self.check_count(name, count)
    }

    /// Checks that a tensor has all pages or tokens of the plan.
    fn check_count(&self, name: &str, count: usize) -> Result<()> {
        let problem =
            match self.requests.source {
                KvSource::Paged { max_page, .. } => (max_page >= 0 && max_page as usize >= count)
                    .then(|| format!("page = {max_page} is not in 0..{count}, the pages of {name}")),
                KvSource::Ragged { tokens } => (tokens != count)
                    .then(|| format!("{name} has {count} tokens, kv_indptr ends at {tokens}")),
                KvSource::Blocks { tokens, .. } => (tokens != count)
                    .then(|| format!("{name} has {count} tokens, the blocks are of {tokens}")),
            };
        problem.map_or(Ok(()), |text| Err(Error::new(OPERATOR, text)))
    }
}
