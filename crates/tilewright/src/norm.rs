//! RMSNorm, optionally fused with the preceding residual addition.
//!
//! `y = x · rsqrt(mean(x²) + eps) · (offset + weight)` over the last axis (Zhang and Sennrich 2019), computed in
//! f32 and rounded once. The last axis is `hidden` for a layer norm and `head_dim` for a per-head norm.

use crate::{
    Backend, Dtype, Element, Operator, Result, View, ViewMut,
    operator::{TensorRef, TensorVisitor, dispatch},
    rows::check_rows,
    tensor::{check_computable, check_dtype, check_shape, with_computable},
};

/// The weight of a norm: `[hidden]` f32, f16 or bf16 of any stride, and an offset that is added to each element.
#[derive(Debug, Clone, Copy)]
pub struct NormWeight<'a> {
    weight: View<'a>,
    offset: f32,
}

impl<'a> NormWeight<'a> {
    /// The weight as it is stored (Llama, Qwen, Mistral).
    pub fn new(weight: View<'a>) -> Self {
        Self { weight, offset: 0.0 }
    }

    /// A weight stored minus one (Gemma): the norm multiplies by `1 + weight`, summed in f32.
    pub fn gemma(weight: View<'a>) -> Self {
        Self { weight, offset: 1.0 }
    }

    /// The weight as it is stored, `[hidden]`.
    pub fn weight(&self) -> View<'a> {
        self.weight
    }

    /// The offset that is added to each element.
    pub fn offset(&self) -> f32 {
        self.offset
    }

    /// The factor of each element, `offset + weight`, in f32.
    pub(crate) fn factors(&self) -> Vec<f32> {
        let (hidden, stride) = (self.weight.shape()[0], self.weight.strides()[0]);
        with_computable!(self.weight.dtype(), T => {
            let data = self.weight.as_slice::<T>().expect("dispatched on its dtype");
            (0..hidden).map(|i| self.offset + data[i * stride].to_f32()).collect()
        })
    }
}

impl<'a> From<View<'a>> for NormWeight<'a> {
    fn from(weight: View<'a>) -> Self {
        Self::new(weight)
    }
}

/// The arguments of a norm, optionally fused with the preceding residual addition.
///
/// `x`, `out`: `[rows, hidden]` or `[tokens, heads, head_dim]`, each f32, f16 or bf16 with stride 1 along the last axis; the
/// dtypes may differ. A row with NaN becomes NaN.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// The input; `None` if it is the content of `out`.
    pub x: Option<View<'a>>,
    /// The residual stream. The input is added to it, and the norm is that of the f32 sum, which the residual receives rounded
    /// to its dtype: that of `out` if the norm is in place, else f32. Its shape is that of `out`.
    pub residual: Option<ViewMut<'a>>,
    /// The factor of each element.
    pub weight: NormWeight<'a>,
    /// Added to the mean of the squares: 1e-6 or 1e-5 in published models.
    pub eps: f32,
    /// The norm.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for RmsNorm<'a> {
    fn name(&self) -> &'static str {
        match (&self.x, &self.residual) {
            (Some(_), None) => "norm.rmsnorm",
            (None, None) => "norm.rmsnorm_in_place",
            (None, Some(_)) => "norm.fused_add_rmsnorm",
            (Some(_), Some(_)) => "norm.add_rmsnorm",
        }
    }

    fn check(&self) -> Result<()> {
        let operator = self.name();
        let x = self.x.unwrap_or(self.out.as_view());
        check_norm(operator, &x, &self.weight, self.eps)?;
        if let Some(residual) = &self.residual {
            check_same_shape(operator, "residual", residual, &x)?;
            let expected = if self.x.is_none() { x.dtype() } else { Dtype::F32 };
            check_dtype(operator, "residual", residual.dtype(), expected)?;
        }
        if self.x.is_some() { check_same_shape(operator, "out", &self.out, &x) } else { Ok(()) }
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        let out = if self.x.is_some() { "out" } else { "x" };
        if let Some(x) = &mut self.x {
            visit("x", TensorRef::Input(x))?;
        }
        if let Some(residual) = &mut self.residual {
            visit("residual", TensorRef::Output(residual))?;
        }
        visit("weight", TensorRef::Input(&mut self.weight.weight))?;
        visit(out, TensorRef::Output(&mut self.out))
    }

    dispatch!(rmsnorm);
}

/// Writes the RMSNorm of each row of `x` to `out`, with shapes and dtypes as in [`RmsNorm`].
///
/// # Errors
/// When shapes or dtypes disagree, a last axis is not dense, or `eps` is negative or not finite.
pub fn rmsnorm<'a, B: Backend + ?Sized>(
    backend: &B,
    x: View<'a>,
    weight: impl Into<NormWeight<'a>>,
    eps: f32,
    out: ViewMut<'a>,
) -> Result<()> {
    RmsNorm { x: Some(x), residual: None, weight: weight.into(), eps, out }.run(backend)
}

/// In-place [`rmsnorm`], for example the per-head norm of queries and keys.
///
/// # Errors
/// As for [`rmsnorm`].
pub fn rmsnorm_in_place<'a, B: Backend + ?Sized>(
    backend: &B,
    x: ViewMut<'a>,
    weight: impl Into<NormWeight<'a>>,
    eps: f32,
) -> Result<()> {
    RmsNorm { x: None, residual: None, weight: weight.into(), eps, out: x }.run(backend)
}

/// Adds `x` to `residual`, of the same shape and dtype, and overwrites `x` with the RMSNorm of the sum.
///
/// A [`RmsNorm`] with `x`, `residual` and `out` keeps the residual stream in f32: it is never rounded to 16 bits, only the input
/// of the next GEMM is.
///
/// # Errors
/// As for [`rmsnorm`].
pub fn fused_add_rmsnorm<'a, B: Backend + ?Sized>(
    backend: &B,
    x: ViewMut<'a>,
    residual: ViewMut<'a>,
    weight: impl Into<NormWeight<'a>>,
    eps: f32,
) -> Result<()> {
    RmsNorm { x: None, residual: Some(residual), weight: weight.into(), eps, out: x }.run(backend)
}

fn check_norm(operator: &'static str, x: &View<'_>, weight: &NormWeight<'_>, eps: f32) -> Result<()> {
    let shape = x.shape();
    crate::ensure!(
        matches!(shape.len(), 2 | 3),
        operator,
        "x has shape {shape:?}, expected [rows, hidden] or [tokens, heads, head_dim]"
    );
    check_computable(operator, "x", x.dtype())?;
    check_computable(operator, "weight", weight.weight.dtype())?;
    check_rows(operator, "x", (shape, x.strides()))?;
    let layout = if shape.len() == 2 { "[hidden]" } else { "[head_dim]" };
    check_shape(operator, "weight", (weight.weight.shape(), &shape[shape.len() - 1..]), layout)?;
    crate::ensure!(eps.is_finite() && eps >= 0.0, operator, "eps = {eps} is not a finite number >= 0");
    Ok(())
}

/// Rejects a tensor that differs from `x` in shape, is cache-only in dtype, or has no dense last axis.
fn check_same_shape(operator: &'static str, argument: &str, other: &ViewMut<'_>, x: &View<'_>) -> Result<()> {
    let layout = if x.shape().len() == 2 { "[rows, hidden]" } else { "[tokens, heads, head_dim]" };
    check_shape(operator, argument, (other.shape(), x.shape()), layout)?;
    check_computable(operator, argument, other.dtype())?;
    check_rows(operator, argument, (other.shape(), other.strides()))
}
