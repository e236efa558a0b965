//! Linear layer: matrix multiplication with row-major `[out_features, in_features]` weights.

use crate::{
    Backend, Dtype, Result, View, ViewMut,
    tensor::{check_computable, check_shape},
};

/// `out = x · weightᵀ + bias`, accumulated in f32.
///
/// `x`: `[rows, in_features]`; `weight`: `[out_features, in_features]`, contiguous; `bias`: `[out_features]`, contiguous; each f32,
/// f16 or bf16; `out`: `[rows, out_features]`, f32 or the dtype of `x`, rounded once. A row of `out` has the same bits for any
/// other rows in the batch. A backend that guarantees this only for a fixed number of rows documents it.
///
/// # Errors
/// When a shape, dtype or stride is not as above.
pub fn linear<B: Backend>(
    backend: &B,
    x: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    mut out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "gemm.linear";
    let &[rows, in_features] = x.shape() else {
        let text = format!("x has shape {:?}, expected [rows, in_features]", x.shape());
        return Err(crate::Error::new(OPERATOR, text));
    };
    let out_features = weight.shape().first().copied().unwrap_or(0);
    let axes = "[out_features, in_features]";
    check_shape(OPERATOR, "weight", (weight.shape(), &[out_features, in_features]), axes)?;
    check_shape(OPERATOR, "out", (out.shape(), &[rows, out_features]), "[rows, out_features]")?;
    check_computable(OPERATOR, "x", x.dtype())?;
    let either = if x.dtype() == Dtype::F32 { "f32".to_owned() } else { format!("{} or f32", x.dtype()) };
    crate::ensure!(
        out.dtype() == Dtype::F32 || out.dtype() == x.dtype(),
        OPERATOR,
        "out is {}, expected {either}",
        out.dtype()
    );
    for (name, strides, extent) in [("x", x.strides(), in_features), ("out", out.strides(), out_features)] {
        crate::ensure!(
            strides[1] == 1 || extent == 1,
            OPERATOR,
            "{name} has strides {strides:?}: the last axis must have stride 1"
        );
    }
    let mut dense = vec![("weight", weight)];
    if let Some(bias) = bias {
        check_shape(OPERATOR, "bias", (bias.shape(), &[out_features]), "[out_features]")?;
        dense.push(("bias", bias));
    }
    for (name, view) in dense {
        let strides = view.strides();
        check_computable(OPERATOR, name, view.dtype())?;
        crate::ensure!(
            view.is_contiguous(),
            OPERATOR,
            "{name} has strides {strides:?}, expected a contiguous tensor"
        );
    }
    backend.linear(x, weight, bias, out.reborrow())
}
