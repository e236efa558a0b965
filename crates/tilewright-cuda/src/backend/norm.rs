//! RMSNorm: rows of vectors by the kernels of `tilewright_kernels::norm`.

use super::Gpu;
use crate::machine::Machine;
use half::{bf16, f16};
use tilewright::{Dtype, Error, Result, View, ViewMut, norm::NormWeight};
use tilewright_kernels::{
    norm::{self, Norm},
    tile::Packed,
};
use tilewright_ptx::sim::Arg;

pub(super) fn rmsnorm<M: Machine>(
    gpu: &Gpu<M>,
    x: View<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
    out: ViewMut<'_>,
) -> Result<()> {
    match x.dtype() {
        Dtype::Bf16 => typed::<bf16, M>(gpu, x, weight, eps, out),
        Dtype::F16 => typed::<f16, M>(gpu, x, weight, eps, out),
        other => Err(Error::new("norm.rmsnorm", format!("x is {other}, which is not built yet"))),
    }
}

fn typed<T: Packed, M: Machine>(
    gpu: &Gpu<M>,
    x: View<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "norm.rmsnorm";
    let (rows, hidden) = (x.shape()[0] as u32, x.shape()[1] as u32);
    if rows == 0 {
        return Ok(());
    }
    let config = Norm { hidden, weight_plus_one: weight.offset() != 0.0 };
    let name =
        format!("rmsnorm_{}_{hidden}{}", x.dtype(), if config.weight_plus_one { "_plus_one" } else { "" });
    let kernel = gpu.kernel(OPERATOR, &name, |name| norm::rmsnorm::<T>(name, config))?;
    let args = [
        Arg::U64(gpu.address(OPERATOR, "x", &x)?),
        Arg::U64(gpu.address(OPERATOR, "weight", &weight.weight())?),
        Arg::U64(gpu.address_mut(OPERATOR, "out", &out)?),
        Arg::U32(rows),
        Arg::U64(x.strides()[0] as u64),
        Arg::U64(out.strides()[0] as u64),
        Arg::F32(eps),
    ];
    gpu.machine.launch(&kernel, [config.ctas::<T>(rows), 1, 1], &args)
}
