//! Head norms, RoPE and append with the kernel of `tilewright_kernels::rope::append`, or one after the other.

use super::{append::paged, append_slots::AppendSlots};
use crate::{
    backend::{Gpu, address, extent, rows},
    machine::Machine,
};
use tilewright::{
    Operator, Result,
    kv::rope_append::{HeadNorms, RopeAppend},
    rope::{RopeAngles, RopeStyle},
};
use tilewright_kernels::rope::append::{RopeAppendParams, rope_append as kernel};

pub(in crate::backend) fn rope_append<M: Machine>(gpu: &Gpu<M>, operator: RopeAppend<'_>) -> Result<()> {
    let name = operator.name();
    let [tokens, heads, dim] = [0, 1, 2].map(|axis| operator.k.shape()[axis]);
    if tokens == 0 {
        return Ok(());
    }
    let prepared = operator.plan.prepared().and_then(|prepared| prepared.downcast_ref::<AppendSlots>());
    let Some(slots) = prepared.filter(|_| is_fused(&operator)) else { return operator.run_apart(gpu) };
    gpu.use_slots(name, slots)?;
    let (angles, _uncached) = match operator.angles {
        RopeAngles::Computed(_) => return operator.run_apart(gpu),
        RopeAngles::Table(cache) => gpu.cos_sin(cache)?,
        RopeAngles::Tensor { table, .. } => (address(&table), None),
    };
    let (positions, _uploaded) = gpu.integers(name, "positions", operator.positions)?;
    let (q, k) = (operator.q.as_view(), operator.k.as_view());
    let [k_strides, v_strides] = operator.cache_strides();
    let params = RopeAppendParams {
        dtypes: (q.dtype(), operator.q_out.dtype()),
        dim: extent(name, "head_dim", dim)?,
        tokens: extent(name, "tokens", tokens)?,
        from: [q, k, operator.v].map(|tensor| rows(&tensor)),
        q_out: rows(&operator.q_out.as_view()),
        k_cache: paged(&operator.cache.k.as_view(), k_strides),
        v_cache: paged(&operator.cache.v.as_view(), v_strides),
        slots: slots.mapping(tokens as u32),
        positions,
        angles,
        heads: [extent(name, "qo_heads", operator.q.shape()[1])?, extent(name, "kv_heads", heads)?],
        norms: operator
            .norms
            .map(|HeadNorms { weights, .. }| (weights.map(|weight| address(&weight)), weights[0].dtype())),
        eps: operator.norms.map_or(0.0, |norms| norms.eps),
    };
    let Some(config) = params.config() else { return operator.run_apart(gpu) };
    let kernel = gpu.kernel(name, &config.name(), |name| kernel(name, config))?;
    let (grid, args) = params.launch(config);
    gpu.machine.launch(&kernel, grid, &args)
}

/// Whether the kernel computes this operator, apart from sizes and alignment.
fn is_fused(operator: &RopeAppend<'_>) -> bool {
    let RopeAppend { q, k, v, q_out, k_out, cache, angles, .. } = operator;
    let dim = k.shape()[2];
    let results = [q_out.dtype(), k_out.dtype(), cache.k.dtype(), cache.v.dtype()];
    let norms = operator.norms.is_none_or(|HeadNorms { weights: [of_q, of_k], .. }| {
        of_q.dtype() == of_k.dtype()
            && [of_q, of_k].iter().all(|of| of.shape() == [dim] && of.strides() == [1])
    });
    norms
        && angles.style() == RopeStyle::Neox
        && angles.rotary_dim() == dim
        && v.shape()[2] == dim
        && [k.dtype(), v.dtype()] == [q.dtype(); 2]
        && results.iter().all(|dtype| *dtype == results[0])
}
