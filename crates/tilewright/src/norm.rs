//! RMSNorm, optionally fused with the preceding residual addition, and layer norm.
//!
//! RMSNorm: `y = x · rsqrt(mean(x²) + eps) · (offset + weight)` over the last axis (Zhang and Sennrich 2019). Layer norm:
//! `y = (x - mean(x)) · rsqrt(var(x) + eps) · (offset + weight) + bias` (Ba et al. 2016), with the biased variance. Both are computed
//! in f32 and rounded once. A result of 8 bits is `y / scale`, saturated.
//! The last axis is `hidden` for a norm of rows and `head_dim` for a per-head norm.

use crate::{
    Backend, Dtype, Element, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable,
    check_dtype, check_rows, check_shape, dispatch, with_computable,
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
        widened(self.weight).into_iter().map(|weight| self.offset + weight).collect()
    }
}

/// The elements of a checked vector of any stride.
pub(crate) fn widened(vector: View<'_>) -> Vec<f32> {
    let (len, stride) = (vector.shape()[0], vector.strides()[0]);
    with_computable!(vector.dtype(), T => {
        let data = vector.as_slice::<T>().expect("dispatched on its dtype");
        (0..len).map(|i| data[i * stride].to_f32()).collect()
    })
}

impl<'a> From<View<'a>> for NormWeight<'a> {
    fn from(weight: View<'a>) -> Self {
        Self::new(weight)
    }
}

/// The arguments of a norm, optionally fused with the preceding residual addition.
///
/// `x`, `out`: `[rows, hidden]` or `[tokens, heads, head_dim]`, each f32, f16 or bf16 with stride 1 along the last axis; the
/// dtypes may differ. With a scale `out` has 8 bits. A row with NaN becomes NaN.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// The input; `None` if it is the content of `out`.
    pub x: Option<View<'a>>,
    /// The residual stream. The input is added to it, and the norm is that of the f32 sum, which the residual receives rounded
    /// to its dtype: that of the input, or f32 if the norm is not in place. Its shape is that of `out`.
    pub residual: Option<ViewMut<'a>>,
    /// The factor of each element.
    pub weight: NormWeight<'a>,
    /// Added to the mean of the squares: 1e-6 or 1e-5 in published models.
    pub eps: f32,
    /// `[1]` f32, above 0: the norm is divided by it before it is rounded to the 8 bits of `out`; `None` for other dtypes.
    pub scale: Option<View<'a>>,
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
            check_computable(operator, "residual", residual.dtype())?;
            if self.x.is_none() || residual.dtype() != Dtype::F32 {
                check_dtype(operator, "residual", residual.dtype(), x.dtype())?;
            }
        }
        if self.x.is_some() {
            check_same_shape(operator, "out", &self.out, &x)?;
        }
        check_scale(operator, self.scale.as_ref(), self.out.dtype())
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
        if let Some(scale) = &mut self.scale {
            visit("scale", TensorRef::Input(scale))?;
        }
        visit(out, TensorRef::Output(&mut self.out))
    }

    dispatch!(rmsnorm);
}

/// The arguments of a layer norm. Shapes and dtypes are those of [`RmsNorm`].
#[derive(Debug)]
pub struct LayerNorm<'a> {
    /// The input.
    pub x: View<'a>,
    /// The factor of each element.
    pub weight: NormWeight<'a>,
    /// The summand of each element, shaped as the weight.
    pub bias: View<'a>,
    /// Added to the variance.
    pub eps: f32,
    /// As in [`RmsNorm`].
    pub scale: Option<View<'a>>,
    /// The norm.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for LayerNorm<'a> {
    fn name(&self) -> &'static str {
        "norm.layer_norm"
    }

    fn check(&self) -> Result<()> {
        let operator = self.name();
        check_norm(operator, &self.x, &self.weight, self.eps)?;
        check_vector(operator, "bias", &self.bias, &self.x)?;
        check_same_shape(operator, "out", &self.out, &self.x)?;
        check_scale(operator, self.scale.as_ref(), self.out.dtype())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        visit("weight", TensorRef::Input(&mut self.weight.weight))?;
        visit("bias", TensorRef::Input(&mut self.bias))?;
        if let Some(scale) = &mut self.scale {
            visit("scale", TensorRef::Input(scale))?;
        }
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(layer_norm);
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
    RmsNorm { x: Some(x), residual: None, weight: weight.into(), eps, scale: None, out }.run(backend)
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
    RmsNorm { x: None, residual: None, weight: weight.into(), eps, scale: None, out: x }.run(backend)
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
    RmsNorm { x: None, residual: Some(residual), weight: weight.into(), eps, scale: None, out: x }
        .run(backend)
}

pub(crate) fn check_norm(
    operator: &'static str,
    x: &View<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
) -> Result<()> {
    let shape = x.shape();
    crate::ensure!(
        matches!(shape.len(), 2 | 3),
        operator,
        "x has shape {shape:?}, expected [rows, hidden] or [tokens, heads, head_dim]"
    );
    check_computable(operator, "x", x.dtype())?;
    check_rows(operator, "x", (shape, x.strides()))?;
    check_vector(operator, "weight", &weight.weight, x)?;
    crate::ensure!(eps.is_finite() && eps >= 0.0, operator, "eps = {eps} is not a finite number >= 0");
    Ok(())
}

/// Rejects a vector that does not have one element per element of a row of `x`.
fn check_vector(operator: &'static str, argument: &str, vector: &View<'_>, x: &View<'_>) -> Result<()> {
    let shape = x.shape();
    let layout = if shape.len() == 2 { "[hidden]" } else { "[head_dim]" };
    check_computable(operator, argument, vector.dtype())?;
    check_shape(operator, argument, vector.shape(), &shape[shape.len() - 1..], layout)
}

/// Rejects a tensor that differs from `x` in shape, or has no dense last axis.
fn check_same_shape(operator: &'static str, argument: &str, other: &ViewMut<'_>, x: &View<'_>) -> Result<()> {
    let layout = if x.shape().len() == 2 { "[rows, hidden]" } else { "[tokens, heads, head_dim]" };
    check_shape(operator, argument, other.shape(), x.shape(), layout)?;
    check_rows(operator, argument, (other.shape(), other.strides()))
}

/// Rejects a scale that is not one f32, and an 8-bit result without one.
fn check_scale(operator: &'static str, scale: Option<&View<'_>>, out: Dtype) -> Result<()> {
    let Some(scale) = scale else { return check_computable(operator, "out", out) };
    check_dtype(operator, "scale", scale.dtype(), Dtype::F32)?;
    crate::ensure!(scale.shape() == [1], operator, "scale has shape {:?}, expected [1]", scale.shape());
    crate::ensure!(out.size() == 1, operator, "out is {out}, with a scale it must have 8 bits");
    Ok(())
}
