//! AVX-512 leaf: 16 lanes, 32 registers.

use super::{ColumnSink, Simd, Task};
use crate::{E4m3, E5m2, attention::variant::inline_methods};
use half::{bf16, f16};
use std::arch::{asm, x86_64::*};

/// Proof that this machine has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512 {
    /// Whether it also has VBMI, which permutes bytes of two registers.
    vbmi: bool,
}

impl Avx512 {
    pub(crate) fn new() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma");
        found.then(|| Self { vbmi: is_x86_feature_detected!("avx512vbmi") })
    }
}

impl Avx512 {
    /// Converts e4m3 values to bf16, exactly: those of even bytes, then those of odd bytes.
    #[inline(always)]
    pub(super) fn e4m3_to_bf16(self, bytes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: `self` proves AVX-512, and `vbmi` the table lookup.
        unsafe { if self.vbmi { e4m3_to_bf16_by_table(bytes) } else { e4m3_to_bf16(bytes) } }
    }
}

impl Simd for Avx512 {
    type V = __m512;
    type Mask = __mmask16;
    const LANES: usize = 16;
    const TILE_COLUMNS: usize = 4;
    const TILE_ROWS: usize = 6;
    const FUSES: bool = true;

    vector_methods! {
        fn splat(value: f32) -> Self::V = _mm512_set1_ps(value);
        fn add(a: Self::V, b: Self::V) -> Self::V = _mm512_add_ps(a, b);
        fn sub(a: Self::V, b: Self::V) -> Self::V = _mm512_sub_ps(a, b);
        fn mul(a: Self::V, b: Self::V) -> Self::V = _mm512_mul_ps(a, b);
        fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V = _mm512_fmadd_ps(a, b, c);
        fn max(a: Self::V, b: Self::V) -> Self::V = _mm512_max_ps(a, b);
        fn round(a: Self::V) -> Self::V = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        fn reduce_max(a: Self::V) -> f32 = _mm512_reduce_max_ps(a);
        fn any_greater(a: Self::V, b: Self::V) -> bool = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) != 0;
        fn reduce_add(a: Self::V) -> f32 = _mm512_reduce_add_ps(a);
        fn min(a: Self::V, b: Self::V) -> Self::V = _mm512_min_ps(a, b);
        fn div(a: Self::V, b: Self::V) -> Self::V = _mm512_div_ps(a, b);
        fn sqrt(a: Self::V) -> Self::V = _mm512_sqrt_ps(a);
        fn floor(a: Self::V) -> Self::V = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a);
        fn abs(a: Self::V) -> Self::V = _mm512_abs_ps(a);
        fn negate(a: Self::V) -> Self::V = _mm512_xor_ps(_mm512_set1_ps(-0.0), a);
        fn less(a: Self::V, b: Self::V) -> Self::Mask = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b);
        fn less_equal(a: Self::V, b: Self::V) -> Self::Mask = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b);
        fn equal(a: Self::V, b: Self::V) -> Self::Mask = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b);
        fn select(mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V = _mm512_mask_blend_ps(mask, b, a);
        fn scale_or_zero(a: Self::V, n: Self::V, x: Self::V) -> Self::V = {
            // "not less than" propagates NaN
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(keep, a, n)
        };
        fn split_bf16(pairs: Self::V) -> (Self::V, Self::V) = {
            let bits = _mm512_castps_si512(pairs);
            let upper = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(upper))
        };
        fn split_f16(pairs: Self::V) -> (Self::V, Self::V) = {
            let bits = _mm512_castps_si512(pairs);
            let upper = _mm512_srli_epi32::<16>(bits);
            (_mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(upper)))
        };
        fn split_i8(fours: Self::V) -> [Self::V; 4] = {
            let bits = _mm512_castps_si512(fours);
            let tops = [
                _mm512_slli_epi32::<24>(bits),
                _mm512_slli_epi32::<16>(bits),
                _mm512_slli_epi32::<8>(bits),
                bits,
            ];
            tops.map(|top| _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top)))
        };
    }

    inline_methods! {
        fn splat_mask(self, value: bool) -> Self::Mask = if value { 0xffff } else { 0 };
        fn and(self, a: Self::Mask, b: Self::Mask) -> Self::Mask = a & b;
        fn or(self, a: Self::Mask, b: Self::Mask) -> Self::Mask = a | b;
        fn not(self, a: Self::Mask) -> Self::Mask = !a;
        fn bits(self, mask: Self::Mask) -> u32 = u32::from(mask);
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: `self` proves AVX-512; `from` is readable for `LANES` elements.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: __m512) {
        // SAFETY: `self` proves AVX-512; `to` is writable for `LANES` elements.
        unsafe { _mm512_storeu_ps(to, value) }
    }

    #[inline(always)]
    unsafe fn gather(self, table: *const f32, index: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512; every index is in bounds of `table`.
        unsafe { _mm512_i32gather_ps::<4>(_mm512_cvttps_epi32(index), table) }
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], sink: impl ColumnSink<__m512>) {
        assert!(rows.len() == Self::LANES, "a whole block");
        // SAFETY: `self` proves AVX-512; rows are readable for `LANES` elements, and `sink` accepts every column.
        unsafe {
            let mut block = [_mm512_setzero_ps(); 16];
            for (register, &row) in block.iter_mut().zip(rows) {
                *register = _mm512_loadu_ps(row);
            }
            for (i, column) in transpose_16x16(block).into_iter().enumerate() {
                sink.store_column(i, column);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        // SAFETY: `self` proves AVX-512; `from` is readable for `LANES` elements.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        // SAFETY: `self` proves AVX-512; `from` is readable for `LANES` elements.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const E4m3) -> __m512 {
        // SAFETY: `self` proves AVX-512; `from` is readable for `LANES` elements.
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            let shifted = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
            let halves = _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(E4M3_IN_F16)));
            let magnitude = _mm_and_si128(bytes, _mm_set1_epi8(0x7f));
            let number = _mm_cmpneq_epi8_mask(magnitude, _mm_set1_epi8(0x7f));
            _mm512_mask_mul_ps(_mm512_set1_ps(f32::NAN), number, halves, _mm512_set1_ps(256.0))
        }
    }

    #[inline(always)]
    unsafe fn load_four_e4m3(self, from: *const E4m3) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512; `from` is readable for `4 * LANES` elements.
        unsafe {
            // moves element `16 j + i` to byte `j` of lane `i`: permutes words between quarters, then bytes within
            let words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let quarters = permute_words(words, _mm512_loadu_si512(from.cast()));
            let fours = _mm512_shuffle_epi8(quarters, _mm512_broadcast_i32x4(bytes));
            self.split_e4m3(_mm512_castsi512_ps(fours))
        }
    }

    #[inline(always)]
    unsafe fn load_e5m2(self, from: *const E5m2) -> __m512 {
        // SAFETY: `self` proves AVX-512; `from` is readable for `LANES` elements.
        unsafe {
            let shifted = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(shifted))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        // SAFETY: `self` proves AVX-512; `from` is readable for `LANES` elements.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u32, bit: usize) -> [__m512; 2] {
        // SAFETY: `self` proves AVX-512; `from` is readable for `LANES` words.
        unsafe {
            let words = _mm512_loadu_si512(from.cast());
            let even = _mm512_srl_epi32(words, _mm_cvtsi64_si128(bit as i64));
            let values =
                _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.);
            // the permutation ignores the upper bits of an index
            let odd = _mm512_srli_epi32::<16>(even);
            [_mm512_permutexvar_ps(even, values), _mm512_permutexvar_ps(odd, values)]
        }
    }

    #[inline(always)]
    fn split_e4m3(self, fours: __m512) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let (even, odd) = self.e4m3_to_bf16(_mm512_castps_si512(fours));
            let (even, odd) = (_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd));
            let ((first, third), (second, fourth)) = (self.split_bf16(even), self.split_bf16(odd));
            [first, second, third, fourth]
        }
    }

    #[inline(always)]
    fn split_e5m2(self, fours: __m512) -> [__m512; 4] {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let bits = _mm512_castps_si512(fours);
            let odd = _mm512_and_si512(bits, _mm512_set1_epi16(0xff00_u16.cast_signed()));
            let even = _mm512_castsi512_ps(_mm512_slli_epi16::<8>(bits));
            let (first, third) = self.split_f16(even);
            let (second, fourth) = self.split_f16(_mm512_castsi512_ps(odd));
            [first, second, third, fourth]
        }
    }

    #[inline(always)]
    fn prefetch(self, from: *const u8) {
        // SAFETY: `self` proves AVX-512; a prefetch of any address is sound.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }

    #[inline(always)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
        #[inline(never)]
        fn vectorized<T: Task>(simd: Avx512, task: T) -> T::Output {
            task.run(simd)
        }
        // SAFETY: `self` proves all features of `vectorized`; AVX-512F implies F16C.
        unsafe { vectorized(self, task) }
    }
}

/// Mask of sign, exponent and mantissa of an e4m3 value shifted to f16 position, where it is too small by 2^8.
const E4M3_IN_F16: i16 = 0xbf80_u16.cast_signed();

/// Moves word `index[i]` to lane `i`. Inline assembly, because the compiler merges the intrinsic with a subsequent byte shuffle
/// into one permutation that takes ten instructions.
#[inline]
#[target_feature(enable = "avx512f")]
fn permute_words(index: __m512i, words: __m512i) -> __m512i {
    let permuted;
    // SAFETY: callers have AVX-512F; the instruction accesses registers only.
    unsafe {
        asm!("vpermd {to}, {index}, {from}", to = out(zmm_reg) permuted, index = in(zmm_reg) index,
            from = in(zmm_reg) words, options(pure, nomem, nostack, preserves_flags));
    }
    permuted
}

/// e4m3 to bf16: looks up both bytes of each bf16 in tables of all 128 magnitudes. Requires VBMI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn e4m3_to_bf16_by_table(bytes: __m512i) -> (__m512i, __m512i) {
    const fn table(shift: u32) -> [u8; 128] {
        let mut table = [0; 128];
        let mut magnitude = 0;
        while magnitude < 128 {
            table[magnitude] = (E4m3::from_bits(magnitude as u8).to_f32().to_bits() >> shift) as u8;
            magnitude += 1;
        }
        table
    }
    static UPPER: [u8; 128] = table(24);
    static LOWER: [u8; 128] = table(16);
    // vpermi2b ignores the sign bit of an index
    let lookup = |table: &'static [u8; 128]| {
        // SAFETY: the table has 128 bytes, two registers; callers check VBMI.
        unsafe {
            let (first, second) =
                (_mm512_loadu_si512(table.as_ptr().cast()), _mm512_loadu_si512(table[64..].as_ptr().cast()));
            let mut found = bytes;
            asm!("vpermi2b {found}, {first}, {second}", found = inout(zmm_reg) found, first = in(zmm_reg) first,
                second = in(zmm_reg) second, options(pure, nomem, nostack, preserves_flags));
            found
        }
    };
    // 0xf8: a | (b & c)
    let sign = _mm512_set1_epi8(0x80_u8.cast_signed());
    let upper = _mm512_ternarylogic_epi32::<0xf8>(lookup(&UPPER), bytes, sign);
    let lower = lookup(&LOWER);
    combine_bytes(upper, lower)
}

/// Combines upper and lower bytes to 16-bit values: those of even bytes, then those of odd bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn combine_bytes(upper: __m512i, lower: __m512i) -> (__m512i, __m512i) {
    let lower_byte = _mm512_set1_epi16(0xff);
    // 0xca: a ? b : c, bitwise
    let even = _mm512_ternarylogic_epi32::<0xca>(lower_byte, lower, _mm512_slli_epi16::<8>(upper));
    let odd = _mm512_ternarylogic_epi32::<0xca>(lower_byte, _mm512_srli_epi16::<8>(lower), upper);
    (even, odd)
}

/// e4m3 to bf16 with 16-byte tables.
///
/// An f32 multiplication that corrects the exponent is shorter, but takes about 150 cycles on processors that handle subnormal
/// operands in microcode. Instead, the bytes of each bf16 are computed 64 at a time:
///
/// 1. The upper byte, sign and `60 + exponent / 2`, is looked up by the upper nibble.
/// 2. The lower byte, last exponent bit and mantissa, is a shift of the lower nibble.
/// 3. Subnormals and NaN are corrected with the tables `EXCESS` and `LOWER`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn e4m3_to_bf16(bytes: __m512i) -> (__m512i, __m512i) {
    const UPPER: [u8; 16] = {
        let mut table = [0; 16];
        let mut at = 0;
        while at < 16 {
            table[at] = ((at as u8 & 8) << 4) | (60 + (at as u8 & 7));
            at += 1;
        }
        table
    };
    // excess of `UPPER` for the subnormal k · 2^-9, and for NaN at 15
    const EXCESS: [u8; 16] = [60, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xc4];
    const LOWER: [u8; 16] = [0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0xf0];
    let table = |bytes: [u8; 16]| {
        _mm512_broadcast_i32x4(_mm_set_epi64x(
            i64::from_le_bytes([
                bytes[8], bytes[9], bytes[10], bytes[11], bytes[12], bytes[13], bytes[14], bytes[15],
            ]),
            i64::from_le_bytes([
                bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
            ]),
        ))
    };
    let nibble = _mm512_set1_epi8(0x0f);
    let lower_nibble = _mm512_and_si512(bytes, nibble);
    let upper_nibble = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble);
    // 2 · magnitude - 16 wraps around for subnormals and exceeds that of 448 for NaN
    let order = _mm512_sub_epi8(_mm512_add_epi8(bytes, bytes), _mm512_set1_epi8(16));
    let is_special = _mm512_cmpgt_epu8_mask(order, _mm512_set1_epi8(0xec_u8.cast_signed()));
    let upper = _mm512_sub_epi8(
        _mm512_shuffle_epi8(table(UPPER), upper_nibble),
        _mm512_maskz_shuffle_epi8(is_special, table(EXCESS), lower_nibble),
    );
    let lower = _mm512_slli_epi16::<4>(lower_nibble);
    let lower = _mm512_mask_shuffle_epi8(lower, is_special, table(LOWER), lower_nibble);
    combine_bytes(upper, lower)
}

/// Four rounds of interleaving: adjacent rows, pairs of rows, then 128-bit quarters twice.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_16x16(r: [__m512; 16]) -> [__m512; 16] {
    let mut pairs = [_mm512_setzero_ps(); 16];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // quads[4 q + c]: column c of each 128-bit quarter, rows 4 q .. 4 q + 4
    let mut quads = [_mm512_setzero_ps(); 16];
    for q in 0..4 {
        for half in 0..2 {
            let (a, b) = (pairs[4 * q + half], pairs[4 * q + 2 + half]);
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            quads[4 * q + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quads[4 * q + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    let mut out = [_mm512_setzero_ps(); 16];
    for c in 0..4 {
        let (q0, q1, q2, q3) = (quads[c], quads[4 + c], quads[8 + c], quads[12 + c]);
        let even_low = _mm512_shuffle_f32x4::<0x88>(q0, q1);
        let odd_low = _mm512_shuffle_f32x4::<0xdd>(q0, q1);
        let even_high = _mm512_shuffle_f32x4::<0x88>(q2, q3);
        let odd_high = _mm512_shuffle_f32x4::<0xdd>(q2, q3);
        out[c] = _mm512_shuffle_f32x4::<0x88>(even_low, even_high);
        out[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even_low, even_high);
        out[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high);
        out[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd_low, odd_high);
    }
    out
}

/// The conversion of 64 e4m3 bytes to bf16, with or without VBMI tables; `None` if this machine lacks the instructions.
///
/// For the integration tests: a unit test would compile the crate twice.
pub fn convert_e4m3(bytes: &[u8; 64], tables: bool) -> Option<[bf16; 64]> {
    let avx512 = Avx512::new().filter(|avx512| avx512.vbmi || !tables)?;
    let mut found = [[bf16::ZERO; 32]; 2];
    // SAFETY: both arrays have 64 bytes; `avx512` proves the instructions.
    unsafe {
        let words = _mm512_loadu_si512(bytes.as_ptr().cast());
        let (even, odd) = Avx512 { vbmi: tables && avx512.vbmi }.e4m3_to_bf16(words);
        _mm512_storeu_si512(found[0].as_mut_ptr().cast(), even);
        _mm512_storeu_si512(found[1].as_mut_ptr().cast(), odd);
    }
    Some(std::array::from_fn(|at| found[at % 2][at / 2]))
}
