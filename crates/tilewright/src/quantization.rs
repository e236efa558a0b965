//! Quantization of rows to 8-bit floats with one scale per group of adjacent elements.
//!
//! ```text
//! scale = max(max |x|, eps) / largest number of the dtype     per group; optionally rounded up to a power of two
//! out = x / scale                                             rounded to nearest even, saturated
//! ```
//!
//! All operations are single IEEE operations in f32, so all backends give the same bits. These are the operands of products with scales
//! per 1 x 128 block (DeepSeek-V3).

use crate::{
    Backend, Dtype, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable, check_dtype,
    check_rows, check_shape, dispatch,
};

/// The supported group sizes: powers of two, whose groups are reduced within a warp.
pub const GROUP_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

/// The arguments of [`quantize_groups`].
///
/// A group with NaN has the scale NaN, and all its elements become NaN. With infinity the scale is infinity: finite elements become 0,
/// infinite ones NaN.
#[derive(Debug)]
pub struct GroupQuantization<'a> {
    /// `[rows, width]` f32, f16 or bf16 with stride 1 along the last axis; `width` is a multiple of the group size.
    pub x: View<'a>,
    /// One of [`GROUP_SIZES`].
    pub group_size: usize,
    /// Lower bound of the maximum of a group, a normal number above 0: groups of zeros have a scale above 0.
    pub eps: f32,
    /// Whether scales are rounded up to powers of two, which are at least 2^-126 (UE8M0 has no other values).
    pub power_of_two: bool,
    /// `[out_rows, width]` e4m3 or e5m2 with stride 1 along the last axis; `out_rows` is at least `rows`. Further rows are those of zeros,
    /// because products may require a multiple of some rows.
    pub out: ViewMut<'a>,
    /// f32 `[out_rows, width / group_size]` with any strides.
    pub scales: ViewMut<'a>,
}

impl<'a> Operator<'a> for GroupQuantization<'a> {
    fn name(&self) -> &'static str {
        "quantization.quantize_groups"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { x, group_size, eps, out, scales, .. }) = (self.name(), self);
        let &[rows, width] = x.shape() else {
            let text = format!("x has shape {:?}, expected [rows, width]", x.shape());
            return Err(crate::Error::new(operator, text));
        };
        check_computable(operator, "x", x.dtype())?;
        check_rows(operator, "x", (x.shape(), x.strides()))?;
        crate::ensure!(
            GROUP_SIZES.contains(group_size),
            operator,
            "group_size = {group_size}, expected one of {GROUP_SIZES:?}"
        );
        crate::ensure!(
            width.is_multiple_of(*group_size),
            operator,
            "x has shape {:?}, expected rows of groups of {group_size}",
            x.shape()
        );
        crate::ensure!(
            eps.is_normal() && *eps > 0.0,
            operator,
            "eps = {eps}, expected a normal number above 0"
        );
        let out_rows = out.shape().first().copied().unwrap_or(0).max(rows);
        check_shape(operator, "out", out.shape(), &[out_rows, width], "[rows or more, width]")?;
        crate::ensure!(
            matches!(out.dtype(), Dtype::E4m3 | Dtype::E5m2),
            operator,
            "out is {}, expected e4m3 or e5m2",
            out.dtype()
        );
        check_rows(operator, "out", (out.shape(), out.strides()))?;
        check_dtype(operator, "scales", scales.dtype(), Dtype::F32)?;
        let groups = [out_rows, width / group_size];
        check_shape(operator, "scales", scales.shape(), &groups, "[rows of out, groups]")
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("x", TensorRef::Input(&mut self.x))?;
        visit("out", TensorRef::Output(&mut self.out))?;
        visit("scales", TensorRef::Output(&mut self.scales))
    }

    dispatch!(quantize_groups);
}

/// Quantizes `group_size` adjacent elements of a row to `out` with a scale of their own, with shapes and dtypes as in
/// [`GroupQuantization`], `eps` 1e-10 and any scales.
///
/// # Errors
/// When shapes or dtypes disagree, the group size is not in [`GROUP_SIZES`] or does not divide rows, or a last axis is not dense.
pub fn quantize_groups<B: Backend + ?Sized>(
    backend: &B,
    x: View<'_>,
    group_size: usize,
    out: ViewMut<'_>,
    scales: ViewMut<'_>,
) -> Result<()> {
    GroupQuantization { x, group_size, eps: 1e-10, power_of_two: false, out, scales }.run(backend)
}
