//! Packs flags into bits, eight per byte; the last byte is zero-padded.
//!
//! Shapes: flags u8 `[flags]`, set if nonzero; out u8. Segment `flags[indptr[s]..indptr[s + 1]]` begins at byte
//! `out_indptr[s]`. Both index arrays are i32 `[segments + 1]`. Without segments, pass one: `[0, flags]` and `[0,
//! ceil(flags / 8)]`.
//! Grid: `[segments, ceil(longest / THREADS), 1]`, one thread per output byte.

use tilewright::attention::BitOrder;
use tilewright_ptx::{
    build::{Builder, Global},
    ir::Kernel,
    sim::Arg,
    verify::Invalid,
};

const THREADS: u32 = 128;

/// Parameters of one launch.
#[derive(Debug, Clone, Copy)]
pub struct PackbitsParams {
    /// Bit order in a byte.
    pub order: BitOrder,
    /// Address of the flags.
    pub flags: u64,
    /// Address of the segment bounds, in flags.
    pub indptr: u64,
    /// Address of the result.
    pub out: u64,
    /// Address of the segment bounds, in bytes.
    pub out_indptr: u64,
    /// Number of segments.
    pub segments: u32,
    /// Bytes of the longest segment, at most 2^22.
    pub longest: u32,
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
        let args = [self.flags, self.indptr, self.out, self.out_indptr].map(Arg::U64);
        ([self.segments, self.longest.div_ceil(THREADS), 1], args.to_vec())
    }
}

/// Records the kernel for a bit order. Its parameters are those of [`PackbitsParams::launch`].
///
/// # Errors
/// None.
pub fn packbits(name: &str, order: BitOrder) -> Result<Kernel, Invalid> {
    Builder::kernel(name, THREADS, |k| {
        let (flags, indptr) = (k.param::<u64>("flags"), k.global::<u32>("indptr"));
        let (out, out_indptr) = (k.param::<u64>("out"), k.global::<u32>("out_indptr"));
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
