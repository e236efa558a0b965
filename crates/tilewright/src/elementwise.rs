//! Elementwise operators: a function of each element in place, and residual addition without a norm.
//!
//! Both compute in f32 and round once. Norms, activations and rotary embeddings have their own operators.

use crate::{
    Backend, Dtype, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable, check_dtype,
    check_rows, check_shape, dispatch,
};

/// A function of one element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ElementFunction {
    /// `factor · x` (the multipliers of Gemma and Granite).
    Scale {
        /// A finite number.
        factor: f32,
    },
    /// `cap · tanh(x / cap)` (the logits of Gemma 2).
    SoftCap {
        /// A normal number above 0; 30 in Gemma 2.
        cap: f32,
    },
}

impl ElementFunction {
    fn check(self, operator: &'static str) -> Result<()> {
        match self {
            Self::Scale { factor } => {
                crate::ensure!(factor.is_finite(), operator, "factor = {factor} is not a finite number");
            }
            Self::SoftCap { cap } => {
                let valid = cap.is_normal() && cap > 0.0;
                crate::ensure!(valid, operator, "cap = {cap}, expected a normal number above 0");
            }
        }
        Ok(())
    }
}

/// The arguments of a function of each element, in place. NaN stays NaN.
#[derive(Debug)]
pub struct ElementwiseMap<'a> {
    /// The function.
    pub function: ElementFunction,
    /// `[rows, width]` f32, f16 or bf16 with stride 1 along the last axis.
    pub x: ViewMut<'a>,
}

/// The arguments of an addition to the residual: [`RmsNorm`](crate::norm::RmsNorm) with a residual, without the norm.
#[derive(Debug)]
pub struct ResidualSum<'a> {
    /// `[rows, width]` f32, f16 or bf16 with stride 1 along the last axis.
    pub x: View<'a>,
    /// The f32 residual, to which `x` is added; the shape of `x`.
    pub residual: ViewMut<'a>,
    /// The sum, rounded to f32, f16 or bf16; the shape of `x`.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for ElementwiseMap<'a> {
    fn name(&self) -> &'static str {
        "elementwise.map_in_place"
    }

    fn check(&self) -> Result<()> {
        check_matrix(self.name(), "x", &self.x.as_view())?;
        self.function.check(self.name())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Output(&mut self.x))
    }

    dispatch!(map_in_place);
}

impl<'a> Operator<'a> for ResidualSum<'a> {
    fn name(&self) -> &'static str {
        "elementwise.add"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { x, residual, out }) = (self.name(), self);
        check_matrix(operator, "x", x)?;
        for (argument, other) in [("residual", residual), ("out", out)] {
            check_shape(operator, argument, other.shape(), x.shape(), "[rows, width]")?;
            check_matrix(operator, argument, &other.as_view())?;
        }
        check_dtype(operator, "residual", residual.dtype(), Dtype::F32)
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        visit("residual", TensorRef::Output(&mut self.residual))?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(add);
}

/// Replaces each element of `x` by `function(x)`, with shapes and dtypes as in [`ElementwiseMap`].
///
/// # Errors
/// When the shape or dtype does not fit, the last axis is not dense, or a parameter of `function` is out of range.
pub fn map_in_place<B: Backend + ?Sized>(
    backend: &B,
    function: ElementFunction,
    x: ViewMut<'_>,
) -> Result<()> {
    ElementwiseMap { function, x }.run(backend)
}

/// Adds `x` to an f32 `residual` and writes the sum to `out`, for models that normalize only the outputs of blocks (OLMo 2), with
/// shapes and dtypes as in [`ResidualSum`].
///
/// # Errors
/// When shapes or dtypes disagree, or a last axis is not dense.
pub fn add<B: Backend + ?Sized>(
    backend: &B,
    x: View<'_>,
    residual: ViewMut<'_>,
    out: ViewMut<'_>,
) -> Result<()> {
    ResidualSum { x, residual, out }.run(backend)
}

fn check_matrix(operator: &'static str, argument: &str, x: &View<'_>) -> Result<()> {
    let shape = x.shape();
    crate::ensure!(shape.len() == 2, operator, "{argument} has shape {shape:?}, expected [rows, width]");
    check_computable(operator, argument, x.dtype())?;
    check_rows(operator, argument, (shape, x.strides()))
}
