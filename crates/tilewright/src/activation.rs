//! Gated activations: `out = act(x[.., ..d]) · x[.., d..]`, as in a SwiGLU feed-forward layer.
//!
//! `x` is `[rows, 2·d]`, gate first, the output of one fused gate/up projection; `out` is `[rows, d]`.
//! Activation and product are computed in f32 and rounded once.

use crate::{
    Backend, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable, check_rows,
    check_shape, dispatch,
};

/// The function that is applied to the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + e^-x)` (SiLU or swish; Llama, Qwen, Mistral).
    Silu,
    /// `x · Φ(x)` with the normal CDF `Φ(x) = erfc(-x/√2) / 2` (Hendrycks and Gimpel 2016).
    Gelu,
    /// `x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))`, the same paper's approximation (Gemma).
    GeluTanh,
}

/// The arguments of a gated activation. NaN stays NaN; a gate of -inf gives NaN, as the formulas do.
#[derive(Debug)]
pub struct GatedActivation<'a> {
    /// The function of the gate.
    pub activation: Activation,
    /// `[rows, 2·d]` f32, f16 or bf16 with stride 1 along the last axis.
    pub x: View<'a>,
    /// `[rows, d]`, as `x`; the dtypes may differ.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for GatedActivation<'a> {
    fn name(&self) -> &'static str {
        match self.activation {
            Activation::Silu => "activation.silu_and_mul",
            Activation::Gelu => "activation.gelu_and_mul",
            Activation::GeluTanh => "activation.gelu_tanh_and_mul",
        }
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { x, out, .. }) = (self.name(), self);
        let &[rows, width] = x.shape() else {
            let text = format!("x has shape {:?}, expected [rows, 2*d]", x.shape());
            return Err(crate::Error::new(operator, text));
        };
        crate::ensure!(width % 2 == 0, operator, "x has shape {:?}, expected an even 2*d", x.shape());
        check_computable(operator, "x", x.dtype())?;
        check_rows(operator, "x", (x.shape(), x.strides()))?;
        check_shape(operator, "out", out.shape(), &[rows, width / 2], "[rows, d]")?;
        check_computable(operator, "out", out.dtype())?;
        check_rows(operator, "out", (out.shape(), out.strides()))
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(act_and_mul);
}

/// `out = act(x[.., ..d]) · x[.., d..]` with the given activation, with shapes and dtypes as in [`GatedActivation`].
///
/// # Errors
/// When shapes or dtypes disagree, the width of `x` is odd or a last axis is not dense.
pub fn act_and_mul<B: Backend + ?Sized>(
    backend: &B,
    activation: Activation,
    x: View<'_>,
    out: ViewMut<'_>,
) -> Result<()> {
    GatedActivation { activation, x, out }.run(backend)
}

/// [`act_and_mul`] with [`Activation::Silu`].
///
/// # Errors
/// As for [`act_and_mul`].
pub fn silu_and_mul<B: Backend + ?Sized>(backend: &B, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
    act_and_mul(backend, Activation::Silu, x, out)
}

/// [`act_and_mul`] with [`Activation::Gelu`].
///
/// # Errors
/// As for [`act_and_mul`].
pub fn gelu_and_mul<B: Backend + ?Sized>(backend: &B, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
    act_and_mul(backend, Activation::Gelu, x, out)
}

/// [`act_and_mul`] with [`Activation::GeluTanh`].
///
/// # Errors
/// As for [`act_and_mul`].
pub fn gelu_tanh_and_mul<B: Backend + ?Sized>(backend: &B, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
    act_and_mul(backend, Activation::GeluTanh, x, out)
}
