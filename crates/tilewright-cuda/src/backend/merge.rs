//! Merge of attention states with the kernels of `tilewright_kernels::attention::kernel::merge`.

use super::{Gpu, geometry::extents};
use crate::machine::Machine;
use tilewright::{Dtype, Error, Result, View, ViewMut};
use tilewright_kernels::attention::kernel::merge::{MergeInputs, MergeParams, StateTensor, merge};

pub(super) fn merge_states<M: Machine>(
    gpu: &Gpu<M>,
    (o, lse): (View<'_>, View<'_>),
    (out, out_lse): (ViewMut<'_>, ViewMut<'_>),
) -> Result<()> {
    const OPERATOR: &str = "attention.merge_states";
    let stride = |view: &View<'_>, axis: usize| view.strides()[axis] as u64;
    let first = StateTensor {
        v: gpu.address(OPERATOR, "o", &o)?,
        v_strides: [0, 2, 3].map(|axis| stride(&o, axis)),
        lse: gpu.address(OPERATOR, "lse", &lse)?,
        lse_strides: [0, 2].map(|axis| stride(&lse, axis)),
    };
    let strides = [stride(&o, 1), stride(&lse, 1)];
    let states = MergeInputs::Strided {
        first,
        count: super::geometry::extent(OPERATOR, "num_states", o.shape()[1])?,
        strides,
    };
    run(gpu, (OPERATOR, o.dtype()), states, (&out, &out_lse))
}

pub(super) fn merge_state<M: Machine>(
    gpu: &Gpu<M>,
    (o, lse): (ViewMut<'_>, ViewMut<'_>),
    (other, other_lse): (View<'_>, View<'_>),
) -> Result<()> {
    const OPERATOR: &str = "attention.merge_state";
    let ours = state(gpu, OPERATOR, ["o", "lse"], [&o.as_view(), &lse.as_view()])?;
    let theirs = state(gpu, OPERATOR, ["other", "other_lse"], [&other, &other_lse])?;
    run(gpu, (OPERATOR, o.dtype()), MergeInputs::Pair([ours, theirs]), (&o, &lse))
}

fn state<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    names: [&str; 2],
    [o, lse]: [&View<'_>; 2],
) -> Result<StateTensor> {
    let stride = |view: &View<'_>, axis: usize| view.strides()[axis] as u64;
    Ok(StateTensor {
        v: gpu.address(operator, names[0], o)?,
        v_strides: [0, 1, 2].map(|axis| stride(o, axis)),
        lse: gpu.address(operator, names[1], lse)?,
        lse_strides: [0, 1].map(|axis| stride(lse, axis)),
    })
}

fn run<M: Machine>(
    gpu: &Gpu<M>,
    (operator, dtype): (&'static str, Dtype),
    states: MergeInputs,
    (out, out_lse): (&ViewMut<'_>, &ViewMut<'_>),
) -> Result<()> {
    let Some(shape) = extents(operator, out.shape())? else { return Ok(()) };
    let out = state(gpu, operator, ["out", "out_lse"], [&out.as_view(), &out_lse.as_view()])?;
    let call = MergeParams { dtype, shape, states, out };
    let Some(config) = call.config() else {
        let text = format!(
            "head_dim = {}, the most is 4096 chunks of 16 bytes, or elements if not aligned",
            shape[2]
        );
        return Err(Error::new(operator, text));
    };
    let kernel = gpu.kernel(operator, &config.name(), |name| merge(name, config))?;
    let (grid, args) = call.launch(config);
    gpu.machine.launch(&kernel, grid, &args)
}
