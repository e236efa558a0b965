//! Products with weights by the kernels of `tilewright_kernels::gemm`.

use super::{Gpu, geometry::extent};
use crate::machine::Machine;
use tilewright::{Result, View, ViewMut};
use tilewright_kernels::gemm::{Matrix, Product};

const OPERATOR: &str = "gemm.linear";

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
    let matrix = |name, view: &View<'_>| -> Result<Matrix> {
        let stride = view.strides()[0] as u64;
        Ok(Matrix { dtype: view.dtype(), address: gpu.address(OPERATOR, name, view)?, stride })
    };
    let bias = bias.map(|bias| Ok((bias.dtype(), gpu.address(OPERATOR, "bias", &bias)?))).transpose()?;
    let product = Product {
        shape,
        x: matrix("x", &x)?,
        weight: matrix("weight", &weight)?,
        bias,
        out: matrix("out", &out.as_view())?,
        groups: None,
    };
    run(gpu, OPERATOR, &product)
}

/// Has the kernel that fits `product` compute it.
pub(super) fn run<M: Machine>(gpu: &Gpu<M>, operator: &'static str, product: &Product) -> Result<()> {
    let choice = product.choose(gpu.limits.multiprocessors);
    let (grid, args) = product.launch(choice);
    tilewright::ensure!(
        grid[1] <= 0xffff && grid[2] <= 0xffff,
        operator,
        "{} rows in {} segments are more than one launch has: 65535 tiles, and segments",
        product.shape[0],
        grid[2]
    );
    let kernel = gpu.kernel(operator, &choice.name(), |name| choice.kernel(name))?;
    gpu.machine.launch(&kernel, grid, &args)
}
