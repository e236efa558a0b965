//! Gated activations with the kernel of `tilewright_kernels::activation`.

use super::{Gpu, extents, rows};
use crate::machine::Machine;
use tilewright::{Operator, Result, activation::GatedActivation};
use tilewright_kernels::activation::{ActivationParams, MAX_D, act_and_mul as kernel};

pub(super) fn act_and_mul<M: Machine>(gpu: &Gpu<M>, operator: GatedActivation<'_>) -> Result<()> {
    let (name, GatedActivation { activation, x, out }) = (operator.name(), &operator);
    let Some([tokens, _, d]) = extents(name, out.shape())? else { return Ok(()) };
    tilewright::ensure!(d <= MAX_D, name, "d = {d}, the most of one launch is {MAX_D}");
    let params = ActivationParams {
        activation: *activation,
        dtypes: (x.dtype(), out.dtype()),
        shape: [tokens, d],
        x: rows(x),
        out: rows(&out.as_view()),
    };
    let config = params.config();
    let function = gpu.kernel(name, &config.name(), |name| kernel(name, config))?;
    let (grid, args) = params.launch();
    gpu.machine.launch(&function, grid, &args)
}
