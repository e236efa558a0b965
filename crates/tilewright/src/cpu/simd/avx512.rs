//! The AVX-512 leaf: 16 lanes, 32 registers.

use super::{Simd, Task};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Proof that this machine has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn new() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma");
        found.then_some(Self(()))
    }
}

/// SAFETY: of every block in this file: `self` exists only where the instructions do (see `new`), and memory
/// arguments are valid by each function's own contract.
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const TILE_COLUMNS: usize = 4;
    const TILE_ROWS: usize = 6;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, value: __m512) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(to, value) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn scale_or_zero(self, a: __m512, n: __m512, x: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            // "not less than" keeps NaN
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(keep, a, n)
        }
    }

    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        // SAFETY: see the impl.
        unsafe { _mm512_reduce_max_ps(a) }
    }

    #[inline(always)]
    fn any_above(self, a: __m512, b: __m512) -> bool {
        // SAFETY: see the impl.
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) != 0 }
    }

    #[inline(always)]
    fn reduce_add(self, a: __m512) -> f32 {
        // SAFETY: see the impl.
        unsafe { _mm512_reduce_add_ps(a) }
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const f32], mut each: impl FnMut(usize, __m512)) {
        assert!(rows.len() == Self::LANES, "a whole block");
        // SAFETY: see the impl.
        unsafe {
            let mut block = [_mm512_setzero_ps(); 16];
            for (register, &row) in block.iter_mut().zip(rows) {
                *register = _mm512_loadu_ps(row);
            }
            for (i, column) in transpose_16x16(block).into_iter().enumerate() {
                each(i, column);
            }
        }
    }

    #[inline(always)]
    fn split_bf16(self, pairs: __m512) -> (__m512, __m512) {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm512_castps_si512(pairs);
            let upper = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(upper))
        }
    }

    #[inline(always)]
    fn split_f16(self, pairs: __m512) -> (__m512, __m512) {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm512_castps_si512(pairs);
            let upper = _mm512_srli_epi32::<16>(bits);
            (_mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(upper)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    fn prefetch(self, from: *const u8) {
        // SAFETY: see the impl; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline(always)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
        fn vectorized<T: Task>(simd: Avx512, task: T) -> T::Output {
            task.run(simd)
        }
        // SAFETY: see the impl.
        unsafe { vectorized(self, task) }
    }
}

/// Four rounds of interleaving: neighbours, pairs, then 128-bit quarters twice.
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
