//! Rotary embedding with the kernel of `tilewright_kernels::rope`, with angles from a table or computed.

use super::{Gpu, geometry::extent};
use crate::machine::Machine;
use tilewright::{
    Dtype, Result, View, ViewMut,
    rope::{CosSinCache, Rope, RopeStyle},
    tensor::Indices,
};
use tilewright_kernels::{
    rope::{self as kernels, Angles, RopeParams},
    tile::Strided,
};

/// q or k: source and destination.
struct RotaryTensor {
    heads: usize,
    dim: usize,
    dtypes: (Dtype, Dtype),
    from: Strided,
    to: Strided,
}

const NAMES: [&str; 2] = ["q", "k"];

pub(super) fn rope<M: Machine>(
    gpu: &Gpu<M>,
    heads: [ViewMut<'_>; 2],
    positions: Indices<'_>,
    rope: &Rope,
) -> Result<()> {
    const OPERATOR: &str = "rope.apply";
    let turns: Vec<u64> = rope.frequencies().into_iter().map(kernels::turns).collect();
    let table = gpu.turns(&turns)?;
    let angles = (Angles::Turns, table.address(), rope.rotary_dim(), rope.style());
    run(gpu, OPERATOR, in_place(gpu, OPERATOR, &heads)?, positions, angles)
}

pub(super) fn rope_with_cos_sin_cache<M: Machine>(
    gpu: &Gpu<M>,
    heads: [ViewMut<'_>; 2],
    positions: Indices<'_>,
    cache: &CosSinCache,
) -> Result<()> {
    const OPERATOR: &str = "rope.apply_with_cos_sin_cache";
    if positions.is_empty() {
        return Ok(());
    }
    let table = gpu.cos_sin(cache)?;
    let angles = (Angles::Table, table.address(), cache.rotary_dim(), cache.style());
    run(gpu, OPERATOR, in_place(gpu, OPERATOR, &heads)?, positions, angles)
}

pub(super) fn rotate_with_cos_sin_cache<M: Machine>(
    gpu: &Gpu<M>,
    from: [View<'_>; 2],
    to: [ViewMut<'_>; 2],
    positions: Indices<'_>,
    cache: &CosSinCache,
) -> Result<()> {
    const OPERATOR: &str = "rope.rotate_with_cos_sin_cache";
    if positions.is_empty() {
        return Ok(());
    }
    let table = gpu.cos_sin(cache)?;
    let angles = (Angles::Table, table.address(), cache.rotary_dim(), cache.style());
    let tensor = |i: usize| -> Result<RotaryTensor> {
        let from_at = gpu.rows(OPERATOR, NAMES[i], &from[i])?;
        let to_at = gpu.rows_mut(OPERATOR, ["q_out", "k_out"][i], &to[i])?;
        Ok(RotaryTensor { to: to_at, ..tensor(&to[i], (from[i].dtype(), to[i].dtype()), from_at) })
    };
    run(gpu, OPERATOR, [tensor(0)?, tensor(1)?], positions, angles)
}

fn in_place<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    heads: &[ViewMut<'_>; 2],
) -> Result<[RotaryTensor; 2]> {
    let tensor = |i: usize| -> Result<RotaryTensor> {
        let (view, dtype) = (&heads[i], heads[i].dtype());
        Ok(tensor(view, (dtype, dtype), gpu.rows_mut(operator, NAMES[i], view)?))
    };
    Ok([tensor(0)?, tensor(1)?])
}

/// A tensor with the shape of `to`, rotated in place.
fn tensor(to: &ViewMut<'_>, dtypes: (Dtype, Dtype), at: Strided) -> RotaryTensor {
    RotaryTensor { heads: to.shape()[1], dim: to.shape()[2], dtypes, from: at, to: at }
}

fn run<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    [q, k]: [RotaryTensor; 2],
    positions: Indices<'_>,
    angles: (Angles, u64, usize, RopeStyle),
) -> Result<()> {
    if positions.is_empty() {
        return Ok(());
    }
    let (positions_at, _uploaded) = gpu.indices(operator, "positions", positions)?;
    let counts = [extent(operator, "qo_heads", q.heads)?, extent(operator, "kv_heads", k.heads)?];
    let dims = [extent(operator, "head_dim", q.dim)?, extent(operator, "rotary_dim", angles.2)?];
    let launch = |heads, [q, k]: [&RotaryTensor; 2]| {
        if heads == [0, 0] {
            return Ok(());
        }
        let call = RopeParams {
            dtypes: q.dtypes,
            style: angles.3,
            angles: angles.0,
            angles_address: angles.1,
            positions: positions_at,
            tokens: positions.len() as u32,
            heads,
            dims,
            from: [q.from, k.from],
            to: [q.to, k.to],
        };
        let config = call.config();
        let kernel = gpu.kernel(operator, &config.name(), |name| kernels::rope(name, config))?;
        let (grid, args) = call.launch();
        gpu.machine.launch(&kernel, grid, &args)
    };
    if q.dtypes == k.dtypes {
        return launch(counts, [&q, &k]);
    }
    launch([counts[0], 0], [&q; 2])?;
    launch([0, counts[1]], [&k; 2])
}
