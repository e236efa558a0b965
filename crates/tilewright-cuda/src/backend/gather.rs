//! Row gather with the kernel of `tilewright_kernels::rows`.

use super::{Gpu, extent, extents, rows};
use crate::machine::Machine;
use tilewright::{Operator, Result, gather::RowGather};
use tilewright_kernels::rows::{self as kernels, CopyRowsParams};

pub(super) fn gather_rows<M: Machine>(gpu: &Gpu<M>, operator: RowGather<'_>) -> Result<()> {
    let (name, RowGather { table, ids, out }) = (operator.name(), &operator);
    let Some([count, _, width]) = extents(name, out.shape())? else { return Ok(()) };
    extent(name, "rows", table.shape()[0])?;
    let (from, _uploaded) = gpu.integers(name, "ids", *ids)?;
    let params = CopyRowsParams {
        dtypes: (table.dtype(), out.dtype()),
        shape: [count, width],
        table: rows(table),
        from,
        out: rows(&out.as_view()),
        to: 0,
    };
    let config = params.config();
    let kernel = gpu.kernel(name, &config.name(), |name| kernels::copy(name, config))?;
    let (grid, args) = params.launch();
    gpu.machine.launch(&kernel, grid, &args)
}
