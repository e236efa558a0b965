//! RMSNorm with the kernel of `tilewright_kernels::norm`.

use super::{Gpu, geometry::extents};
use crate::machine::Machine;
use tilewright::{Dtype, Result, View, ViewMut, norm::NormWeight};
use tilewright_kernels::{
    norm::{NormParams, norm},
    tile::Strided,
};

/// Rows of a tensor, and its dtype.
type Tensor = (Strided, Dtype);

pub(super) fn rmsnorm<M: Machine>(
    gpu: &Gpu<M>,
    x: View<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "norm.rmsnorm";
    let at = (gpu.rows(OPERATOR, "x", &x)?, None, (gpu.rows_mut(OPERATOR, "out", &out)?, out.dtype()));
    run(gpu, (OPERATOR, &x), at, (weight, eps))
}

pub(super) fn rmsnorm_in_place<M: Machine>(
    gpu: &Gpu<M>,
    x: ViewMut<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
) -> Result<()> {
    const OPERATOR: &str = "norm.rmsnorm_in_place";
    let at = gpu.rows_mut(OPERATOR, "x", &x)?;
    run(gpu, (OPERATOR, &x.as_view()), (at, None, (at, x.dtype())), (weight, eps))
}

pub(super) fn fused_add_rmsnorm<M: Machine>(
    gpu: &Gpu<M>,
    x: ViewMut<'_>,
    residual: ViewMut<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
) -> Result<()> {
    const OPERATOR: &str = "norm.fused_add_rmsnorm";
    let at = gpu.rows_mut(OPERATOR, "x", &x)?;
    let residual = (gpu.rows_mut(OPERATOR, "residual", &residual)?, residual.dtype());
    run(gpu, (OPERATOR, &x.as_view()), (at, Some(residual), (at, x.dtype())), (weight, eps))
}

pub(super) fn add_rmsnorm<M: Machine>(
    gpu: &Gpu<M>,
    x: View<'_>,
    residual: ViewMut<'_>,
    weight_and_eps: (&NormWeight<'_>, f32),
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "norm.add_rmsnorm";
    let residual = (gpu.rows_mut(OPERATOR, "residual", &residual)?, residual.dtype());
    let out = (gpu.rows_mut(OPERATOR, "out", &out)?, out.dtype());
    let at = (gpu.rows(OPERATOR, "x", &x)?, Some(residual), out);
    run(gpu, (OPERATOR, &x), at, weight_and_eps)
}

fn run<M: Machine>(
    gpu: &Gpu<M>,
    (operator, x): (&'static str, &View<'_>),
    (at, residual, out): (Strided, Option<Tensor>, Tensor),
    (weight, eps): (&NormWeight<'_>, f32),
) -> Result<()> {
    let Some(shape) = extents(operator, x.shape())? else { return Ok(()) };
    let of_weight = weight.weight();
    let call = NormParams {
        dtypes: (x.dtype(), of_weight.dtype()),
        shape,
        x: at,
        residual,
        out,
        weight: (gpu.address(operator, "weight", &of_weight)?, of_weight.strides()[0] as u64),
        eps,
        offset: weight.offset(),
    };
    let config = call.config();
    let kernel = gpu.kernel(operator, &config.name(), |name| norm(name, config))?;
    let (grid, args) = call.launch();
    gpu.machine.launch(&kernel, grid, &args)
}
