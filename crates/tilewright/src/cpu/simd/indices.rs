//! Copies page indices and finds the largest of them in the same pass: a table of a quarter of a million pages is most of what
//! a plan reads. Finds it alone where they need no copy.

use super::{Isa, Simd, Task};

/// Entries that are looked at before they are copied from the L1 cache: copies of whole blocks, which the C library makes, do not
/// read what they overwrite, and take three quarters of the time.
const BLOCK: usize = 1024;

/// Adds `from` to `to`; the largest entry, as if none were negative: with a negative one it is above `i32::MAX`.
pub(crate) fn copy_i32(from: &[i32], to: &mut Vec<i32>) -> u32 {
    best().dispatch(Copy32 { from, to })
}

/// The largest entry, as [`copy_i32`] finds it.
pub(crate) fn largest_i32(of: &[i32]) -> u32 {
    best().dispatch(Largest { of })
}

/// [`copy_i32`] of wide entries, whose upper halves are left out: the caller sees by the largest whether that is sound.
pub(crate) fn copy_i64(from: &[i64], to: &mut Vec<i32>) -> u64 {
    best().dispatch(Copy64 { from, to })
}

/// Integers need nothing that wider sets do not have; asking for those would cost system calls.
fn best() -> Isa {
    if Isa::Avx512.is_available() { Isa::Avx512 } else { Isa::Avx2 }
}

struct Largest<'a> {
    of: &'a [i32],
}

impl Task for Largest<'_> {
    type Output = u32;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u32 {
        self.of.iter().fold(0, |largest, &page| largest.max(page as u32))
    }
}

struct Copy32<'a> {
    from: &'a [i32],
    to: &'a mut Vec<i32>,
}

impl Task for Copy32<'_> {
    type Output = u32;
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u32 {
        self.to.reserve(self.from.len());
        let mut largest = 0;
        for block in self.from.chunks(BLOCK) {
            largest = Largest { of: block }.run(simd).max(largest);
            self.to.extend_from_slice(block);
        }
        largest
    }
}

struct Copy64<'a> {
    from: &'a [i64],
    to: &'a mut Vec<i32>,
}

impl Task for Copy64<'_> {
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
