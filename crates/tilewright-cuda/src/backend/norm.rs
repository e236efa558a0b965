//! Norms with the kernel of `tilewright_kernels::norm`.

use super::{Gpu, address, extents, rows};
use crate::machine::Machine;
use tilewright::{
    Operator, Result, View,
    norm::{LayerNorm, RmsNorm},
};
use tilewright_kernels::norm::{NormParams, norm};

pub(super) fn rmsnorm<M: Machine>(gpu: &Gpu<M>, operator: RmsNorm<'_>) -> Result<()> {
    let (name, out) = (operator.name(), operator.out.as_view());
    let Some(shape) = extents(name, out.shape())? else { return Ok(()) };
    let (x, weight) = (operator.x.unwrap_or(out), operator.weight.weight());
    launch(
        gpu,
        name,
        NormParams {
            dtypes: (x.dtype(), weight.dtype()),
            shape,
            x: rows(&x),
            residual: operator
                .residual
                .as_ref()
                .map(|residual| (rows(&residual.as_view()), residual.dtype())),
            out: (rows(&out), out.dtype()),
            weight: vector(&weight),
            bias: None,
            scale: operator.scale.as_ref().map(address),
            eps: operator.eps,
            offset: operator.weight.offset(),
        },
    )
}

pub(super) fn layer_norm<M: Machine>(gpu: &Gpu<M>, operator: LayerNorm<'_>) -> Result<()> {
    let (name, x, out) = (operator.name(), operator.x, operator.out.as_view());
    let Some(shape) = extents(name, out.shape())? else { return Ok(()) };
    let (weight, bias) = (operator.weight.weight(), operator.bias);
    launch(
        gpu,
        name,
        NormParams {
            dtypes: (x.dtype(), weight.dtype()),
            shape,
            x: rows(&x),
            residual: None,
            out: (rows(&out), out.dtype()),
            weight: vector(&weight),
            bias: Some((vector(&bias), bias.dtype())),
            scale: operator.scale.as_ref().map(address),
            eps: operator.eps,
            offset: operator.weight.offset(),
        },
    )
}

/// Address and stride of a vector.
fn vector(view: &View<'_>) -> (u64, u64) {
    (address(view), view.strides()[0] as u64)
}

fn launch<M: Machine>(gpu: &Gpu<M>, name: &'static str, params: NormParams) -> Result<()> {
    let config = params.config();
    let kernel = gpu.kernel(name, &config.name(), |name| norm(name, config))?;
    let (grid, args) = params.launch();
    gpu.machine.launch(&kernel, grid, &args)
}
