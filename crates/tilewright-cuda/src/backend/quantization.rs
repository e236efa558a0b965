//! Quantization with a scale per group by the kernel of `tilewright_kernels::quantization`.

use super::{Gpu, address, extents, rows};
use crate::machine::Machine;
use tilewright::{Operator, Result, quantization::GroupQuantization};
use tilewright_kernels::{
    quantization::{GroupQuantizationParams, quantize_groups as kernel_of},
    tile::Strided,
};

pub(super) fn quantize_groups<M: Machine>(gpu: &Gpu<M>, operator: GroupQuantization<'_>) -> Result<()> {
    let name = operator.name();
    let GroupQuantization { x, group_size, eps, power_of_two, out, scales } = &operator;
    let (out, scales) = (out.as_view(), scales.as_view());
    let Some([out_rows, _, width]) = extents(name, out.shape())? else { return Ok(()) };
    // the scales have as many elements as there are groups
    tilewright::ensure!(
        scales.shape().iter().product::<usize>() < 1 << 31,
        name,
        "scales has shape {:?}, the most of one launch is 2^31 - 1 groups",
        scales.shape()
    );
    let strides = [0, 1].map(|axis| scales.strides()[axis] as u64);
    let params = GroupQuantizationParams {
        dtypes: (x.dtype(), out.dtype()),
        group_size: *group_size as u32,
        power_of_two: *power_of_two,
        shape: [out_rows, width],
        x: rows(x),
        out: rows(&out),
        scales: Strided { address: address(&scales), strides },
        rows: x.shape()[0] as u32,
        eps: *eps,
    };
    let config = params.config();
    let kernel = gpu.kernel(name, &config.name(), |name| kernel_of(name, config))?;
    let (grid, args) = params.launch();
    gpu.machine.launch(&kernel, grid, &args)
}
