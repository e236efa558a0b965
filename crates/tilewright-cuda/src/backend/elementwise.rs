//! Elementwise operators with the kernels of `tilewright_kernels::elementwise`.

use super::{Gpu, extents, rows};
use crate::machine::Machine;
use tilewright::{
    Operator, Result,
    elementwise::{ElementwiseMap, ResidualSum},
};
use tilewright_kernels::elementwise::{self, AddParams, MAX_WIDTH, MapParams};

pub(super) fn map_in_place<M: Machine>(gpu: &Gpu<M>, operator: ElementwiseMap<'_>) -> Result<()> {
    let (name, ElementwiseMap { function, x }) = (operator.name(), &operator);
    let Some([num_rows, _, width]) = extents(name, x.shape())? else { return Ok(()) };
    check_width(name, width)?;
    let params =
        MapParams { function: *function, dtype: x.dtype(), shape: [num_rows, width], x: rows(&x.as_view()) };
    let config = params.config();
    let kernel = gpu.kernel(name, &config.name(), |name| elementwise::map(name, config))?;
    let (grid, args) = params.launch();
    gpu.machine.launch(&kernel, grid, &args)
}

pub(super) fn add<M: Machine>(gpu: &Gpu<M>, operator: ResidualSum<'_>) -> Result<()> {
    let (name, ResidualSum { x, residual, out }) = (operator.name(), &operator);
    let Some([num_rows, _, width]) = extents(name, out.shape())? else { return Ok(()) };
    check_width(name, width)?;
    let params = AddParams {
        dtypes: (x.dtype(), out.dtype()),
        shape: [num_rows, width],
        x: rows(x),
        residual: rows(&residual.as_view()),
        out: rows(&out.as_view()),
    };
    let config = params.config();
    let kernel = gpu.kernel(name, &config.name(), |name| elementwise::add(name, config))?;
    let (grid, args) = params.launch();
    gpu.machine.launch(&kernel, grid, &args)
}

fn check_width(operator: &'static str, width: u32) -> Result<()> {
    tilewright::ensure!(
        width <= MAX_WIDTH,
        operator,
        "width = {width}, the most of one launch is {MAX_WIDTH}"
    );
    Ok(())
}
