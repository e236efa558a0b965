//! Packing of device flags into bits.

use super::Gpu;
use crate::machine::Machine;
use tilewright::{Result, attention::BitOrder, ensure, tensor::DeviceMemory};
use tilewright_kernels::bits::{PackbitsParams, packbits as kernel};

const OPERATOR: &str = "attention.segment_packbits";
/// Maximum segment length: a grid has at most 2^16 - 1 CTAs of 128 bytes in its second dimension.
const MAX_SEGMENT: usize = 0xffff * 128 * 8;

/// Flags are u8, nonzero is set; the engine has checked that `indptr` ascends from 0 to their number.
pub(super) fn segment_packbits<M: Machine>(
    gpu: &Gpu<M>,
    flags: &DeviceMemory,
    indptr: &[i32],
    order: BitOrder,
) -> Result<(DeviceMemory, Vec<i32>)> {
    let (mut bounds, mut longest) = (vec![0_i32], 0);
    for (segment, pair) in indptr.windows(2).enumerate() {
        let len = i64::from(pair[1]) - i64::from(pair[0]);
        ensure!(
            (0..=MAX_SEGMENT as i64).contains(&len),
            OPERATOR,
            "segment {segment}: {len} flags, expected 0..={MAX_SEGMENT}"
        );
        let packed = ((len + 7) / 8) as i32;
        longest = longest.max(packed.cast_unsigned());
        bounds.push(bounds[segment] + packed);
    }
    let flags_at = gpu.check_device(OPERATOR, "flags", Some(flags.device_address()))?;
    let out = gpu.allocate(bounds[bounds.len() - 1].max(1).cast_unsigned() as usize)?;
    if longest > 0 {
        let indptr_at = gpu.upload(bytemuck::cast_slice(indptr))?;
        let bounds_at = gpu.upload(bytemuck::cast_slice(&bounds))?;
        let call = PackbitsParams {
            order,
            flags: flags_at,
            indptr: indptr_at.address(),
            out: out.address(),
            out_indptr: bounds_at.address(),
            segments: indptr.len() as u32 - 1,
            longest,
        };
        let function = gpu.kernel(OPERATOR, &call.name(), |name| kernel(name, order))?;
        let (grid, args) = call.launch();
        gpu.machine.launch(&function, grid, &args)?;
    }
    Ok((out, bounds))
}
