//! RMSNorm, optionally fused with the preceding residual addition.
//!
//! `y = x · rsqrt(mean(x²) + eps) · (offset + weight)` over the last axis (Zhang and Sennrich 2019), computed in
//! f32 and rounded once. The last axis is `hidden` for a layer norm and `head_dim` for a per-head norm.

use crate::{
    Backend, Dtype, Element, Result, View, ViewMut,
    rows::check_rows,
    tensor::{check_computable, check_dtype, check_shape},
    with_dtype,
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
        with_dtype!(self.weight.dtype(), T => {
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

/// Writes the RMSNorm of each row of `x` to `out`.
///
/// `x`: `[rows, hidden]` or `[tokens, heads, head_dim]`; `out`: the same shape; each f32, f16 or bf16 with stride 1 along the
/// last axis; the dtypes may differ. `eps` is added to the mean of the squares (1e-6 or 1e-5 in published models). A row with
/// NaN becomes NaN.
///
/// # Errors
/// When shapes or dtypes disagree, a last axis is not dense, or `eps` is negative or not finite.
pub fn rmsnorm<'a, B: Backend + ?Sized>(
    backend: &B,
    x: View<'_>,
    weight: impl Into<NormWeight<'a>>,
    eps: f32,
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "norm.rmsnorm";
    let weight = weight.into();
    check_norm(OPERATOR, &x, &weight, eps)?;
    check_same_shape(OPERATOR, "out", &out, &x)?;
    backend.rmsnorm(x, &weight, eps, out)
}

/// In-place [`rmsnorm`], for example the per-head norm of queries and keys.
///
/// # Errors
/// As for [`rmsnorm`].
pub fn rmsnorm_in_place<'a, B: Backend + ?Sized>(
    backend: &B,
    x: ViewMut<'_>,
    weight: impl Into<NormWeight<'a>>,
    eps: f32,
) -> Result<()> {
    let weight = weight.into();
    check_norm("norm.rmsnorm_in_place", &x.as_view(), &weight, eps)?;
    backend.rmsnorm_in_place(x, &weight, eps)
}

/// Adds `x` to `residual` and overwrites `x` with the RMSNorm of the sum.
///
/// The f32 sum is used for the variance and the output; `residual` receives it rounded to its dtype. Shapes and dtypes as
/// for [`rmsnorm`]; `residual` has the shape and dtype of `x`. [`add_rmsnorm`] keeps the residual in f32.
///
/// # Errors
/// As for [`rmsnorm`].
pub fn fused_add_rmsnorm<'a, B: Backend + ?Sized>(
    backend: &B,
    x: ViewMut<'_>,
    residual: ViewMut<'_>,
    weight: impl Into<NormWeight<'a>>,
    eps: f32,
) -> Result<()> {
    const OPERATOR: &str = "norm.fused_add_rmsnorm";
    let weight = weight.into();
    check_norm(OPERATOR, &x.as_view(), &weight, eps)?;
    check_same_shape(OPERATOR, "residual", &residual, &x.as_view())?;
    check_dtype(OPERATOR, "residual", residual.dtype(), x.dtype())?;
    backend.fused_add_rmsnorm(x, residual, &weight, eps)
}

/// Adds `x` to an f32 `residual` and writes the RMSNorm of the sum to `out`. The residual stream is never rounded to 16 bits;
/// only the input of the next GEMM is.
///
/// `x`, `out`: shapes and dtypes as for [`rmsnorm`]; `residual`: like `x`, but f32.
///
/// # Errors
/// As for [`rmsnorm`], and when `residual` is not f32.
pub fn add_rmsnorm<'a, B: Backend + ?Sized>(
    backend: &B,
    x: View<'_>,
    residual: ViewMut<'_>,
    (weight, eps): (impl Into<NormWeight<'a>>, f32),
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "norm.add_rmsnorm";
    let weight = weight.into();
    check_norm(OPERATOR, &x, &weight, eps)?;
    check_same_shape(OPERATOR, "residual", &residual, &x)?;
    check_dtype(OPERATOR, "residual", residual.dtype(), Dtype::F32)?;
    check_same_shape(OPERATOR, "out", &out, &x)?;
    backend.add_rmsnorm(x, residual, (&weight, eps), out)
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
