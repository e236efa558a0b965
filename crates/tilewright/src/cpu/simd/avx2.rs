//! AVX2 leaf: 8 lanes, 16 registers, with FMA and F16C.

use super::{ColumnSink, Simd, Task};
use crate::{E4m3, E5m2};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof that this machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn new() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

impl Simd for Avx2 {
    type V = __m256;
    /// All bits of a lane are equal.
    type Mask = __m256;
    const LANES: usize = 8;
    const TILE_COLUMNS: usize = 2;
    const TILE_ROWS: usize = 6;
    const FUSES: bool = true;

    vector_methods! {
        fn splat(value: f32) -> Self::V = _mm256_set1_ps(value);
        fn add(a: Self::V, b: Self::V) -> Self::V = _mm256_add_ps(a, b);
        fn sub(a: Self::V, b: Self::V) -> Self::V = _mm256_sub_ps(a, b);
        fn mul(a: Self::V, b: Self::V) -> Self::V = _mm256_mul_ps(a, b);
        fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V = _mm256_fmadd_ps(a, b, c);
        fn max(a: Self::V, b: Self::V) -> Self::V = _mm256_max_ps(a, b);
        fn round(a: Self::V) -> Self::V = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        fn any_greater(a: Self::V, b: Self::V) -> bool = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) != 0;
        fn min(a: Self::V, b: Self::V) -> Self::V = _mm256_min_ps(a, b);
        fn div(a: Self::V, b: Self::V) -> Self::V = _mm256_div_ps(a, b);
        fn sqrt(a: Self::V) -> Self::V = _mm256_sqrt_ps(a);
        fn floor(a: Self::V) -> Self::V = _mm256_floor_ps(a);
        fn abs(a: Self::V) -> Self::V = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        fn negate(a: Self::V) -> Self::V = _mm256_xor_ps(_mm256_set1_ps(-0.0), a);
        fn less(a: Self::V, b: Self::V) -> Self::Mask = _mm256_cmp_ps::<_CMP_LT_OQ>(a, b);
        fn less_equal(a: Self::V, b: Self::V) -> Self::Mask = _mm256_cmp_ps::<_CMP_LE_OQ>(a, b);
        fn equal(a: Self::V, b: Self::V) -> Self::Mask = _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b);
        fn splat_mask(value: bool) -> Self::Mask = _mm256_castsi256_ps(_mm256_set1_epi32(-i32::from(value)));
        fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask = _mm256_and_ps(a, b);
        fn or(a: Self::Mask, b: Self::Mask) -> Self::Mask = _mm256_or_ps(a, b);
        fn not(a: Self::Mask) -> Self::Mask = _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
        fn bits(mask: Self::Mask) -> u32 = _mm256_movemask_ps(mask).cast_unsigned();
        fn select(mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V = _mm256_blendv_ps(b, a, mask);
        fn scale_or_zero(a: Self::V, n: Self::V, x: Self::V) -> Self::V = {
            // NaN converts to 1 << 31, which shifts to 0, so NaN in `a` propagates
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
            // "not less than" propagates NaN
            _mm256_and_ps(scaled, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(-126.0)))
        };
        fn reduce_max(a: Self::V) -> f32 = {
            let half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let half = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps::<1>(half, half)))
        };
        fn reduce_add(a: Self::V) -> f32 = {
            let half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let half = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps::<1>(half, half)))
        };
        fn split_bf16(pairs: Self::V) -> (Self::V, Self::V) = {
            let bits = _mm256_castps_si256(pairs);
            let upper = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)), _mm256_castsi256_ps(upper))
        };
        fn split_f16(pairs: Self::V) -> (Self::V, Self::V) = {
            let bits = _mm256_castps_si256(pairs);
            let lower = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
            let upper = _mm256_srli_epi32::<16>(bits);
            // packing works per 128-bit half: quarters are ordered lower, upper, lower, upper
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(lower, upper));
            let (lower, upper) = (_mm256_castsi256_si128(packed), _mm256_extracti128_si256::<1>(packed));
            (_mm256_cvtph_ps(lower), _mm256_cvtph_ps(upper))
        };
        fn split_i8(fours: Self::V) -> [Self::V; 4] = {
            let bits = _mm256_castps_si256(fours);
            let tops = [
                _mm256_slli_epi32::<24>(bits),
                _mm256_slli_epi32::<16>(bits),
                _mm256_slli_epi32::<8>(bits),
                bits,
            ];
            tops.map(|top| _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top)))
        };
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: `self` proves AVX2; `from` is readable for `LANES` elements.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: __m256) {
        // SAFETY: `self` proves AVX2; `to` is writable for `LANES` elements.
        unsafe { _mm256_storeu_ps(to, value) }
    }

    #[inline(always)]
    unsafe fn gather(self, table: *const f32, index: __m256) -> __m256 {
        // SAFETY: `self` proves AVX2; every index is in bounds of `table`.
        unsafe { _mm256_i32gather_ps::<4>(table, _mm256_cvttps_epi32(index)) }
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], sink: impl ColumnSink<__m256>) {
        assert!(rows.len() == Self::LANES, "a whole block");
        // SAFETY: `self` proves AVX2; rows are readable for `LANES` elements, and `sink` accepts every column.
        unsafe {
            let mut block = [_mm256_setzero_ps(); 8];
            for (register, &row) in block.iter_mut().zip(rows) {
                *register = _mm256_loadu_ps(row);
            }
            for (i, column) in transpose_8x8(block).into_iter().enumerate() {
                sink.store_column(i, column);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        // SAFETY: `self` proves AVX2; `from` is readable for `LANES` elements.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m256 {
        // SAFETY: `self` proves AVX2 and F16C; `from` is readable for `LANES` elements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const E4m3) -> __m256 {
        // SAFETY: `self` proves AVX2 and F16C; `from` is readable for `LANES` elements.
        unsafe {
            let shifted = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast())));
            rescale_e4m3(_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(E4M3_IN_F16))))
        }
    }

    #[inline(always)]
    unsafe fn load_e5m2(self, from: *const E5m2) -> __m256 {
        // SAFETY: `self` proves AVX2 and F16C; `from` is readable for `LANES` elements.
        unsafe {
            let shifted = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast()));
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(shifted))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m256 {
        // SAFETY: `self` proves AVX2; `from` is readable for `LANES` elements.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u32, bit: usize) -> [__m256; 2] {
        // SAFETY: `self` proves AVX2; `from` is readable for `LANES` words.
        unsafe {
            let words = _mm256_loadu_si256(from.cast());
            [bit, bit + 16].map(|bit| {
                let shifted = _mm256_srl_epi32(words, _mm_cvtsi64_si128(bit as i64));
                let nibbles = _mm256_and_si256(shifted, _mm256_set1_epi32(15));
                _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)))
            })
        }
    }

    #[inline(always)]
    fn split_e4m3(self, fours: __m256) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2 and F16C.
        unsafe {
            let (bits, kept) = (_mm256_castps_si256(fours), _mm256_set1_epi16(E4M3_IN_F16));
            let even = _mm256_and_si256(_mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(bits)), kept);
            let odd = _mm256_and_si256(_mm256_srai_epi16::<1>(bits), kept);
            let (first, third) = self.split_f16(_mm256_castsi256_ps(even));
            let (second, fourth) = self.split_f16(_mm256_castsi256_ps(odd));
            [rescale_e4m3(first), rescale_e4m3(second), rescale_e4m3(third), rescale_e4m3(fourth)]
        }
    }

    #[inline(always)]
    fn split_e5m2(self, fours: __m256) -> [__m256; 4] {
        // SAFETY: `self` proves AVX2 and F16C.
        unsafe {
            let bits = _mm256_castps_si256(fours);
            let odd = _mm256_and_si256(bits, _mm256_set1_epi16(0xff00_u16.cast_signed()));
            let even = _mm256_castsi256_ps(_mm256_slli_epi16::<8>(bits));
            let (first, third) = self.split_f16(even);
            let (second, fourth) = self.split_f16(_mm256_castsi256_ps(odd));
            [first, second, third, fourth]
        }
    }

    #[inline(always)]
    fn prefetch(self, from: *const u8) {
        // SAFETY: `self` proves AVX2; a prefetch of any address is sound.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline(always)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        fn vectorized<T: Task>(simd: Avx2, task: T) -> T::Output {
            task.run(simd)
        }
        // SAFETY: `self` proves all features of `vectorized`.
        unsafe { vectorized(self, task) }
    }
}

/// Mask of sign, exponent and mantissa of an e4m3 value shifted to f16 position, where it is too small by 2^8. In f32 position it
/// could be subnormal, and multiplying subnormals takes about 150 cycles on many processors.
const E4M3_IN_F16: i16 = 0xbf80_u16.cast_signed();

/// Corrects the exponent of an e4m3 value that was converted as f16. The encoding of 480 is NaN in e4m3.
#[inline]
#[target_feature(enable = "avx2")]
fn rescale_e4m3(value: __m256) -> __m256 {
    let value = _mm256_mul_ps(value, _mm256_set1_ps(256.0));
    let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), value);
    _mm256_or_ps(value, _mm256_cmp_ps::<_CMP_EQ_OQ>(magnitude, _mm256_set1_ps(480.0)))
}

/// Three rounds of interleaving: adjacent rows, pairs of rows, 128-bit halves.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_8x8(r: [__m256; 8]) -> [__m256; 8] {
    let mut quads = [_mm256_setzero_ps(); 8];
    for q in 0..2 {
        let low =
            [_mm256_unpacklo_ps(r[4 * q], r[4 * q + 1]), _mm256_unpacklo_ps(r[4 * q + 2], r[4 * q + 3])];
        let high =
            [_mm256_unpackhi_ps(r[4 * q], r[4 * q + 1]), _mm256_unpackhi_ps(r[4 * q + 2], r[4 * q + 3])];
        quads[4 * q] = _mm256_shuffle_ps::<0x44>(low[0], low[1]);
        quads[4 * q + 1] = _mm256_shuffle_ps::<0xee>(low[0], low[1]);
        quads[4 * q + 2] = _mm256_shuffle_ps::<0x44>(high[0], high[1]);
        quads[4 * q + 3] = _mm256_shuffle_ps::<0xee>(high[0], high[1]);
    }
    let mut out = [_mm256_setzero_ps(); 8];
    for c in 0..4 {
        out[c] = _mm256_permute2f128_ps::<0x20>(quads[c], quads[4 + c]);
        out[4 + c] = _mm256_permute2f128_ps::<0x31>(quads[c], quads[4 + c]);
    }
    out
}
