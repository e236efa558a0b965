//! Row gather with the kernel of `tilewright_kernels::rows`.

use super::{
    Gpu,
    geometry::{extent, extents},
};
use crate::machine::Machine;
use tilewright::{Result, View, ViewMut, tensor::Indices};
use tilewright_kernels::rows::{self, CopyRowsParams};

const OPERATOR: &str = "gather.gather_rows";

pub(super) fn gather_rows<M: Machine>(
    gpu: &Gpu<M>,
    table: View<'_>,
    ids: Indices<'_>,
    out: ViewMut<'_>,
) -> Result<()> {
    let Some([count, _, width]) = extents(OPERATOR, out.shape())? else { return Ok(()) };
    extent(OPERATOR, "rows", table.shape()[0])?;
    let (from, _uploaded) = gpu.indices(OPERATOR, "ids", ids)?;
    let call = CopyRowsParams {
        dtypes: (table.dtype(), out.dtype()),
        shape: [count, width],
        table: gpu.rows(OPERATOR, "table", &table)?,
        from,
        out: gpu.rows_mut(OPERATOR, "out", &out)?,
        to: 0,
    };
    let config = call.config();
    let kernel = gpu.kernel(OPERATOR, &config.name(), |name| rows::copy(name, config))?;
    let (grid, args) = call.launch();
    gpu.machine.launch(&kernel, grid, &args)
}
