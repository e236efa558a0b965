//! Merge of attention states with the kernels of `tilewright_kernels::attention::kernel::merge`.

use crate::{
    backend::{Gpu, address, extent, extents},
    machine::Machine,
};
use tilewright::{Error, Operator, Result, View, attention::StateMerge};
use tilewright_kernels::attention::kernel::merge::{MergeInputs, MergeParams, StateTensor, merge};

pub(in crate::backend) fn merge_states<M: Machine>(gpu: &Gpu<M>, operator: StateMerge<'_>) -> Result<()> {
    let StateMerge { o, lse, out, out_lse, in_place, mask } = &operator;
    let name = operator.name();
    let Some(shape) = extents(name, out.shape())? else { return Ok(()) };
    let out = state(&out.as_view(), &out_lse.as_view(), [0, 1, 2]);
    let pair = || [out, state(o, lse, [0, 1, 2])];
    let states = match mask {
        Some(mask) => {
            let mask_stride = mask.strides()[0] as u64;
            MergeInputs::MaskedPair { states: pair(), mask: address(mask), mask_stride }
        }
        None if *in_place => MergeInputs::Pair(pair()),
        None => {
            let count = extent(name, "num_states", o.shape()[1])?;
            let strides = [o, lse].map(|view| view.strides()[1] as u64);
            MergeInputs::Strided { first: state(o, lse, [0, 2, 3]), count, strides }
        }
    };
    let params = MergeParams { dtype: o.dtype(), shape, states, out };
    let Some(config) = params.config() else {
        let text = format!(
            "head_dim = {}, the most is 4096 chunks of 16 bytes, or elements if not aligned",
            shape[2]
        );
        return Err(Error::new(name, text));
    };
    let kernel = gpu.kernel(name, &config.name(), |name| merge(name, config))?;
    let (grid, args) = params.launch(config);
    gpu.machine.launch(&kernel, grid, &args)
}

/// A state whose rows, heads and elements are along `axes`.
fn state(o: &View<'_>, lse: &View<'_>, axes: [usize; 3]) -> StateTensor {
    let stride = |view: &View<'_>, axis: usize| view.strides()[axis] as u64;
    StateTensor {
        v: address(o),
        v_strides: axes.map(|axis| stride(o, axis)),
        lse: address(lse),
        lse_strides: [axes[0], axes[1]].map(|axis| stride(lse, axis)),
    }
}
