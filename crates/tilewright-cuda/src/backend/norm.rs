//! RMSNorm with the kernel of `tilewright_kernels::norm`.

use super::{
    Gpu,
    geometry::{address, extents, rows},
};
use crate::machine::Machine;
use tilewright::{Operator, Result, norm::RmsNorm};
use tilewright_kernels::norm::{NormParams, norm};

pub(super) fn rmsnorm<M: Machine>(gpu: &Gpu<M>, operator: RmsNorm<'_>) -> Result<()> {
    let (name, out) = (operator.name(), operator.out.as_view());
    let Some(shape) = extents(name, out.shape())? else { return Ok(()) };
    let (x, weight) = (operator.x.unwrap_or(out), operator.weight.weight());
    let params = NormParams {
        dtypes: (x.dtype(), weight.dtype()),
        shape,
        x: rows(&x),
        residual: operator.residual.as_ref().map(|residual| (rows(&residual.as_view()), residual.dtype())),
        out: (rows(&out), out.dtype()),
        weight: (address(&weight), weight.strides()[0] as u64),
        eps: operator.eps,
        offset: operator.weight.offset(),
    };
    let config = params.config();
    let kernel = gpu.kernel(name, &config.name(), |name| norm(name, config))?;
    let (grid, args) = params.launch();
    gpu.machine.launch(&kernel, grid, &args)
}
