//! RMSNorm, alone or with the residual addition before it.
//!
//! `y = x · rsqrt(mean(x²) + eps) · (offset + weight)` over the last axis (Zhang and Sennrich 2019), computed in
//! f32 and rounded once. The last axis is `hidden` for a layer's norm and `head_dim` for a norm per head.

use crate::{
    Backend, Dtype, Element, Result, View, ViewMut,
    rows::check_rows,
    tensor::{check_computable, check_dtype, check_shape},
    with_dtype,
};

/// The weight of a norm: `[hidden]` f32, f16 or bf16, of any stride, and what is added to each of its elements.
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

    /// A weight that is stored less one (Gemma): the norm multiplies by `1 + weight`, summed in f32.
    pub fn gemma(weight: View<'a>) -> Self {
        Self { weight, offset: 1.0 }
    }

    /// The weight as it is stored, `[hidden]`.
    pub fn weight(&self) -> View<'a> {
        self.weight
    }

    /// What is added to each of its elements.
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

/// RMSNorm of every row of `x` into `out`.
///
/// `x`: `[rows, hidden]` or `[tokens, heads, head_dim]`; `out`: the same shape; each f32, f16 or bf16, of one dtype or two, and both
/// with stride 1 along the last axis. `eps` is added to the mean of the squares (1e-6 or 1e-5 in published models). A row with NaN
/// becomes NaN.
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
    check_like(OPERATOR, "out", &out, &x)?;
    backend.rmsnorm(x, &weight, eps, out)
}

/// [`rmsnorm`] that overwrites `x`, as for the queries and keys of a norm per head.
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

/// Adds `x` to `residual` and overwrites `x` by the RMSNorm of the sum.
///
/// The sum stays in f32 for the variance and for the output; `residual` receives it rounded to its dtype. Shapes
/// and dtypes as for [`rmsnorm`], `residual` like `x`, and of the same dtype. [`add_rmsnorm`] keeps the sums exact to f32.
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
    check_like(OPERATOR, "residual", &residual, &x.as_view())?;
    check_dtype(OPERATOR, "residual", residual.dtype(), x.dtype())?;
    backend.fused_add_rmsnorm(x, residual, &weight, eps)
}

/// Adds `x` to a `residual` in f32, and writes the RMSNorm of the sum to `out`: the sums that layers add up are never rounded to 16
/// bits, only what the next product reads is.
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
    check_like(OPERATOR, "residual", &residual, &x)?;
    check_dtype(OPERATOR, "residual", residual.dtype(), Dtype::F32)?;
    check_like(OPERATOR, "out", &out, &x)?;
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

/// Refuses what has not the shape of `x`, or nothing that can be computed with.
fn check_like(operator: &'static str, argument: &str, other: &ViewMut<'_>, x: &View<'_>) -> Result<()> {
    let layout = if x.shape().len() == 2 { "[rows, hidden]" } else { "[tokens, heads, head_dim]" };
    check_shape(operator, argument, (other.shape(), x.shape()), layout)?;
    check_computable(operator, argument, other.dtype())?;
    check_rows(operator, argument, (other.shape(), other.strides()))
}
