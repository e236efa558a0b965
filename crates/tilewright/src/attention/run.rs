//! `run`: checks the tensors of a layer against the plan and calls the backend.

use super::{
    Attention, Inputs, KvTensor, LatentCache, LatentQuery, Output, Plan, Planner, QuantizedLatentCache,
    Variant, requests::KvSource,
};
use crate::{
    Backend, Dtype, Error, KvCache, KvScales, Operator, QuantizedCache, Result, Scale, TensorRef,
    TensorVisitor, View, check_dtype, check_shape, dispatch,
    kv::{KvStrides, layout::KvShape},
};

const OPERATOR: &str = "attention.run";
const ROW_AXES: &str = "[num_rows, num_qo_heads, head_dim]";
/// The first position not distinct from its successor in f32; variants compute with f32 positions.
const MAX_VARIANT_POSITION: usize = 1 << 24;

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
        let Inputs { q, q_pe, k, k_pe, v, scales, .. } = &mut self.inputs;
        visit("q", TensorRef::Input(q))?;
        if let (Some(q), Some(k)) = (q_pe, k_pe) {
            visit("q.pe", TensorRef::Input(q))?;
            visit("kpe", TensorRef::Input(&mut k.view))?;
        }
        visit("k", TensorRef::Input(&mut k.view))?;
        visit("v", TensorRef::Input(&mut v.view))?;
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

    /// Rejects a plan of another operator, and tensors of another kind of attention.
    fn check(&self, plan: &Plan, is_latent: bool) -> Result<()> {
        let of = Planner::new(self.problem, self.tiling);
        plan.check_origin(OPERATOR, &of, plan.problem.serves(&self.problem))?;
        let text = match is_latent {
            true => "this is not latent attention, expected Problem::latent",
            false => "this is latent attention, whose tensors run_latent takes",
        };
        crate::ensure!(self.problem.is_latent() == is_latent, OPERATOR, "{text}");
        Ok(())
    }
}

/// An operator with the tables of its variant, from [`Attention::bind`].
#[derive(Debug, Clone, Copy)]
pub struct BoundAttention<'t, B> {
    attention: &'t Attention<B>,
    tables: &'t [(&'t str, View<'t>)],
}

impl<B: Backend> BoundAttention<'_, B> {
    /// [`Attention::run_scaled`] with these tables.
    ///
    /// # Errors
    /// As [`Attention::run_scaled`], and when a table is missing, unknown, of another length or dtype, or not contiguous.
    pub fn run_scaled(
        &self,
        plan: &Plan,
        q: View<'_>,
        kv: QuantizedCache<'_>,
        out: Output<'_>,
    ) -> Result<()> {
        self.attention.check(plan, false)?;
        let Attention { problem, variant, built, .. } = self.attention;
        let QuantizedCache { cache, scales } = kv;
        let rows = plan.tensor_rows(q.shape().first());
        let (heads, dim, dtype) = (problem.heads(), problem.head_dim(), problem.dtype_q());
        RowShape { shape: [rows, heads.qo, dim.qk], axes: ROW_AXES, dtype }.check("q", &q)?;
        let pages = plan.check_cache(cache)?;
        scales.check(OPERATOR, heads.kv, pages)?;
        if let KvSource::Paged { indices, .. } = &plan.requests.source {
            let used = || indices.iter().map(|&page| page as usize);
            scales.k.check_pages(OPERATOR, "k scale", used())?;
            scales.v.check_pages(OPERATOR, "v scale", used())?;
        }
        let strides = |view: View<'_>| KvStrides::of(problem.layout(), view.strides());
        let [k, v] = [cache.k, cache.v].map(|view| KvTensor { view, strides: strides(view) });
        let (q_pe, k_pe, built) = (None, None, built.as_ref());
        self.execute(plan, Inputs { problem, q, q_pe, k, k_pe, v, scales, variant, built }, out)
    }

    /// [`Attention::run_latent_scaled`] with these tables.
    ///
    /// # Errors
    /// As [`Attention::run_latent_scaled`], and for tables as [`BoundAttention::run_scaled`].
    pub fn run_latent_scaled(
        &self,
        plan: &Plan,
        q: LatentQuery<'_>,
        kv: QuantizedLatentCache<'_>,
        out: Output<'_>,
    ) -> Result<()> {
        self.attention.check(plan, true)?;
        let Attention { problem, variant, built, .. } = self.attention;
        let QuantizedLatentCache { cache: kv, scale } = kv;
        let kv_dtype = problem.dtype_kv();
        crate::ensure!(
            matches!(scale, Scale::One)
                || (matches!(scale, Scale::Tensor(_) | Scale::Values(_)) && kv_dtype.is_cache_only()),
            OPERATOR,
            "a scale of a latent cache is one number for elements of 8 bits, the cache is {kv_dtype}"
        );
        let scales = KvScales { k: scale, v: scale };
        scales.check(OPERATOR, 1, None)?;
        let rows = plan.tensor_rows(q.nope.shape().first());
        let (heads, dim, dtype) = (problem.heads(), problem.head_dim(), problem.dtype_q());
        let kpe = dim.qk - dim.vo;
        let axes = "[num_rows, num_heads, ckv]";
        RowShape { shape: [rows, heads.qo, dim.vo], axes, dtype }.check("q.nope", &q.nope)?;
        let axes = "[num_rows, num_heads, kpe]";
        RowShape { shape: [rows, heads.qo, kpe], axes, dtype }.check("q.pe", &q.pe)?;
        plan.check_latent("ckv", &kv.ckv, dim.vo)?;
        plan.check_latent("kpe", &kv.kpe, kpe)?;
        let strides = |view: &View<'_>| match *view.strides() {
            [page, token, _] => KvStrides { page, token, head: 0 },
            [token, ..] => KvStrides { page: 0, token, head: 0 },
            [] => KvStrides { page: 0, token: 0, head: 0 },
        };
        let [k, pe] = [kv.ckv, kv.kpe].map(|view| KvTensor { view, strides: strides(&view) });
        let (q, q_pe, k_pe, v, built) = (q.nope, Some(q.pe), Some(pe), k, built.as_ref());
        self.execute(plan, Inputs { problem, q, q_pe, k, k_pe, v, scales, variant, built }, out)
    }

    /// Checks tables and outputs, and calls the backend.
    fn execute(&self, plan: &Plan, inputs: Inputs<'_>, out: Output<'_>) -> Result<()> {
        let operator = AttentionRun { plan, inputs, tables: self.checked_tables()?, out };
        operator.check()?;
        self.attention.backend.attention(operator)
    }

    /// The indices of the tables with their values.
    fn checked_tables(&self) -> Result<Vec<(usize, View<'_>)>> {
        let variant = &self.attention.variant;
        let mut tables = Vec::with_capacity(self.tables.len());
        for &(name, values) in self.tables {
            let known = variant.tables().iter().position(|(known, _)| known == name);
            let Some(at) =
                known.filter(|at| variant.is_bound(*at) && tables.iter().all(|(other, _)| other != at))
            else {
                let text =
                    format!("variant {} has no table {name:?} to bind, or it is bound twice", variant.name());
                return Err(Error::new(OPERATOR, text));
            };
            let len = variant.tables()[at].1.len();
            check_shape(OPERATOR, name, values.shape(), &[len], "[elements of the table]")?;
            check_dtype(OPERATOR, name, values.dtype(), Dtype::F32)?;
            crate::ensure!(
                values.is_contiguous(),
                OPERATOR,
                "{name} has strides {:?}, expected a contiguous tensor",
                values.strides()
            );
            tables.push((at, values));
        }
        let missing = (0..variant.tables().len())
            .find(|at| variant.is_bound(*at) && tables.iter().all(|(bound, _)| bound != at));
        missing.map_or(Ok(tables), |at| {
            let (name, table) = &variant.tables()[at];
            let text = format!(
                "variant {}: table {name:?} is not bound, expected {} elements of f32",
                variant.name(),
                table.len()
            );
            Err(Error::new(OPERATOR, text))
        })
    }
}

/// The expected form of queries or outputs.
struct RowShape {
    shape: [usize; 3],
    /// The axes in errors.
    axes: &'static str,
    dtype: Dtype,
}

impl RowShape {
    fn check(&self, name: &str, view: &View<'_>) -> Result<()> {
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
    fn check_cache(&self, kv: KvCache<'_>) -> Result<Option<usize>> {
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
    fn check_latent(&self, name: &str, view: &View<'_>, dim: usize) -> Result<()> {
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
