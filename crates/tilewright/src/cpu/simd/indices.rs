//! Page-index copy fused with a maximum, because page tables (a quarter million entries) dominate the memory reads of planning.

use super::{Isa, Simd, Task};

/// Entries per block: the maximum is computed first, then the block is copied from L1 with `memcpy`. `memcpy` avoids
/// read-for-ownership of the destination, so this takes 3/4 of the time of one fused loop.
const BLOCK: usize = 1024;

/// Appends `from` to `to` and returns the maximum as `u32`: a negative entry compares as above `i32::MAX`.
pub(crate) fn copy_i32(from: &[i32], to: &mut Vec<i32>) -> u32 {
    best_isa().dispatch(CopyI32 { from, to })
}

/// The maximum of `entries`, defined as in [`copy_i32`].
pub(crate) fn largest_i32(entries: &[i32]) -> u32 {
    best_isa().dispatch(LargestI32 { entries })
}

/// Same as [`copy_i32`], but truncates the entries to 32 bits. The caller must reject a maximum above `i32::MAX`.
pub(crate) fn copy_i64(from: &[i64], to: &mut Vec<i32>) -> u64 {
    best_isa().dispatch(CopyI64 { from, to })
}

/// Later sets add nothing for integers, and detecting AMX costs a system call.
fn best_isa() -> Isa {
    if Isa::Avx512.is_available() { Isa::Avx512 } else { Isa::Avx2 }
}

struct LargestI32<'a> {
    entries: &'a [i32],
}

impl Task for LargestI32<'_> {
    type Output = u32;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u32 {
        self.entries.iter().fold(0, |largest, &page| largest.max(page as u32))
    }
}

struct CopyI32<'a> {
    from: &'a [i32],
    to: &'a mut Vec<i32>,
}

impl Task for CopyI32<'_> {
    type Output = u32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u32 {
        self.to.reserve(self.from.len());
        let mut largest = 0;
        for block in self.from.chunks(BLOCK) {
            largest = LargestI32 { entries: block }.run(simd).max(largest);
            self.to.extend_from_slice(block);
        }
        largest
    }
}

struct CopyI64<'a> {
    from: &'a [i64],
    to: &'a mut Vec<i32>,
}

impl Task for CopyI64<'_> {
    type Output = u64;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u64 {
        let mut largest = 0;
        self.to.extend(self.from.iter().map(|&page| {
            largest = largest.max(page as u64);
            page as i32
        }));
        largest
    }
}
