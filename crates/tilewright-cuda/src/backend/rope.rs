//! Rotary embedding with the kernel of `tilewright_kernels::rope`, with angles from a table or computed.

use super::{Gpu, address, extent, rows};
use crate::machine::Machine;
use tilewright::{
    Operator, Result, View,
    rope::{RopeAngles, RopeRotation},
};
use tilewright_kernels::rope::{self as kernels, Angles, RopeParams};

pub(super) fn rope<M: Machine>(gpu: &Gpu<M>, operator: RopeRotation<'_>) -> Result<()> {
    let (name, angles) = (operator.name(), operator.angles);
    if operator.positions.is_empty() {
        return Ok(());
    }
    let (format, (table, _uncached)) = match angles {
        RopeAngles::Computed(rope) => {
            let turns: Vec<u64> = rope.frequencies().into_iter().map(kernels::turns).collect();
            (Angles::Turns, gpu.constants(bytemuck::cast_slice(&turns))?)
        }
        RopeAngles::Table(cache) => (Angles::Table, gpu.cos_sin(cache)?),
        RopeAngles::Tensor { table, .. } => (Angles::Table, (address(&table), None)),
    };
    let (positions, _uploaded) = gpu.integers(name, "positions", operator.positions)?;
    let to = [operator.q.as_view(), operator.k.as_view()];
    let from = operator.from.unwrap_or(to);
    let counts = [extent(name, "qo_heads", to[0].shape()[1])?, extent(name, "kv_heads", to[1].shape()[1])?];
    let rest = operator.rest.as_ref().map(|rest| {
        [rest.from[0], rest.from[1], rest.q.as_view(), rest.k.as_view()].map(|tensor| rows(&tensor))
    });
    let rest_dim = operator.rest.as_ref().map_or(0, |rest| rest.from[0].shape()[2]);
    let dims = [
        extent(name, "head_dim", to[0].shape()[2] + rest_dim)?,
        extent(name, "rotary_dim", angles.rotary_dim())?,
    ];
    let launch = |heads, [q, k]: [usize; 2]| {
        if heads == [0, 0] {
            return Ok(());
        }
        let params = RopeParams {
            dtypes: (from[q].dtype(), to[q].dtype()),
            style: angles.style(),
            angles: format,
            angles_address: table,
            positions,
            tokens: operator.positions.len() as u32,
            heads,
            dims,
            from: [rows(&from[q]), rows(&from[k])],
            to: [rows(&to[q]), rows(&to[k])],
            rest: rest.map(|rest| [q, k, 2 + q, 2 + k].map(|tensor| rest[tensor])),
            factors: operator.scales.map(|scales| [q, k].map(|tensor| 1.0 / scales[tensor])),
        };
        let config = params.config();
        let kernel = gpu.kernel(name, &config.name(), |name| kernels::rope(name, config))?;
        let (grid, args) = params.launch();
        gpu.machine.launch(&kernel, grid, &args)
    };
    let dtypes = |views: [View<'_>; 2]| views.map(|view| view.dtype());
    if [dtypes(from), dtypes(to)].iter().all(|[q, k]| q == k) {
        return launch(counts, [0, 1]);
    }
    launch([counts[0], 0], [0, 0])?;
    launch([0, counts[1]], [1, 1])
}
