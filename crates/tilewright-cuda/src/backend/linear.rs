//! Matrix products with the kernels of `tilewright_kernels::gemm`.

use super::{Gpu, geometry::extent};
use crate::machine::Machine;
use tilewright::{Error, Result, View, ViewMut, ensure, tensor::DeviceMemory};
use tilewright_kernels::gemm::{GemmParams, Groups, Matrix};

const OPERATOR: &str = "gemm.linear";
const SEGMENTS: &str = "gemm.segment_gemm";

/// A matrix whose rows are along `axis`.
fn matrix<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    name: &str,
    view: &View<'_>,
    axis: usize,
) -> Result<Matrix> {
    let stride = view.strides()[axis] as u64;
    Ok(Matrix { dtype: view.dtype(), address: gpu.address(operator, name, view)?, stride })
}

pub(super) fn linear<M: Machine>(
    gpu: &Gpu<M>,
    x: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    out: ViewMut<'_>,
) -> Result<()> {
    let shape = [
        extent(OPERATOR, "rows", x.shape()[0])?,
        extent(OPERATOR, "out_features", weight.shape()[0])?,
        extent(OPERATOR, "in_features", x.shape()[1])?,
    ];
    if shape[0] == 0 || shape[1] == 0 {
        return Ok(());
    }
    let bias = bias.map(|bias| Ok((bias.dtype(), gpu.address(OPERATOR, "bias", &bias)?))).transpose()?;
    let product = GemmParams {
        shape,
        x: matrix(gpu, OPERATOR, "x", &x, 0)?,
        weight: matrix(gpu, OPERATOR, "weight", &weight, 0)?,
        bias,
        out: matrix(gpu, OPERATOR, "out", &out.as_view(), 0)?,
        groups: None,
    };
    run(gpu, OPERATOR, &product)
}

/// Computes `product` with a library of the machine, or else with the best of our kernels.
pub(super) fn run<M: Machine>(gpu: &Gpu<M>, operator: &'static str, product: &GemmParams) -> Result<()> {
    if gpu.machine.multiply(product)? {
        return Ok(());
    }
    let choice = product.choose_kernel(gpu.limits.multiprocessors);
    let (grid, args) = product.launch(choice);
    ensure!(
        grid[1] <= 0xffff && grid[2] <= 0xffff,
        operator,
        "{} rows in {} segments are more than one launch has: 65535 tiles, and segments",
        product.shape[0],
        grid[2]
    );
    let kernel = gpu.kernel(operator, &choice.name(), |name| choice.kernel(name))?;
    gpu.machine.launch(&kernel, grid, &args)
}

impl<M: Machine> Gpu<M> {
    /// A product with one weight per segment of rows (LoRA, mixture of experts): `out = x · weights[ids[s]]ᵀ` for rows
    /// `indptr[s]..indptr[s + 1]`.
    ///
    /// `x`: `[rows, in_features]`, `weights`: `[num_weights, out_features, in_features]`, `out`: `[rows, out_features]`, each
    /// f32, f16 or bf16, with stride 1 along the last axis; `ids`: `[num_segments]`, by default the segment numbers.
    ///
    /// # Errors
    /// If a shape, dtype or stride is not as above, `indptr` is not ascending from 0 to rows, or an id is out of range.
    pub fn segment_gemm(
        &self,
        x: View<'_>,
        weights: View<'_>,
        (indptr, ids): (&[i32], Option<&[i32]>),
        out: ViewMut<'_>,
    ) -> Result<()> {
        let [rows, features, inputs, num_weights] = check_segments(&x, &weights, &out)?;
        let longest = check_indptr(indptr, rows)?;
        let segments = indptr.len() - 1;
        let count = ids.map_or(segments, <[i32]>::len);
        ensure!(
            count == segments && (ids.is_some() || segments <= num_weights),
            SEGMENTS,
            "{count} ids and {num_weights} weights for {segments} segments"
        );
        if longest == 0 || features == 0 {
            return Ok(());
        }
        for (at, &id) in ids.unwrap_or_default().iter().enumerate() {
            let is_there = usize::try_from(id).is_ok_and(|id| id < num_weights);
            ensure!(is_there, SEGMENTS, "ids[{at}] = {id} is not in 0..{num_weights}");
        }
        let indptr_at = self.upload(bytemuck::cast_slice(indptr))?;
        let ids = ids.map(|ids| self.upload(bytemuck::cast_slice(ids))).transpose()?;
        let size = |name, size| extent(SEGMENTS, name, size);
        let product = GemmParams {
            shape: [size("rows", rows)?, size("out_features", features)?, size("in_features", inputs)?],
            x: matrix(self, SEGMENTS, "x", &x, 0)?,
            weight: matrix(self, SEGMENTS, "weights", &weights, 1)?,
            bias: None,
            out: matrix(self, SEGMENTS, "out", &out.as_view(), 0)?,
            groups: Some(Groups {
                indptr: indptr_at.address(),
                ids: ids.as_ref().map_or(0, DeviceMemory::address),
                segments: size("segments", segments)?,
                longest,
                stride: weights.strides()[0] as u64,
            }),
        };
        run(self, SEGMENTS, &product) // the uploads are freed in stream order, after the launch
    }
}

/// Rows, features, inputs and number of weights of a segmented product.
fn check_segments(x: &View<'_>, weights: &View<'_>, out: &ViewMut<'_>) -> Result<[usize; 4]> {
    let (&[rows, inputs], &[num_weights, features, of_weights]) = (x.shape(), weights.shape()) else {
        let text = format!(
            "x has shape {:?} and weights {:?}, expected [rows, in_features] and [num_weights, out_features, in_features]",
            x.shape(),
            weights.shape()
        );
        return Err(Error::new(SEGMENTS, text));
    };
    ensure!(
        of_weights == inputs,
        SEGMENTS,
        "weights has shape {:?}, expected in_features = {inputs}",
        weights.shape()
    );
    ensure!(
        out.shape() == [rows, features],
        SEGMENTS,
        "out has shape {:?}, expected [rows, out_features] = [{rows}, {features}]",
        out.shape()
    );
    let views = [
        ("x", x.dtype(), x.strides()[1], inputs),
        ("weights", weights.dtype(), weights.strides()[2], inputs),
        ("out", out.dtype(), out.strides()[1], features),
    ];
    for (name, dtype, stride, extent) in views {
        ensure!(!dtype.is_cache_only(), SEGMENTS, "{name} is {dtype}, expected f32, f16 or bf16");
        ensure!(
            stride == 1 || extent <= 1,
            SEGMENTS,
            "{name} has stride {stride} along its last axis, expected 1"
        );
    }
    Ok([rows, features, inputs, num_weights])
}

/// The number of rows of the longest segment.
fn check_indptr(indptr: &[i32], rows: usize) -> Result<u32> {
    let ends = (indptr.first().copied(), indptr.last().map(|&end| usize::try_from(end)));
    ensure!(
        ends == (Some(0), Some(Ok(rows))),
        SEGMENTS,
        "indptr = {indptr:?} does not lead from 0 to rows = {rows}"
    );
    let mut longest = 0;
    for (segment, pair) in indptr.windows(2).enumerate() {
        ensure!(
            pair[0] <= pair[1],
            SEGMENTS,
            "segment {segment}: indptr falls from {} to {}",
            pair[0],
            pair[1]
        );
        longest = longest.max((pair[1] - pair[0]).cast_unsigned());
    }
    Ok(longest)
}
