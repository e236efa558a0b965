//! AVX-512 BF16: dot products with `vdpbf16ps`, and the conversions and permutations that AMX uses, too.

use super::DEPTH;
use crate::{
    E4m3, E5m2, Element,
    cpu::simd::{Matrix, ProductShape, avx512::Avx512},
};
use half::bf16;
use std::arch::x86_64::*;

/// Rows of accumulators. With 4 registers per row, there are enough independent products to hide their latency.
const ROWS: usize = 4;

/// Proof that this machine has AVX-512 F, BW, DQ, VL and BF16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    pub(crate) fn new() -> Option<Self> {
        Avx512::new().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
    }

    /// # Safety
    /// Same as [`super::Bf16Mma::multiply`].
    #[inline(always)]
    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        shape: ProductShape,
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        // SAFETY: `self` proves the instructions; the caller guarantees the matrices of `Bf16Mma::multiply`.
        unsafe { multiply::<ADD>(shape, a, b, c) }
    }

    /// Writes `(rows.0[i], rows.1[i])` for `width` columns, with 0 for a missing row. Returns whether each row is finite.
    ///
    /// # Safety
    /// `to` is writable for `width` pairs; `width` is a multiple of [`Bf16Exact::COLUMNS`] and the length of both rows.
    pub(super) unsafe fn interleave<T: Bf16Exact>(
        self,
        rows: (Option<&[T]>, Option<&[T]>),
        width: usize,
        to: *mut f32,
    ) -> (bool, bool) {
        let at = |row: Option<&[T]>| row.map(|row| row[..width].as_ptr());
        // SAFETY: `self` proves the instructions; slices check the rows, and the caller guarantees `width` pairs at `to`.
        unsafe { interleave(self.0, (at(rows.0), at(rows.1)), width, to) }
    }

    /// Writes the first and third element of each of 16 words as pairs, and the second and fourth `stride` elements later.
    ///
    /// # Safety
    /// `words` is readable for 64 bytes, `to` is writable for 64 bytes at both offsets.
    #[inline(always)]
    pub(super) unsafe fn split<T: Bf16Exact>(self, words: *const i32, to: *mut f32, stride: usize) {
        // SAFETY: `self` proves the instructions; the caller guarantees 64 bytes at `words` and at both offsets of `to`.
        unsafe {
            let (even, odd) = T::bytes_to_bf16(self.0, _mm512_loadu_si512(words.cast()));
            _mm512_storeu_si512(to.cast(), even);
            _mm512_storeu_si512(to.wrapping_add(stride).cast(), odd);
        }
    }

    /// # Safety
    /// Same as [`super::Bf16Mma::round_weights`].
    pub(super) unsafe fn round(self, weights: *const f32, width: usize, to: *mut bf16) {
        // SAFETY: `self` proves the instructions; the caller guarantees `[64]` weights and as many elements at `to`.
        unsafe { round(weights, width, to) }
    }
}

/// # Safety
/// Same as [`super::Bf16Mma::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn multiply<const ADD: bool>(
    ProductShape { rows, columns, depth }: ProductShape,
    a: Matrix<*const bf16>,
    b: Matrix<*const f32>,
    c: Matrix<*mut f32>,
) {
    for row in (0..rows).step_by(ROWS) {
        let a = Matrix { ptr: a.ptr.wrapping_add(row * a.stride), ..a };
        let mut column = 0;
        while column < columns {
            let b = Matrix { ptr: b.ptr.wrapping_add(column), ..b };
            let c = Matrix { ptr: c.ptr.wrapping_add(row * c.stride + column), ..c };
            // SAFETY: the caller guarantees whole registers from `column` on; `a` and `c` have a multiple of 16 rows.
            unsafe {
                if columns - column >= 64 {
                    block::<ADD, 4>(depth, a, b, c);
                    column += 64;
                } else {
                    block::<ADD, 1>(depth, a, b, c);
                    column += 16;
                }
            }
        }
    }
}

/// # Safety
/// Same as [`super::Bf16Mma::multiply`], for [`ROWS`] rows and `COLUMNS` registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn block<const ADD: bool, const COLUMNS: usize>(
    depth: usize,
    a: Matrix<*const bf16>,
    b: Matrix<*const f32>,
    c: Matrix<*mut f32>,
) {
    let mut sum = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
    for (r, row) in sum.iter_mut().enumerate().filter(|_| ADD) {
        for (v, register) in row.iter_mut().enumerate() {
            // SAFETY: the caller guarantees `ROWS` rows of `COLUMNS` registers of `c`.
            *register = unsafe { _mm512_loadu_ps(c.ptr.add(r * c.stride + 16 * v)) };
        }
    }
    for k in 0..depth / 2 {
        let mut right = [_mm512_setzero_ps(); COLUMNS];
        for (v, register) in right.iter_mut().enumerate() {
            // SAFETY: the caller guarantees `depth / 2` rows of `COLUMNS` registers of `b`.
            *register = unsafe { _mm512_loadu_ps(b.ptr.add(k * b.stride + 16 * v)) };
        }
        for (r, row) in sum.iter_mut().enumerate() {
            // SAFETY: the caller guarantees `ROWS` rows of `depth` elements of `a`, and `2 k + 1 < depth`.
            let pair = unsafe { a.ptr.add(r * a.stride + 2 * k).cast::<i32>().read_unaligned() };
            let left = _mm512_set1_epi32(pair);
            for (sum, right) in row.iter_mut().zip(right) {
                *sum = dot(*sum, left, right);
            }
        }
    }
    for (r, row) in sum.into_iter().enumerate() {
        for (v, register) in row.into_iter().enumerate() {
            // SAFETY: the caller guarantees `ROWS` writable rows of `COLUMNS` registers of `c`.
            unsafe { _mm512_storeu_ps(c.ptr.add(r * c.stride + 16 * v), register) };
        }
    }
}

/// `sum + a.0 · b.0 + a.1 · b.1` in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn dot(sum: __m512, a: __m512i, b: __m512) -> __m512 {
    // SAFETY: the types are 512 bits without invalid patterns; callers have AVX-512 BF16.
    unsafe {
        let (a, b) =
            (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b));
        _mm512_dpbf16_ps(sum, a, b)
    }
}

/// Elements that bf16 represents exactly.
pub(super) trait Bf16Exact: Element {
    /// Columns per step of `interleave`.
    const COLUMNS: usize;

    /// Converts 8-bit elements to bf16: those of even bytes, then those of odd bytes.
    ///
    /// # Safety
    /// The machine has AVX-512 with BF16.
    unsafe fn bytes_to_bf16(avx512: Avx512, bytes: __m512i) -> (__m512i, __m512i);

    /// Loads the pairs `(rows.0[i], rows.1[i])` of [`Self::COLUMNS`] columns into one or two registers; a missing row is 0.
    ///
    /// # Safety
    /// The machine has AVX-512 with BF16, and the rows are readable for [`Bf16Exact::COLUMNS`] elements.
    #[inline(always)]
    unsafe fn load_pairs(avx512: Avx512, rows: (Option<*const Self>, Option<*const Self>)) -> [__m512i; 2] {
        // SAFETY: the caller guarantees AVX-512 with BF16, and 32 elements of 8 bits in each row.
        unsafe {
            let load = |row: Option<*const Self>| match row {
                Some(row) => _mm256_loadu_si256(row.cast()),
                None => _mm256_setzero_si256(),
            };
            let (a, b) = (_mm512_castsi256_si512(load(rows.0)), _mm512_castsi256_si512(load(rows.1)));
            // alternates 16-bit units of both rows, so that even bytes form pairs, and odd bytes do
            let alternating = _mm512_permutex2var_epi16(a, INTERLEAVE_16, b);
            let (even, odd) = Self::bytes_to_bf16(avx512, alternating);
            [
                _mm512_permutex2var_epi32(even, INTERLEAVE_LOW_32, odd),
                _mm512_permutex2var_epi32(even, INTERLEAVE_HIGH_32, odd),
            ]
        }
    }
}

/// The permutation `0, n, 1, n + 1, ..` from `first` on, for registers of `n` lanes.
const fn interleave_index<const N: usize>(first: u16) -> [u16; N] {
    let mut index = [0; N];
    let mut at = 0;
    while at < N {
        index[at] = first + (at / 2) as u16 + if at % 2 == 1 { N as u16 } else { 0 };
        at += 1;
    }
    index
}

const fn widen_index(index: [u16; 16]) -> [u32; 16] {
    let mut wide = [0; 16];
    let mut at = 0;
    while at < 16 {
        wide[at] = index[at] as u32;
        at += 1;
    }
    wide
}

// SAFETY: both types are 64 bytes without invalid patterns.
const INTERLEAVE_16: __m512i = unsafe { std::mem::transmute(interleave_index::<32>(0)) };
// SAFETY: both types are 64 bytes without invalid patterns.
const INTERLEAVE_LOW_32: __m512i = unsafe { std::mem::transmute(widen_index(interleave_index::<16>(0))) };
// SAFETY: both types are 64 bytes without invalid patterns.
const INTERLEAVE_HIGH_32: __m512i = unsafe { std::mem::transmute(widen_index(interleave_index::<16>(8))) };

impl Bf16Exact for bf16 {
    const COLUMNS: usize = 16;

    #[inline(always)]
    unsafe fn bytes_to_bf16(_: Avx512, _: __m512i) -> (__m512i, __m512i) {
        unreachable!("bf16 has no elements of 8 bits")
    }

    #[inline(always)]
    unsafe fn load_pairs(_: Avx512, rows: (Option<*const Self>, Option<*const Self>)) -> [__m512i; 2] {
        // SAFETY: the caller guarantees AVX-512 with BF16, and 16 elements of 16 bits in each row.
        unsafe {
            let load = |row: Option<*const Self>| match row {
                Some(row) => _mm512_cvtepu16_epi32(_mm256_loadu_si256(row.cast())),
                None => _mm512_setzero_si512(),
            };
            let pairs = _mm512_or_si512(load(rows.0), _mm512_slli_epi32::<16>(load(rows.1)));
            [pairs, _mm512_setzero_si512()]
        }
    }
}

impl Bf16Exact for E4m3 {
    const COLUMNS: usize = 32;

    #[inline(always)]
    unsafe fn bytes_to_bf16(avx512: Avx512, bytes: __m512i) -> (__m512i, __m512i) {
        avx512.e4m3_to_bf16(bytes)
    }
}

impl Bf16Exact for E5m2 {
    const COLUMNS: usize = 32;

    #[inline(always)]
    unsafe fn bytes_to_bf16(_: Avx512, bytes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: the caller guarantees AVX-512 with BF16; no memory is accessed.
        unsafe {
            let odd = _mm512_and_si512(bytes, _mm512_set1_epi16(0xff00_u16.cast_signed()));
            (f16_to_bf16(_mm512_slli_epi16::<8>(bytes)), f16_to_bf16(odd))
        }
    }
}

impl Bf16Exact for i8 {
    const COLUMNS: usize = 32;

    #[inline(always)]
    unsafe fn bytes_to_bf16(_: Avx512, bytes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: the caller guarantees AVX-512 with BF16; no memory is accessed.
        unsafe {
            let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes));
            (i16_to_bf16(even), i16_to_bf16(_mm512_srai_epi16::<8>(bytes)))
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn f16_to_bf16(halves: __m512i) -> __m512i {
    let lower = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    let upper = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves));
    round_to_bf16(lower, upper)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn i16_to_bf16(integers: __m512i) -> __m512i {
    let lower = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(integers)));
    let upper = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64::<1>(integers)));
    round_to_bf16(lower, upper)
}

/// Rounds 32 f32 values to the nearest bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn round_to_bf16(lower: __m512, upper: __m512) -> __m512i {
    // SAFETY: both types are 512 bits of bf16.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(upper, lower)) }
}

/// # Safety
/// Same as [`Avx512Bf16::interleave`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn interleave<T: Bf16Exact>(
    avx512: Avx512,
    rows: (Option<*const T>, Option<*const T>),
    width: usize,
    to: *mut f32,
) -> (bool, bool) {
    let exponent = _mm512_set1_epi16(0x7f80);
    let mut nonfinite = 0;
    for at in (0..width).step_by(T::COLUMNS) {
        // SAFETY: `at + COLUMNS <= width`; the caller guarantees `width` elements per row and `width` pairs at `to`.
        unsafe {
            let from = |row: Option<*const T>| row.map(|row| row.add(at));
            let pairs = T::load_pairs(avx512, (from(rows.0), from(rows.1)));
            for (i, pairs) in pairs.into_iter().take(T::COLUMNS / 16).enumerate() {
                nonfinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs, exponent), exponent);
                _mm512_storeu_si512(to.add(at + 16 * i).cast(), pairs);
            }
        }
    }
    (nonfinite & 0x5555_5555 == 0, nonfinite & 0xaaaa_aaaa == 0)
}

/// # Safety
/// Same as [`super::Bf16Mma::round_weights`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn round(weights: *const f32, width: usize, to: *mut bf16) {
    for at in (0..width).step_by(DEPTH) {
        // SAFETY: `at <= 32`; the caller guarantees `[64]` weights and as many elements at `to`.
        unsafe {
            let lower = _mm512_loadu_ps(weights.add(at));
            let upper =
                if at + 16 < width { _mm512_loadu_ps(weights.add(at + 16)) } else { _mm512_setzero_ps() };
            // one full-line store, because a tile load stalls on two half-line stores
            _mm512_storeu_si512(to.add(at).cast(), round_to_bf16(lower, upper));
        }
    }
}
