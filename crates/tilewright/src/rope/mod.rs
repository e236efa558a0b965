//! Rotary position embedding of queries and keys, in place or out of place.
//!
//! `q`: `[tokens, qo_heads, head_dim]`, `k`: `[tokens, kv_heads, head_dim]`. A pair `(a, b)` at angle `φ` becomes
//! `(a·cos φ - b·sin φ, b·cos φ + a·sin φ)`, computed in f32 and rounded once. Elements from `rotary_dim` on are
//! unchanged. Results of 8 bits are multiplied by `1 / scale` before they are rounded, the unchanged elements too.

mod cache;
mod frequencies;
mod positions;

pub use cache::CosSinCache;
pub(crate) use cache::fill_row;
pub use frequencies::{Rope, RopeScaling, RopeStyle};
pub use positions::Positions;

use crate::{
    Backend, Dtype, Error, Indices, Operator, Result, TensorRef, TensorVisitor, View, ViewMut,
    check_computable, check_dtype, check_rows, check_shape, dispatch,
};

/// The angles of a rotary embedding.
#[derive(Debug, Clone, Copy)]
pub enum RopeAngles<'a> {
    /// Computed in f64, so every i32 position is accurate.
    Computed(&'a Rope),
    /// Cosines and sines of a table.
    Table(&'a CosSinCache),
    /// Cosines and sines of a table in the backend's memory, which each run reads.
    Tensor {
        /// f32 `[max_positions, rotary_dim]`, contiguous; rows as those of [`CosSinCache`].
        table: View<'a>,
        /// The pairing of elements.
        style: RopeStyle,
    },
}

impl<'a> RopeAngles<'a> {
    /// Visits the table if it is a tensor.
    pub(crate) fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        let Self::Tensor { table, .. } = self else { return Ok(()) };
        visit("cos_sin_cache", TensorRef::Input(table))
    }

    /// The number of leading elements of each head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        match self {
            Self::Computed(rope) => rope.rotary_dim(),
            Self::Table(cache) => cache.rotary_dim(),
            Self::Tensor { table, .. } => table.shape().last().copied().unwrap_or(0),
        }
    }

    /// The pairing of elements.
    pub fn style(&self) -> RopeStyle {
        match self {
            Self::Computed(rope) => rope.style(),
            Self::Table(cache) => cache.style(),
            Self::Tensor { style, .. } => *style,
        }
    }

    /// The number of valid positions, from 0.
    fn max_positions(&self) -> usize {
        match self {
            Self::Computed(_) => i32::MAX as usize,
            Self::Table(cache) => cache.max_positions(),
            Self::Tensor { table, .. } => table.shape().first().copied().unwrap_or(0),
        }
    }

    /// Rejects a tensor that is not a contiguous table.
    fn check(&self, operator: &'static str) -> Result<()> {
        let Self::Tensor { table, .. } = self else { return Ok(()) };
        crate::ensure!(
            matches!(table.shape(), &[_, dim] if dim > 0 && dim.is_multiple_of(2)),
            operator,
            "cos_sin_cache has shape {:?}, expected [max_positions, rotary_dim] with an even rotary_dim above 0",
            table.shape()
        );
        check_dtype(operator, "cos_sin_cache", table.dtype(), Dtype::F32)?;
        crate::ensure!(
            table.is_contiguous(),
            operator,
            "cos_sin_cache has strides {:?}, expected a contiguous tensor",
            table.strides()
        );
        Ok(())
    }
}

/// The elements of each head beyond `rotary_dim` in tensors of their own, which are copied and rounded like rotated ones.
#[derive(Debug)]
pub struct RopeRest<'a> {
    /// Of queries and keys, `[tokens, heads, head_dim - rotary_dim]`, of the dtypes of [`RopeRotation::from`].
    pub from: [View<'a>; 2],
    /// Of the result for queries, with the dtype of [`RopeRotation::q`].
    pub q: ViewMut<'a>,
    /// Of the result for keys, with the dtype of [`RopeRotation::k`].
    pub k: ViewMut<'a>,
}

/// The arguments of a rotary embedding.
#[derive(Debug)]
pub struct RopeRotation<'a> {
    /// The queries and keys to rotate; `None` if they are the content of `q` and `k`.
    pub from: Option<[View<'a>; 2]>,
    /// The rotated queries, `[tokens, qo_heads, head_dim]` f32, f16 or bf16, with stride 1 along the last axis. With scales they
    /// have 8 bits; with a rest, `head_dim` here is `rotary_dim`.
    pub q: ViewMut<'a>,
    /// The rotated keys, `[tokens, kv_heads, head_dim]`, as `q`.
    pub k: ViewMut<'a>,
    /// The elements beyond `rotary_dim`, unless they are in `from`, `q` and `k`; only out of place.
    pub rest: Option<RopeRest<'a>>,
    /// Divisors of the queries and of the keys, above 0, for results of 8 bits; only out of place.
    pub scales: Option<[f32; 2]>,
    /// `[tokens]`: the position of each token. The caller guarantees that positions on a device are valid.
    pub positions: Indices<'a>,
    /// The angles of the positions.
    pub angles: RopeAngles<'a>,
}

impl<'a> Operator<'a> for RopeRotation<'a> {
    fn name(&self) -> &'static str {
        match (&self.from, self.angles) {
            (None, RopeAngles::Computed(_)) => "rope.apply",
            (None, _) => "rope.apply_with_cos_sin_cache",
            (Some(_), RopeAngles::Computed(_)) => "rope.rotate",
            (Some(_), _) => "rope.rotate_with_cos_sin_cache",
        }
    }

    fn check(&self) -> Result<()> {
        let operator = self.name();
        let from = self.from.unwrap_or([self.q.as_view(), self.k.as_view()]);
        check_rotation(operator, from, [&self.q, &self.k], self.positions, self.angles)?;
        if self.from.is_some() {
            self.check_result("q_out", self.q.dtype())?;
            self.check_result("k_out", self.k.dtype())?;
        }
        self.check_rest(from)
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        let [q, k] = if self.from.is_some() { ["q_out", "k_out"] } else { ["q", "k"] };
        for (name, from) in ["q", "k"].into_iter().zip(self.from.iter_mut().flatten()) {
            visit(name, TensorRef::Input(from))?;
        }
        visit(q, TensorRef::Output(&mut self.q))?;
        visit(k, TensorRef::Output(&mut self.k))?;
        if let Some(RopeRest { from: [q_rest, k_rest], q, k }) = &mut self.rest {
            visit("q_rest", TensorRef::Input(q_rest))?;
            visit("k_rest", TensorRef::Input(k_rest))?;
            visit("q_rest_out", TensorRef::Output(q))?;
            visit("k_rest_out", TensorRef::Output(k))?;
        }
        self.angles.views(visit)?;
        visit("positions", TensorRef::Indices(&mut self.positions))
    }

    dispatch!(rope);
}

impl RopeRotation<'_> {
    /// Rejects an 8-bit result without scales, another one with them, and scales in place or out of range.
    fn check_result(&self, argument: &str, dtype: Dtype) -> Result<()> {
        let operator = self.name();
        let Some(scales) = self.scales else { return check_computable(operator, argument, dtype) };
        crate::ensure!(dtype.size() == 1, operator, "{argument} is {dtype}, with scales it must have 8 bits");
        let wrong = scales.iter().find(|scale| !(scale.is_finite() && **scale > 0.0));
        wrong.map_or(Ok(()), |scale| {
            Err(Error::new(operator, format!("scale = {scale} is not a finite number above 0")))
        })
    }

    fn check_rest(&self, from: [View<'_>; 2]) -> Result<()> {
        let (operator, out_of_place) = (self.name(), self.from.is_some());
        crate::ensure!(
            out_of_place || (self.rest.is_none() && self.scales.is_none()),
            operator,
            "a rotation in place has neither scales nor a rest"
        );
        let Some(rest) = &self.rest else { return Ok(()) };
        let (rotary_dim, head_dim) = (self.angles.rotary_dim(), from[0].shape()[2]);
        let whole = rotary_dim == head_dim;
        crate::ensure!(
            whole,
            operator,
            "head_dim = {head_dim} beside a rest, expected rotary_dim = {rotary_dim}"
        );
        let rest_dim = rest.from[0].shape().last().copied().unwrap_or(0);
        let names = [("q_rest", "q_rest_out"), ("k_rest", "k_rest_out")];
        let outputs = [(&rest.q, &self.q), (&rest.k, &self.k)];
        for (i, ((name, out_name), (out, rotated))) in names.into_iter().zip(outputs).enumerate() {
            let (x, heads) = (&rest.from[i], from[i].shape());
            let expected = [heads[0], heads[1], rest_dim];
            check_shape(operator, name, x.shape(), &expected, "[tokens, heads, rest_dim]")?;
            check_dtype(operator, name, x.dtype(), from[i].dtype())?;
            check_rows(operator, name, (x.shape(), x.strides()))?;
            check_copy(operator, out_name, out, x)?;
            check_dtype(operator, out_name, out.dtype(), rotated.dtype())?;
        }
        Ok(())
    }
}

/// Checks queries and keys, the shapes of their rotated form, angles, and positions.
pub(crate) fn check_rotation(
    operator: &'static str,
    from: [View<'_>; 2],
    to: [&ViewMut<'_>; 2],
    positions: Indices<'_>,
    angles: RopeAngles<'_>,
) -> Result<()> {
    angles.check(operator)?;
    let tokens = check_heads(operator, from, angles.rotary_dim())?;
    for ((argument, to), from) in ["q_out", "k_out"].into_iter().zip(to).zip(&from) {
        check_copy(operator, argument, to, from)?;
    }
    check_positions(operator, positions, tokens, angles.max_positions())
}

/// Rejects a result that differs from `from` in shape or has no dense last axis.
fn check_copy(operator: &'static str, argument: &str, to: &ViewMut<'_>, from: &View<'_>) -> Result<()> {
    check_shape(operator, argument, to.shape(), from.shape(), "[tokens, heads, head_dim]")?;
    check_rows(operator, argument, (to.shape(), to.strides()))
}

/// Rotates `q` and `k` in place by the angles of their positions, with shapes and dtypes as in [`RopeRotation`].
///
/// # Errors
/// When shapes disagree, a last axis is not dense, `rotary_dim` is above `head_dim`, or positions are out of range.
pub fn apply_rope<B: Backend + ?Sized>(
    backend: &B,
    q: ViewMut<'_>,
    k: ViewMut<'_>,
    positions: Positions<'_>,
    rope: &Rope,
) -> Result<()> {
    rotate(backend, None, [q, k], positions, RopeAngles::Computed(rope))
}

/// [`apply_rope`] with cosines and sines from a table.
///
/// # Errors
/// As for [`apply_rope`], and when a position is outside the table.
pub fn apply_rope_with_cos_sin_cache<B: Backend + ?Sized>(
    backend: &B,
    q: ViewMut<'_>,
    k: ViewMut<'_>,
    positions: Positions<'_>,
    cache: &CosSinCache,
) -> Result<()> {
    rotate(backend, None, [q, k], positions, RopeAngles::Table(cache))
}

/// Out-of-place [`apply_rope_with_cos_sin_cache`]: writes q and k of `from`, rotated, to `to`. Elements from `rotary_dim` on are
/// copied. An f32 GEMM output is thus rounded only once, to the dtype of attention.
///
/// # Errors
/// As for [`apply_rope_with_cos_sin_cache`], and when `to` has other shapes than `from`.
pub fn rotate_with_cos_sin_cache<B: Backend + ?Sized>(
    backend: &B,
    from: [View<'_>; 2],
    to: [ViewMut<'_>; 2],
    positions: Positions<'_>,
    cache: &CosSinCache,
) -> Result<()> {
    rotate(backend, Some(from), to, positions, RopeAngles::Table(cache))
}

fn rotate<B: Backend + ?Sized>(
    backend: &B,
    from: Option<[View<'_>; 2]>,
    [q, k]: [ViewMut<'_>; 2],
    positions: Positions<'_>,
    angles: RopeAngles<'_>,
) -> Result<()> {
    let tokens = q.shape().first().copied().unwrap_or(0);
    let operator =
        RopeRotation { from, q, k, rest: None, scales: None, positions: Indices::from(&[]), angles };
    let positions = positions.expand(operator.name(), tokens)?;
    RopeRotation { positions: positions.indices(), ..operator }.run(backend)
}

/// Checks both tensors and returns the number of tokens.
fn check_heads(operator: &'static str, [q, k]: [View<'_>; 2], rotary_dim: usize) -> Result<usize> {
    for (argument, x) in [("q", &q), ("k", &k)] {
        crate::ensure!(
            x.shape().len() == 3,
            operator,
            "{argument} has shape {:?}, expected [tokens, heads, head_dim]",
            x.shape()
        );
        check_computable(operator, argument, x.dtype())?;
        check_rows(operator, argument, (x.shape(), x.strides()))?;
    }
    let (tokens, head_dim) = (q.shape()[0], q.shape()[2]);
    crate::ensure!(
        k.shape()[0] == tokens && k.shape()[2] == head_dim,
        operator,
        "k has shape {:?}, expected [tokens, heads, head_dim] = [{tokens}, _, {head_dim}]",
        k.shape()
    );
    crate::ensure!(
        rotary_dim <= head_dim,
        operator,
        "rotary_dim = {rotary_dim} is above head_dim = {head_dim}"
    );
    Ok(tokens)
}

/// Checks that there is one position per token, and that those on the host are below `limit`.
fn check_positions(
    operator: &'static str,
    positions: Indices<'_>,
    tokens: usize,
    limit: usize,
) -> Result<()> {
    crate::ensure!(
        positions.len() == tokens,
        operator,
        "positions has {} elements, expected tokens = {tokens}",
        positions.len()
    );
    let ids = positions.host().unwrap_or_default();
    let outside = ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= limit));
    outside.map_or(Ok(()), |token| {
        let id = ids[token];
        Err(Error::new(operator, format!("token {token}: position = {id} is not in 0..{limit}")))
    })
}
