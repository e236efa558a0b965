//! Linear layer: matrix multiplication with row-major `[out_features, in_features]` weights.

mod import;
mod packed;

pub use packed::{
    GROUP, GatedLinear, PANEL_FEATURES, PackedLinear, PackedMatrix, PackedProduct, PackedWeight,
    WeightFormat, pack,
};
pub(crate) use packed::{INT4_INPUTS, TILE_FEATURES, TILE_PANELS, TileMut};

use crate::{
    Backend, Dtype, Error, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable,
    check_rows, check_shape, dispatch, operator::shape_name,
};

/// The arguments of a linear layer, `out = x · weightᵀ + bias`, accumulated in f32.
#[derive(Debug)]
pub struct LinearLayer<'a> {
    /// `[rows, in_features]` f32, f16 or bf16, with stride 1 along the last axis.
    pub x: View<'a>,
    /// `[out_features, in_features]` f32, f16 or bf16, contiguous.
    pub weight: View<'a>,
    /// `[out_features]`, as `weight`.
    pub bias: Option<View<'a>>,
    /// `[rows, out_features]` f32 or the dtype of `x`, rounded once, with stride 1 along the last axis.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for LinearLayer<'a> {
    fn name(&self) -> &'static str {
        "gemm.linear"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { x, weight, bias, out }) = (self.name(), self);
        let &[rows, in_features] = x.shape() else {
            let text = format!("x has shape {:?}, expected [rows, in_features]", x.shape());
            return Err(Error::new(operator, text));
        };
        let out_features = weight.shape().first().copied().unwrap_or(0);
        let axes = "[out_features, in_features]";
        check_shape(operator, "weight", weight.shape(), &[out_features, in_features], axes)?;
        check_shape(operator, "out", out.shape(), &[rows, out_features], "[rows, out_features]")?;
        check_computable(operator, "x", x.dtype())?;
        check_out_dtype(operator, x.dtype(), out.dtype())?;
        check_rows(operator, "x", (x.shape(), x.strides()))?;
        check_rows(operator, "out", (out.shape(), out.strides()))?;
        if let Some(bias) = bias {
            check_shape(operator, "bias", bias.shape(), &[out_features], "[out_features]")?;
        }
        for (name, view) in [("weight", Some(weight)), ("bias", bias.as_ref())] {
            if let Some(view) = view {
                check_operand(operator, name, view)?;
            }
        }
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        visit("weight", TensorRef::Input(&mut self.weight))?;
        if let Some(bias) = &mut self.bias {
            visit("bias", TensorRef::Input(bias))?;
        }
        visit("out", TensorRef::Output(&mut self.out))
    }

    fn profile_name(&self) -> String {
        shape_name(self.name(), self.weight.shape())
    }

    dispatch!(linear);
}

/// Rejects a result with neither the dtype of `x` nor f32.
fn check_out_dtype(operator: &'static str, x: Dtype, out: Dtype) -> Result<()> {
    let either = if x == Dtype::F32 { "f32".to_owned() } else { format!("{x} or f32") };
    crate::ensure!(out == Dtype::F32 || out == x, operator, "out is {out}, expected {either}");
    Ok(())
}

/// Rejects a weight or bias that is not contiguous, or has 8 bits.
fn check_operand(operator: &'static str, name: &str, view: &View<'_>) -> Result<()> {
    let strides = view.strides();
    check_computable(operator, name, view.dtype())?;
    crate::ensure!(
        view.is_contiguous(),
        operator,
        "{name} has strides {strides:?}, expected a contiguous tensor"
    );
    Ok(())
}

/// `out = x · weightᵀ + bias`, with shapes and dtypes as in [`LinearLayer`].
///
/// A row of `out` has the same bits for any other rows in the batch. A backend that guarantees this only for a fixed number of
/// rows documents it.
///
/// # Errors
/// When a shape, dtype or stride does not fit.
pub fn linear<B: Backend + ?Sized>(
    backend: &B,
    x: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    out: ViewMut<'_>,
) -> Result<()> {
    LinearLayer { x, weight, bias, out }.run(backend)
}

/// The arguments of a product with one weight per segment of rows (LoRA, mixture of experts):
/// `out = x · weights[ids[s]]ᵀ` for rows `indptr[s]..indptr[s + 1]`.
#[derive(Debug)]
pub struct SegmentGemm<'a> {
    /// `[rows, in_features]` f32, f16 or bf16, with stride 1 along the last axis.
    pub x: View<'a>,
    /// `[num_weights, out_features, in_features]`, as `x`.
    pub weights: View<'a>,
    /// `[num_segments + 1]`, ascending from 0 to `rows`.
    pub indptr: &'a [i32],
    /// `[num_segments]`: the weight of each segment; by default the segment numbers.
    pub ids: Option<&'a [i32]>,
    /// `[rows, out_features]`, as `x`.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for SegmentGemm<'a> {
    fn name(&self) -> &'static str {
        "gemm.segment_gemm"
    }

    fn check(&self) -> Result<()> {
        let (operator, num_weights) = (self.name(), self.check_tensors()?);
        self.check_indptr()?;
        let segments = self.indptr.len() - 1;
        let count = self.ids.map_or(segments, <[i32]>::len);
        crate::ensure!(
            count == segments && (self.ids.is_some() || segments <= num_weights),
            operator,
            "{count} ids and {num_weights} weights for {segments} segments"
        );
        for (at, &id) in self.ids.unwrap_or_default().iter().enumerate() {
            let exists = usize::try_from(id).is_ok_and(|id| id < num_weights);
            crate::ensure!(exists, operator, "ids[{at}] = {id} is not in 0..{num_weights}");
        }
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        visit("weights", TensorRef::Input(&mut self.weights))?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(segment_gemm);
}

impl SegmentGemm<'_> {
    /// Checks the tensors and returns the number of weights.
    fn check_tensors(&self) -> Result<usize> {
        let (operator, Self { x, weights, out, .. }) = (self.name(), self);
        let (&[rows, inputs], &[num_weights, features, of_weights]) = (x.shape(), weights.shape()) else {
            let text = format!(
                "x has shape {:?} and weights {:?}, expected [rows, in_features] and [num_weights, out_features, in_features]",
                x.shape(),
                weights.shape()
            );
            return Err(Error::new(operator, text));
        };
        crate::ensure!(
            of_weights == inputs,
            operator,
            "weights has shape {:?}, expected in_features = {inputs}",
            weights.shape()
        );
        check_shape(operator, "out", out.shape(), &[rows, features], "[rows, out_features]")?;
        let geometries = [
            ("x", x.dtype(), x.shape(), x.strides()),
            ("weights", weights.dtype(), weights.shape(), weights.strides()),
            ("out", out.dtype(), out.shape(), out.strides()),
        ];
        for (name, dtype, shape, strides) in geometries {
            check_computable(operator, name, dtype)?;
            check_rows(operator, name, (shape, strides))?;
        }
        Ok(num_weights)
    }

    fn check_indptr(&self) -> Result<()> {
        let (operator, indptr, rows) = (self.name(), self.indptr, self.x.shape()[0]);
        let ends = (indptr.first().copied(), indptr.last().map(|&end| usize::try_from(end)));
        crate::ensure!(
            ends == (Some(0), Some(Ok(rows))),
            operator,
            "indptr = {indptr:?} does not lead from 0 to rows = {rows}"
        );
        for (segment, pair) in indptr.windows(2).enumerate() {
            crate::ensure!(
                pair[0] <= pair[1],
                operator,
                "segment {segment}: indptr falls from {} to {}",
                pair[0],
                pair[1]
            );
        }
        Ok(())
    }
}
