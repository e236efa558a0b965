//! Portable leaf: 4 lanes as an array, which the compiler vectorizes for its target.

use super::{ColumnSink, Simd, Task};
use crate::{
    E4m3, E5m2,
    attention::variant::{elementary::turns_in_f64, inline_methods},
};
use half::{bf16, f16};

/// The leaf without CPU requirements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

const LANES: usize = 4;

#[inline(always)]
fn lanewise(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

/// Applies `widen` to byte `c` of each lane, for each `c`.
#[inline(always)]
fn widen_bytes(fours: [f32; LANES], widen: impl Fn(u8) -> f32) -> [[f32; LANES]; 4] {
    std::array::from_fn(|c| lanewise(|i| widen(fours[i].to_bits().to_le_bytes()[c])))
}

/// Applies `widen` to the low and the high half of each lane.
#[inline(always)]
fn widen_halves(pairs: [f32; LANES], widen: impl Fn(u16) -> f32) -> ([f32; LANES], [f32; LANES]) {
    let half = |shift: u32| lanewise(|i| widen((pairs[i].to_bits() >> shift) as u16));
    (half(0), half(16))
}

/// Loads of elements of other dtypes.
macro_rules! loads {
    ($($name:ident $T:ty;)+) => {$(
        #[inline(always)]
        unsafe fn $name(self, from: *const $T) -> Self::V {
            // SAFETY: `from` is readable for `LANES` elements.
            lanewise(|i| f32::from(unsafe { *from.add(i) }))
        }
    )+};
}

impl Simd for Portable {
    type V = [f32; LANES];
    type Mask = [bool; LANES];
    const LANES: usize = LANES;
    const TILE_COLUMNS: usize = 2;
    const TILE_ROWS: usize = 4;
    const FUSES: bool = false;

    inline_methods! {
        fn splat(self, value: f32) -> Self::V = [value; LANES];
        fn add(self, a: Self::V, b: Self::V) -> Self::V = lanewise(|i| a[i] + b[i]);
        fn sub(self, a: Self::V, b: Self::V) -> Self::V = lanewise(|i| a[i] - b[i]);
        fn mul(self, a: Self::V, b: Self::V) -> Self::V = lanewise(|i| a[i] * b[i]);
        fn max(self, a: Self::V, b: Self::V) -> Self::V = lanewise(|i| if a[i] > b[i] { a[i] } else { b[i] });
        fn reduce_max(self, a: Self::V) -> f32 = a[0].max(a[1]).max(a[2].max(a[3]));
        fn any_greater(self, a: Self::V, b: Self::V) -> bool = (0..LANES).any(|i| a[i] > b[i]);
        fn reduce_add(self, a: Self::V) -> f32 = (a[0] + a[1]) + (a[2] + a[3]);
        fn min(self, a: Self::V, b: Self::V) -> Self::V = lanewise(|i| if a[i] < b[i] { a[i] } else { b[i] });
        fn div(self, a: Self::V, b: Self::V) -> Self::V = lanewise(|i| a[i] / b[i]);
        fn sqrt(self, a: Self::V) -> Self::V = lanewise(|i| a[i].sqrt());
        fn floor(self, a: Self::V) -> Self::V = lanewise(|i| a[i].floor());
        fn abs(self, a: Self::V) -> Self::V = lanewise(|i| a[i].abs());
        fn negate(self, a: Self::V) -> Self::V = lanewise(|i| -a[i]);
        fn less(self, a: Self::V, b: Self::V) -> Self::Mask = std::array::from_fn(|i| a[i] < b[i]);
        fn less_equal(self, a: Self::V, b: Self::V) -> Self::Mask = std::array::from_fn(|i| a[i] <= b[i]);
        fn equal(self, a: Self::V, b: Self::V) -> Self::Mask = std::array::from_fn(|i| a[i] == b[i]);
        fn splat_mask(self, value: bool) -> Self::Mask = [value; LANES];
        fn and(self, a: Self::Mask, b: Self::Mask) -> Self::Mask = std::array::from_fn(|i| a[i] & b[i]);
        fn or(self, a: Self::Mask, b: Self::Mask) -> Self::Mask = std::array::from_fn(|i| a[i] | b[i]);
        fn not(self, a: Self::Mask) -> Self::Mask = a.map(|lane| !lane);
        fn bits(self, mask: Self::Mask) -> u32 = (0..LANES).fold(0, |bits, i| bits | u32::from(mask[i]) << i);
        fn select(self, mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V = lanewise(|i| if mask[i] { a[i] } else { b[i] });
        fn split_bf16(self, pairs: Self::V) -> (Self::V, Self::V) = widen_halves(pairs, |bits| bf16::from_bits(bits).to_f32());
        fn split_f16(self, pairs: Self::V) -> (Self::V, Self::V) = widen_halves(pairs, |bits| f16::from_bits(bits).to_f32());
        fn split_e4m3(self, fours: Self::V) -> [Self::V; 4] = widen_bytes(fours, |byte| E4m3::from_bits(byte).to_f32());
        fn split_e5m2(self, fours: Self::V) -> [Self::V; 4] = widen_bytes(fours, |byte| E5m2::from_bits(byte).to_f32());
        fn split_i8(self, fours: Self::V) -> [Self::V; 4] = widen_bytes(fours, |byte| f32::from(byte.cast_signed()));
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: `from` is readable for `LANES` elements.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: Self::V) {
        // SAFETY: `to` is writable for `LANES` elements.
        unsafe { to.cast::<Self::V>().write_unaligned(value) }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // f32::mul_add is a library call on targets without FMA
        lanewise(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        // adding and subtracting 1.5 * 2^23 rounds to nearest even, for |a| < 2^22
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
    unsafe fn gather(self, table: *const f32, index: Self::V) -> Self::V {
        // SAFETY: every index is in bounds of `table`.
        lanewise(|i| unsafe { *table.add(index[i] as usize) })
    }

    #[inline(always)]
    fn turns(self, position: Self::V, high: Self::V, low: Self::V) -> Self::V {
        // mul_add rounds twice here, so it cannot recover the error of a product
        lanewise(|i| turns_in_f64(position[i], high[i], low[i]))
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], sink: impl ColumnSink<Self::V>) {
        for column in 0..LANES {
            // SAFETY: rows are readable for `LANES` elements, and `sink` accepts every column.
            unsafe { sink.store_column(column, lanewise(|row| rows[row].add(column).read_unaligned())) };
        }
    }

    loads! {
        load_bf16 bf16;
        load_f16 f16;
        load_e4m3 E4m3;
        load_e5m2 E5m2;
        load_i8 i8;
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u32, bit: usize) -> [Self::V; 2] {
        // SAFETY: `from` is readable for `LANES` words.
        let word = |i: usize| unsafe { from.add(i).read_unaligned() };
        [bit, bit + 16].map(|bit| lanewise(|i| (word(i) >> bit & 15) as f32 - 8.0))
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        #[inline(never)]
        fn vectorized<T: Task>(simd: Portable, task: T) -> T::Output {
            task.run(simd)
        }
        vectorized(self, task)
    }
}
