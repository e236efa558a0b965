//! Gated activations with the kernel of `tilewright_kernels::activation`.

use super::{Gpu, geometry::extents};
use crate::machine::Machine;
use tilewright::{Result, View, ViewMut, activation::Activation};
use tilewright_kernels::activation::{ActivationParams, MAX_D, act_and_mul as kernel};

pub(super) fn act_and_mul<M: Machine>(
    gpu: &Gpu<M>,
    activation: Activation,
    x: View<'_>,
    out: ViewMut<'_>,
) -> Result<()> {
    const OPERATOR: &str = "activation.act_and_mul";
    let Some([tokens, _, d]) = extents(OPERATOR, out.shape())? else { return Ok(()) };
    tilewright::ensure!(d <= MAX_D, OPERATOR, "d = {d}, the most of one launch is {MAX_D}");
    let call = ActivationParams {
        activation,
        dtypes: (x.dtype(), out.dtype()),
        shape: [tokens, d],
        x: gpu.rows(OPERATOR, "x", &x)?,
        out: gpu.rows_mut(OPERATOR, "out", &out)?,
    };
    let config = call.config();
    let function = gpu.kernel(OPERATOR, &config.name(), |name| kernel(name, config))?;
    let (grid, args) = call.launch();
    gpu.machine.launch(&function, grid, &args)
}
