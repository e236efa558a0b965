//! The operators between the projections and attention in one: norms of heads, RoPE, and the append of keys and values.

use crate::{
    Backend, Indices, Operator, Result, TensorRef, TensorVisitor, View, ViewMut,
    kv::{
        AppendPlan, KvCacheMut, KvLayout, KvStrides, Scale, ScaleMut,
        append::{NewKv, QuantizedCacheMut, append_planned, check_planned},
    },
    norm::{RmsNorm, check_norm},
    rope::{RopeAngles, RopeRotation, check_rotation},
};

/// RMSNorms of the heads of queries and keys.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// The factors of queries and of keys: `[width]`, where heads are rows of `width` elements.
    pub weights: [View<'a>; 2],
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// The arguments of head norms, RoPE and an append of one step.
///
/// `q` `[tokens, qo_heads, head_dim]` and `k` `[tokens, kv_heads, head_dim]` are normalized if there are norms, then rotated and rounded
/// to `q_out` and to the cache; `v` `[tokens, kv_heads, head_dim_vo]` is rounded to the cache. All have stride 1 along the last axis.
/// Backends without a kernel for all of it round norms to the dtype of `q` and `k` first.
#[derive(Debug)]
pub struct RopeAppend<'a> {
    /// Queries; their content is unspecified afterwards.
    pub q: ViewMut<'a>,
    /// Keys; their content is unspecified afterwards.
    pub k: ViewMut<'a>,
    /// Values.
    pub v: View<'a>,
    /// Norms of each head before RoPE.
    pub norms: Option<HeadNorms<'a>>,
    /// `[tokens]`: the position of each token. The caller guarantees that positions on a device are valid.
    pub positions: Indices<'a>,
    /// The angles of the positions.
    pub angles: RopeAngles<'a>,
    /// The rotated queries.
    pub q_out: ViewMut<'a>,
    /// Memory for the rotated keys, of the shape of `k`; its content is unspecified afterwards. Keys are rounded to its dtype, then to
    /// that of the cache.
    pub k_out: ViewMut<'a>,
    /// The paged cache, without scales.
    pub cache: KvCacheMut<'a>,
    /// The layout of the cache.
    pub layout: KvLayout,
    /// The slots of the tokens.
    pub plan: &'a AppendPlan,
}

impl<'a> Operator<'a> for RopeAppend<'a> {
    fn name(&self) -> &'static str {
        "kv.rope_append"
    }

    fn check(&self) -> Result<()> {
        let operator = self.name();
        let from = [self.q.as_view(), self.k.as_view()];
        if let Some(HeadNorms { weights, eps }) = self.norms {
            for (x, weight) in from.iter().zip(weights) {
                check_norm(operator, x, &weight.into(), eps)?;
            }
        }
        check_rotation(operator, from, [&self.q_out, &self.k_out], self.positions, self.angles)?;
        check_planned(operator, self.plan, self.new_kv(), &self.cache, self.layout)
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("q", TensorRef::Output(&mut self.q))?;
        visit("k", TensorRef::Output(&mut self.k))?;
        visit("v", TensorRef::Input(&mut self.v))?;
        if let Some(HeadNorms { weights: [q, k], .. }) = &mut self.norms {
            visit("q norm", TensorRef::Input(q))?;
            visit("k norm", TensorRef::Input(k))?;
        }
        self.angles.views(visit)?;
        visit("positions", TensorRef::Indices(&mut self.positions))?;
        visit("q_out", TensorRef::Output(&mut self.q_out))?;
        visit("k_out", TensorRef::Output(&mut self.k_out))?;
        visit("cache k", TensorRef::Output(&mut self.cache.k))?;
        visit("cache v", TensorRef::Output(&mut self.cache.v))
    }

    /// Only the slots of the new tokens are written.
    fn num_bytes(&mut self) -> usize {
        let of = |shape: &[usize], size: usize| shape.iter().product::<usize>() * size;
        let read = [self.q.as_view(), self.k.as_view(), self.v].map(|x| of(x.shape(), x.dtype().size()));
        let written = [self.q.shape(), self.k.shape(), self.v.shape()];
        let written: usize = written.iter().map(|shape| of(shape, self.q_out.dtype().size())).sum();
        read.iter().sum::<usize>() + written
    }

    fn dispatch<B: Backend + ?Sized>(self, backend: &B) -> Result<()> {
        backend.rope_append(self)
    }
}

impl RopeAppend<'_> {
    fn new_kv(&self) -> NewKv<'_> {
        NewKv { k: self.k_out.as_view(), v: self.v }
    }

    /// The strides of the caches of keys and values, which [`Operator::check`] has accepted.
    pub fn cache_strides(&self) -> [KvStrides; 2] {
        [&self.cache.k, &self.cache.v].map(|cache| KvStrides::of(self.layout, cache.strides()))
    }

    /// Executes the operators one after the other.
    ///
    /// # Errors
    /// Those of the operators.
    pub fn run_apart<B: Backend + ?Sized>(mut self, backend: &B) -> Result<()> {
        if let Some(HeadNorms { weights, eps }) = self.norms {
            for (x, weight) in [&mut self.q, &mut self.k].into_iter().zip(weights) {
                let (x, weight) = (x.reborrow(), weight.into());
                RmsNorm { x: None, residual: None, weight, eps, scale: None, out: x }.run(backend)?;
            }
        }
        RopeRotation {
            from: Some([self.q.as_view(), self.k.as_view()]),
            q: self.q_out.reborrow(),
            k: self.k_out.reborrow(),
            rest: None,
            scales: None,
            positions: self.positions,
            angles: self.angles,
        }
        .run(backend)?;
        let Self { k_out, v, cache, layout, plan, .. } = self;
        let scale = || ScaleMut::Static(Scale::One);
        let cache = QuantizedCacheMut { cache, k_scale: scale(), v_scale: scale() };
        append_planned(backend, plan, NewKv { k: k_out.as_view(), v }, cache, layout)
    }
}
