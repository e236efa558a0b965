//! Matrix products with the kernels of `tilewright_kernels::gemm`.

use super::{Gpu, address, extent};
use crate::machine::Machine;
use tilewright::{
    DeviceMemory, Operator, Result, View, ensure,
    gemm::{LinearLayer, SegmentGemm},
};
use tilewright_kernels::gemm::{GemmParams, Groups, Matrix};

/// A matrix whose rows are along `axis`.
fn matrix(view: &View<'_>, axis: usize) -> Matrix {
    Matrix { dtype: view.dtype(), address: address(view), stride: view.strides()[axis] as u64 }
}

pub(super) fn linear<M: Machine>(gpu: &Gpu<M>, operator: LinearLayer<'_>) -> Result<()> {
    let (name, LinearLayer { x, weight, bias, out }) = (operator.name(), &operator);
    let shape = [
        extent(name, "rows", x.shape()[0])?,
        extent(name, "out_features", weight.shape()[0])?,
        extent(name, "in_features", x.shape()[1])?,
    ];
    if shape[0] == 0 || shape[1] == 0 {
        return Ok(());
    }
    let product = GemmParams {
        shape,
        x: matrix(x, 0),
        weight: matrix(weight, 0),
        bias: bias.map(|bias| (bias.dtype(), address(&bias))),
        out: matrix(&out.as_view(), 0),
        groups: None,
    };
    run(gpu, name, &product)
}

/// Computes `product` with a library of the machine, or else with the best of our kernels.
pub(super) fn run<M: Machine>(gpu: &Gpu<M>, operator: &'static str, product: &GemmParams) -> Result<()> {
    if gpu.machine.multiply(product)? {
        return Ok(());
    }
    let choice = product.choose_kernel(gpu.limits.arch, gpu.limits.multiprocessors);
    let (grid, args) = product.launch(choice, gpu.limits.multiprocessors);
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

pub(super) fn segment_gemm<M: Machine>(gpu: &Gpu<M>, operator: SegmentGemm<'_>) -> Result<()> {
    let (name, SegmentGemm { x, weights, indptr, ids, out }) = (operator.name(), &operator);
    let shape = [
        extent(name, "rows", x.shape()[0])?,
        extent(name, "out_features", weights.shape()[1])?,
        extent(name, "in_features", x.shape()[1])?,
    ];
    let segments = extent(name, "segments", indptr.len() - 1)?;
    let longest = indptr.windows(2).map(|pair| pair[1].abs_diff(pair[0])).max().unwrap_or(0);
    if longest == 0 || shape[1] == 0 {
        return Ok(());
    }
    let indptr = gpu.upload(bytemuck::cast_slice(indptr))?;
    let ids = ids.map(|ids| gpu.upload(bytemuck::cast_slice(ids))).transpose()?;
    let product = GemmParams {
        shape,
        x: matrix(x, 0),
        weight: matrix(weights, 1),
        bias: None,
        out: matrix(&out.as_view(), 0),
        groups: Some(Groups {
            indptr: indptr.address(),
            ids: ids.as_ref().map_or(0, DeviceMemory::address),
            segments,
            longest,
            stride: weights.strides()[0] as u64,
        }),
    };
    run(gpu, name, &product) // the uploads are freed in stream order, after the launch
}
