//! Rotary embedding by the kernel of `tilewright_kernels::rope`: from a table, or by angles computed there.

use super::{Gpu, geometry::extent};
use crate::machine::Machine;
use tilewright::{
    Result, ViewMut,
    rope::{CosSinCache, Rope, RopeStyle},
    tensor::Indices,
};
use tilewright_kernels::rope::{self as kernels, Angles, Call};

pub(super) fn rope<M: Machine>(
    gpu: &Gpu<M>,
    heads: [ViewMut<'_>; 2],
    positions: Indices<'_>,
    rope: &Rope,
) -> Result<()> {
    let turns = rope.frequencies().into_iter().map(kernels::turns).collect();
    let table = gpu.turns(turns)?;
    let angles = (Angles::Turns, table.address(), rope.rotary_dim(), rope.style());
    run(gpu, "rope.apply", heads, positions, angles)
}

pub(super) fn rope_with_cos_sin_cache<M: Machine>(
    gpu: &Gpu<M>,
    heads: [ViewMut<'_>; 2],
    positions: Indices<'_>,
    cache: &CosSinCache,
) -> Result<()> {
    if positions.is_empty() {
        return Ok(());
    }
    let table = gpu.cos_sin(cache)?;
    let angles = (Angles::Table, table.address(), cache.rotary_dim(), cache.style());
    run(gpu, "rope.apply_with_cos_sin_cache", heads, positions, angles)
}

fn run<M: Machine>(
    gpu: &Gpu<M>,
    operator: &'static str,
    heads: [ViewMut<'_>; 2],
    positions: Indices<'_>,
    angles: (Angles, u64, usize, RopeStyle),
) -> Result<()> {
    if positions.is_empty() {
        return Ok(());
    }
    let (positions_at, _held) = gpu.indices(operator, "positions", positions)?;
    let [q, k] = &heads;
    let at = [gpu.rows_mut(operator, "q", q)?, gpu.rows_mut(operator, "k", k)?];
    let counts = [extent(operator, "qo_heads", q.shape()[1])?, extent(operator, "kv_heads", k.shape()[1])?];
    let dims = [extent(operator, "head_dim", q.shape()[2])?, extent(operator, "rotary_dim", angles.2)?];
    let call = |dtype, heads, at| Call {
        dtype,
        style: angles.3,
        angles: angles.0,
        angles_at: angles.1,
        positions: positions_at,
        tokens: positions.len() as u32,
        heads,
        dims,
        from: at,
        to: at,
    };
    let launch = |call: Call| {
        if call.heads == [0, 0] {
            return Ok(());
        }
        let config = call.rope();
        let kernel = gpu.kernel(operator, &config.name(), |name| kernels::rope(name, config))?;
        let (grid, args) = call.launch();
        gpu.machine.launch(&kernel, grid, &args)
    };
    if q.dtype() == k.dtype() {
        return launch(call(q.dtype(), counts, at));
    }
    launch(call(q.dtype(), [counts[0], 0], [at[0]; 2]))?;
    launch(call(k.dtype(), [0, counts[1]], [at[1]; 2]))
}
