//! Packs flags into bits, eight per byte; the last byte is zero-padded.
//!
//! Shapes: flags u8 `[flags]`, set if nonzero; out u8. Segment `flags[indptr[s]..indptr[s + 1]]` begins at byte
//! `out_indptr[s]`. Both index arrays are i32 `[segments + 1]`. Without segments, pass one: `[0, flags]` and `[0,
//! ceil(flags / 8)]`.
//! Grid: `[segments, ceil(longest / THREADS), 1]`, one thread per output byte.

use crate::params::GlobalArray;
use tilewright::attention::BitOrder;
use tilewright_ptx::{Arg, Builder, Global, Invalid, Kernel};

const THREADS: u32 = 128;

crate::params! {
    /// Parameters of one launch.
    #[derive(Debug, Clone, Copy)]
    pub struct PackbitsParams => PackbitsRegs(this) {
        /// Bit order in a byte.
        host order: BitOrder,
        /// Address of the flags.
        flags: u64,
        /// Address of the segment bounds, in flags.
        indptr: u64 as GlobalArray<u32>,
        /// Address of the result.
        out: u64,
        /// Address of the segment bounds, in bytes.
        out_indptr: u64 as GlobalArray<u32>,
        /// Number of segments.
        host segments: u32,
        /// Bytes of the longest segment, at most 2^22.
        host longest: u32,
    }
}

impl PackbitsParams {
    /// Kernel name, unique per bit order.
    pub fn name(&self) -> String {
        match self.order {
            BitOrder::Little => "packbits_little".to_owned(),
            BitOrder::Big => "packbits_big".to_owned(),
        }
    }

    /// Grid and arguments of the kernel for this bit order. Requires at least one segment and one byte.
    pub fn launch(&self) -> ([u32; 3], Vec<Arg>) {
        ([self.segments, self.longest.div_ceil(THREADS), 1], self.args(()))
    }
}

/// Records the kernel for a bit order. Its parameters are those of [`PackbitsParams::launch`].
///
/// # Errors
/// None.
pub fn packbits(name: &str, order: BitOrder) -> Result<Kernel, Invalid> {
    Builder::dependent_kernel(name, THREADS, |k| {
        let PackbitsRegs { flags, indptr, out, out_indptr } = PackbitsRegs::declare(k, ());
        let bounds = indptr.at(k.cta());
        let (begin, end) = (bounds.load(), bounds.plus(1).load());
        let byte = (k.cta_y() * THREADS + k.thread()).named("byte");
        let first = begin + (byte << 3);
        k.when(first.lt(end), || {
            let word = k.var("word", 0_u32);
            for i in 0..8 {
                let shift = match order {
                    BitOrder::Little => i,
                    BitOrder::Big => 7 - i,
                };
                k.when((first + i).lt(end), || {
                    let flag = Global::<u16>::new(flags + (first + i).to_u64()).load_u8();
                    word.set(word.get() | flag.ne(0).select::<u32>(1 << shift, 0));
                });
            }
            let to = out_indptr.at(k.cta()).load() + byte;
            Global::<u16>::new(out + to.to_u64()).store_u8(word.get());
        });
    })
}
