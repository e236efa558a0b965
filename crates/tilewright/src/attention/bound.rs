//! `run` with bound tables: validates the tensors of a layer against the plan and calls the backend.

use super::{
    Attention, AttentionRun, Inputs, LatentQuery, Output, Plan, QuantizedLatentCache, Variant,
    requests::KvSource,
    run::{OPERATOR, ROW_AXES, RowShape},
};
use crate::{
    Backend, Dtype, Error, Operator, Result, View,
    kv::{KvScales, QuantizedCache, Scale, layout::KvStrides},
    tensor::{check_dtype, check_shape},
};

/// An operator with the tables of its variant, from [`Attention::bind`].
#[derive(Debug, Clone, Copy)]
pub struct BoundAttention<'t, B> {
    pub(super) attention: &'t Attention<B>,
    pub(super) tables: &'t [(&'t str, View<'t>)],
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
        self.attention.check(plan)?;
        crate::ensure!(
            !self.attention.problem.is_latent(),
            OPERATOR,
            "this is latent attention, whose tensors run_latent takes"
        );
        let QuantizedCache { cache, scales } = kv;
        let rows = plan.tensor_rows(q.shape().first());
        let (heads, dim) = (self.attention.problem.heads(), self.attention.problem.head_dim());
        let dtype = self.attention.problem.dtype_q();
        RowShape { shape: [rows, heads.qo, dim.qk], axes: ROW_AXES, dtype }.check("q", &q)?;
        let pages = plan.check_cache(cache)?;
        scales.check(OPERATOR, heads.kv, pages)?;
        if let KvSource::Paged { indices, .. } = &plan.requests.source {
            let used = || indices.iter().map(|&page| page as usize);
            scales.k.check_pages(OPERATOR, "k scale", used())?;
            scales.v.check_pages(OPERATOR, "v scale", used())?;
        }
        let strides = |view: &View<'_>| KvStrides::of(self.attention.problem.layout(), view.strides());
        let (k, v) = ((cache.k, strides(&cache.k)), (cache.v, strides(&cache.v)));
        let built = self.attention.built.as_ref();
        let (problem, variant) = (&self.attention.problem, &self.attention.variant);
        let inputs = Inputs { problem, q: (q, None), k, k_pe: None, v, scales, variant, built };
        AttentionRun { plan, inputs, tables: self.checked_tables()?, out }.run(&self.attention.backend)
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
        self.attention.check(plan)?;
        crate::ensure!(
            self.attention.problem.is_latent(),
            OPERATOR,
            "this is not latent attention, expected Problem::latent"
        );
        let QuantizedLatentCache { cache: kv, scale } = kv;
        let kv_dtype = self.attention.problem.dtype_kv();
        crate::ensure!(
            matches!(scale, Scale::One)
                || (matches!(scale, Scale::Tensor(_) | Scale::Values(_)) && kv_dtype.is_cache_only()),
            OPERATOR,
            "a scale of a latent cache is one number for elements of 8 bits, the cache is {kv_dtype}"
        );
        let scales = KvScales { k: scale, v: scale };
        scales.check(OPERATOR, 1, None)?;
        let rows = plan.tensor_rows(q.nope.shape().first());
        let (heads, dim) = (self.attention.problem.heads(), self.attention.problem.head_dim());
        let kpe = dim.qk - dim.vo;
        let dtype = self.attention.problem.dtype_q();
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
        let ckv = (kv.ckv, strides(&kv.ckv));
        let inputs = Inputs {
            problem: &self.attention.problem,
            q: (q.nope, Some(q.pe)),
            k: ckv,
            k_pe: Some((kv.kpe, strides(&kv.kpe))),
            v: ckv,
            scales,
            variant: &self.attention.variant,
            built: self.attention.built.as_ref(),
        };
        AttentionRun { plan, inputs, tables: self.checked_tables()?, out }.run(&self.attention.backend)
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
