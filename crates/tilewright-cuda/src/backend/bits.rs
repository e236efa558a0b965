//! Packing of device flags into bits.

use super::{Gpu, geometry::extent};
use crate::machine::Machine;
use tilewright::{Result, attention::BitOrder, ensure, tensor::DeviceMemory};
use tilewright_kernels::bits::{PackbitsParams, packbits as kernel};

const OPERATOR: &str = "attention.segment_packbits";
/// Maximum segment length: a grid has at most 2^16 - 1 CTAs of 128 bytes in its second dimension.
const MAX_SEGMENT: usize = 0xffff * 128 * 8;

impl<M: Machine> Gpu<M> {
    /// [`tilewright::attention::packbits`] of device flags (u8, nonzero is set).
    ///
    /// # Errors
    /// If there are more than 2^29 - 4096 flags, they are on another device, or device memory is exhausted.
    pub fn packbits(&self, flags: &DeviceMemory, order: BitOrder) -> Result<DeviceMemory> {
        let indptr = [0, extent(OPERATOR, "flags", flags.bytes())?.cast_signed()];
        Ok(self.segment_packbits(flags, &indptr, order)?.0)
    }

    /// [`tilewright::attention::segment_packbits`] of device flags (u8, nonzero is set). Returns the bytes and the bounds of the
    /// segments, `[num_segments + 1]`.
    ///
    /// # Errors
    /// If `indptr` is empty, does not start at 0, decreases, or does not end at the number of flags; if a segment has more than
    /// 67,107,840 flags, the flags are on another device, or device memory is exhausted.
    pub fn segment_packbits(
        &self,
        flags: &DeviceMemory,
        indptr: &[i32],
        order: BitOrder,
    ) -> Result<(DeviceMemory, Vec<i32>)> {
        ensure!(!indptr.is_empty(), OPERATOR, "indptr has no entries, expected num_segments + 1");
        ensure!(indptr[0] == 0, OPERATOR, "indptr starts at {}, expected 0", indptr[0]);
        let end = indptr[indptr.len() - 1];
        ensure!(
            usize::try_from(end) == Ok(flags.bytes()),
            OPERATOR,
            "indptr ends at {end}, expected the {} flags",
            flags.bytes()
        );
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
        let flags_at = self.check_device(OPERATOR, "flags", Some(flags.device_address()))?;
        let out = self.allocate(bounds[bounds.len() - 1].max(1).cast_unsigned() as usize)?;
        if longest > 0 {
            let [indptr_at, bounds_at] =
                [indptr, &bounds].map(|values| self.upload(bytemuck::cast_slice(values)));
            let (indptr_at, bounds_at) = (indptr_at?, bounds_at?);
            let call = PackbitsParams {
                order,
                flags: flags_at,
                indptr: indptr_at.address(),
                out: out.address(),
                out_indptr: bounds_at.address(),
                segments: indptr.len() as u32 - 1,
                longest,
            };
            let function = self.kernel(OPERATOR, &call.name(), |name| kernel(name, order))?;
            let (grid, args) = call.launch();
            self.machine.launch(&function, grid, &args)?;
        }
        Ok((out, bounds))
    }
}
