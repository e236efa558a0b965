//! RMSNorm: rows of chunks by the kernel of `tilewright_kernels::norm`.

use super::{Gpu, geometry::extents};
use crate::machine::Machine;
use tilewright::{Result, View, ViewMut, norm::NormWeight};
use tilewright_kernels::{
    norm::{Call, norm},
    tile::Strided,
};

pub(super) fn rmsnorm<M: Machine>(
    gpu: &Gpu<M>,
    x: View<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "norm.rmsnorm";
    let at = [gpu.rows(OPERATOR, "x", &x)?, gpu.rows_mut(OPERATOR, "out", &out)?];
    run(gpu, (OPERATOR, &x), at, (weight, eps), false)
}

pub(super) fn rmsnorm_in_place<M: Machine>(
    gpu: &Gpu<M>,
    x: ViewMut<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
) -> Result<()> {
    const OPERATOR: &str = "norm.rmsnorm_in_place";
    let at = gpu.rows_mut(OPERATOR, "x", &x)?;
    run(gpu, (OPERATOR, &x.as_view()), [at; 2], (weight, eps), false)
}

pub(super) fn fused_add_rmsnorm<M: Machine>(
    gpu: &Gpu<M>,
    x: ViewMut<'_>,
    residual: ViewMut<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
) -> Result<()> {
    const OPERATOR: &str = "norm.fused_add_rmsnorm";
    let at = [gpu.rows_mut(OPERATOR, "x", &x)?, gpu.rows_mut(OPERATOR, "residual", &residual)?];
    run(gpu, (OPERATOR, &x.as_view()), at, (weight, eps), true)
}

fn run<M: Machine>(
    gpu: &Gpu<M>,
    (operator, x): (&'static str, &View<'_>),
    at: [Strided; 2],
    (weight, eps): (&NormWeight<'_>, f32),
    add: bool,
) -> Result<()> {
    let Some(shape) = extents(operator, x.shape())? else { return Ok(()) };
    let of_weight = weight.weight();
    let call = Call {
        dtypes: (x.dtype(), of_weight.dtype()),
        shape,
        x: at[0],
        y: at[1],
        weight: (gpu.address(operator, "weight", &of_weight)?, of_weight.strides()[0] as u64),
        eps,
        offset: weight.offset(),
        add,
    };
    let config = call.norm();
    let kernel = gpu.kernel(operator, &config.name(), |name| norm(name, config))?;
    let (grid, args) = call.launch();
    gpu.machine.launch(&kernel, grid, &args)
}
