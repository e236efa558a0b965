//! The portable leaf: 4 lanes as an array, which every compiler target turns into what it has.

use super::{Simd, Task};
use half::{bf16, f16};

/// Needs no proof.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

const LANES: usize = 4;

#[inline(always)]
fn lanewise(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

/// SAFETY: of every block in this file: memory arguments are valid by each function's own contract.
impl Simd for Portable {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const TILE_COLUMNS: usize = 2;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::V {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: see the impl.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Self::V) {
        // SAFETY: see the impl.
        unsafe { to.cast::<Self::V>().write_unaligned(value) }
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // f32::mul_add would call a library function where there is no such instruction
        lanewise(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        // adding and taking away 1.5 * 2^23 rounds to nearest even; |a| < 2^22 here
        const MAGIC: f32 = 12_582_912.0;
        lanewise(|i| (a[i] + MAGIC) - MAGIC)
    }

    #[inline(always)]
    fn scale_or_zero(self, a: Self::V, n: Self::V, x: Self::V) -> Self::V {
        lanewise(|i| {
            let power = f32::from_bits(((n[i] as i32 + 127) as u32) << 23);
            if x[i] < -126.0 { 0.0 } else { a[i] * power }
        })
    }

    #[inline(always)]
    fn reduce_max(self, a: Self::V) -> f32 {
        a[0].max(a[1]).max(a[2].max(a[3]))
    }

    #[inline(always)]
    fn any_above(self, a: Self::V, b: Self::V) -> bool {
        (0..LANES).any(|i| a[i] > b[i])
    }

    #[inline(always)]
    fn reduce_add(self, a: Self::V) -> f32 {
        (a[0] + a[1]) + (a[2] + a[3])
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], mut each: impl FnMut(usize, Self::V)) {
        for column in 0..LANES {
            // SAFETY: see the impl.
            each(column, lanewise(|row| unsafe { rows[row].add(column).read_unaligned() }));
        }
    }

    #[inline(always)]
    fn split_bf16(self, pairs: Self::V) -> (Self::V, Self::V) {
        let half = |i: usize, shift: u32| bf16::from_bits((pairs[i].to_bits() >> shift) as u16).to_f32();
        (lanewise(|i| half(i, 0)), lanewise(|i| half(i, 16)))
    }

    #[inline(always)]
    fn split_f16(self, pairs: Self::V) -> (Self::V, Self::V) {
        let half = |i: usize, shift: u32| f16::from_bits((pairs[i].to_bits() >> shift) as u16).to_f32();
        (lanewise(|i| half(i, 0)), lanewise(|i| half(i, 16)))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V {
        // SAFETY: see the impl.
        lanewise(|i| unsafe { *from.add(i) }.to_f32())
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        // SAFETY: see the impl.
        lanewise(|i| unsafe { *from.add(i) }.to_f32())
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        task.run(self)
    }
}
