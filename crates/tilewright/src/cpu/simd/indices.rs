//! Copies page indices and finds the largest of them in the same pass: a table of a quarter of a million pages is most of what
//! a plan reads.

use super::{Isa, Simd, Task};

/// Adds `from` to `to`; the largest entry, as if none were negative: with a negative one it is above `i32::MAX`.
pub(crate) fn copy_i32(from: &[i32], to: &mut Vec<i32>) -> u32 {
    best().dispatch(Copy32 { from, to })
}

/// [`copy_i32`] of wide entries, whose upper halves are left out: the caller sees by the largest whether that is sound.
pub(crate) fn copy_i64(from: &[i64], to: &mut Vec<i32>) -> u64 {
    best().dispatch(Copy64 { from, to })
}

/// Integers need nothing that wider sets do not have; asking for those would cost system calls.
fn best() -> Isa {
    if Isa::Avx512.is_available() { Isa::Avx512 } else { Isa::Avx2 }
}

struct Copy32<'a> {
    from: &'a [i32],
    to: &'a mut Vec<i32>,
}

impl Task for Copy32<'_> {
    type Output = u32;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u32 {
        let mut largest = 0;
        self.to.extend(self.from.iter().map(|&page| {
            largest = largest.max(page as u32);
            page
        }));
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
