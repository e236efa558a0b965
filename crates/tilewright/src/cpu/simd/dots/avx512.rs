//! bf16 dot products of AVX-512, and the moving and rounding that its and AMX's products need.

use super::DEPTH;
use crate::{
    E4m3, E5m2, Element,
    cpu::simd::{avx512::Avx512, tile::Matrix},
};
use half::bf16;
use std::arch::x86_64::*;

/// Rows of a block of accumulators: with 4 registers a row, enough to hide the latency of the products.
const ROWS: usize = 4;

/// Proof that this machine has AVX-512 F, BW, DQ, VL and BF16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    pub(crate) fn new() -> Option<Self> {
        Avx512::new().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
    }

    /// # Safety
    /// As [`super::Dots::multiply`].
    #[inline(always)]
    pub(super) unsafe fn multiply<const ADD: bool>(
        self,
        (rows, columns, depth): (usize, usize, usize),
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        // SAFETY: `self` is proof of the instructions; the rest is the caller's promise.
        unsafe { multiply::<ADD>((rows, columns, depth), a, b, c) }
    }

    /// Writes `(rows.0[i], rows.1[i])` for `width` columns, 0 for a row that is not there; says whether each is finite.
    ///
    /// # Safety
    /// `to` has room for `width` pairs; `width` is a multiple of [`Paired::COLUMNS`] and the length of both rows.
    pub(super) unsafe fn interleave<T: Paired>(
        self,
        rows: (Option<&[T]>, Option<&[T]>),
        width: usize,
        to: *mut f32,
    ) -> (bool, bool) {
        let at = |row: Option<&[T]>| row.map(|row| row[..width].as_ptr());
        // SAFETY: `self` is proof of the instructions; the rest is the caller's promise.
        unsafe { interleave(self.0, (at(rows.0), at(rows.1)), width, to) }
    }

    /// Writes the first and third element of each of 16 words as 16 pairs, and the others `stride` elements further on.
    ///
    /// # Safety
    /// `words` is readable as 64 bytes, `to` writable at both places.
    #[inline(always)]
    pub(super) unsafe fn split<T: Paired>(self, words: *const i32, to: *mut f32, stride: usize) {
        // SAFETY: `self` is proof of the instructions; the rest is the caller's promise.
        unsafe {
            let (even, odd) = T::widen(self.0, _mm512_loadu_si512(words.cast()));
            _mm512_storeu_si512(to.cast(), even);
            _mm512_storeu_si512(to.wrapping_add(stride).cast(), odd);
        }
    }

    /// # Safety
    /// As [`super::Dots::round_weights`].
    pub(super) unsafe fn round(self, weights: *const f32, width: usize, to: *mut bf16) {
        // SAFETY: `self` is proof of the instructions; the rest is the caller's promise.
        unsafe { round(weights, width, to) }
    }
}

/// # Safety
/// As [`super::Dots::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn multiply<const ADD: bool>(
    (rows, columns, depth): (usize, usize, usize),
    a: Matrix<*const bf16>,
    b: Matrix<*const f32>,
    c: Matrix<*mut f32>,
) {
    for row in (0..rows).step_by(ROWS) {
        let a = Matrix { at: a.at.wrapping_add(row * a.stride), ..a };
        let mut column = 0;
        while column < columns {
            let b = Matrix { at: b.at.wrapping_add(column), ..b };
            let c = Matrix { at: c.at.wrapping_add(row * c.stride + column), ..c };
            // SAFETY: the caller's promise; rows of `a` and `c` are there up to a multiple of 16.
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
/// As [`super::Dots::multiply`], for [`ROWS`] rows and `COLUMNS` registers.
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
            // SAFETY: the caller's promise.
            *register = unsafe { _mm512_loadu_ps(c.at.add(r * c.stride + 16 * v)) };
        }
    }
    for k in 0..depth / 2 {
        let mut right = [_mm512_setzero_ps(); COLUMNS];
        for (v, register) in right.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *register = unsafe { _mm512_loadu_ps(b.at.add(k * b.stride + 16 * v)) };
        }
        for (r, row) in sum.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let pair = unsafe { a.at.add(r * a.stride + 2 * k).cast::<i32>().read_unaligned() };
            let left = _mm512_set1_epi32(pair);
            for (sum, right) in row.iter_mut().zip(right) {
                *sum = dot(*sum, left, right);
            }
        }
    }
    for (r, row) in sum.into_iter().enumerate() {
        for (v, register) in row.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_ps(c.at.add(r * c.stride + 16 * v), register) };
        }
    }
}

/// `sum + a.0 · b.0 + a.1 · b.1` in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot(sum: __m512, a: __m512i, b: __m512) -> __m512 {
    // SAFETY: the three types are 512 bits that mean what the instruction makes of them.
    unsafe {
        let (a, b) =
            (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b));
        _mm512_dpbf16_ps(sum, a, b)
    }
}

/// Elements that bf16 holds exactly.
pub(super) trait Paired: Element {
    /// Columns that are interleaved at once.
    const COLUMNS: usize;

    /// Elements of 8 bits as bf16: those of even and those of odd bytes.
    ///
    /// # Safety
    /// The machine has AVX-512 with BF16.
    unsafe fn widen(avx512: Avx512, bytes: __m512i) -> (__m512i, __m512i);

    /// The pairs `(rows.0[i], rows.1[i])` of so many columns in one or two registers; a row that is not there is 0.
    ///
    /// # Safety
    /// The machine has AVX-512 with BF16, and the rows are readable for [`Paired::COLUMNS`] elements.
    #[inline(always)]
    unsafe fn pairs(avx512: Avx512, rows: (Option<*const Self>, Option<*const Self>)) -> [__m512i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let load = |row: Option<*const Self>| match row {
                Some(row) => _mm256_loadu_si256(row.cast()),
                None => _mm256_setzero_si256(),
            };
            let (a, b) = (_mm512_castsi256_si512(load(rows.0)), _mm512_castsi256_si512(load(rows.1)));
            // two elements of one row beside the two of the other, so that even bytes make pairs, and odd ones do
            let twos = _mm512_permutex2var_epi16(a, EACH_OF_BOTH_16, b);
            let (even, odd) = Self::widen(avx512, twos);
            [
                _mm512_permutex2var_epi32(even, FIRST_OF_BOTH_32, odd),
                _mm512_permutex2var_epi32(even, SECOND_OF_BOTH_32, odd),
            ]
        }
    }
}

/// `0, n, 1, n + 1, ..` from `first` on, for registers of `n` lanes.
const fn alternating<const N: usize>(first: u16) -> [u16; N] {
    let mut index = [0; N];
    let mut at = 0;
    while at < N {
        index[at] = first + (at / 2) as u16 + if at % 2 == 1 { N as u16 } else { 0 };
        at += 1;
    }
    index
}

const fn wide(index: [u16; 16]) -> [u32; 16] {
    let mut wide = [0; 16];
    let mut at = 0;
    while at < 16 {
        wide[at] = index[at] as u32;
        at += 1;
    }
    wide
}

// SAFETY: registers are 64 bytes without any meaning of their own.
const EACH_OF_BOTH_16: __m512i = unsafe { std::mem::transmute(alternating::<32>(0)) };
// SAFETY: as above.
const FIRST_OF_BOTH_32: __m512i = unsafe { std::mem::transmute(wide(alternating::<16>(0))) };
// SAFETY: as above.
const SECOND_OF_BOTH_32: __m512i = unsafe { std::mem::transmute(wide(alternating::<16>(8))) };

impl Paired for bf16 {
    const COLUMNS: usize = 16;

    #[inline(always)]
    unsafe fn widen(_: Avx512, _: __m512i) -> (__m512i, __m512i) {
        unreachable!("bf16 has no elements of 8 bits")
    }

    #[inline(always)]
    unsafe fn pairs(_: Avx512, rows: (Option<*const Self>, Option<*const Self>)) -> [__m512i; 2] {
        // SAFETY: the caller's promise.
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

impl Paired for E4m3 {
    const COLUMNS: usize = 32;

    #[inline(always)]
    unsafe fn widen(avx512: Avx512, bytes: __m512i) -> (__m512i, __m512i) {
        avx512.bf16_of_e4m3(bytes)
    }
}

impl Paired for E5m2 {
    const COLUMNS: usize = 32;

    #[inline(always)]
    unsafe fn widen(_: Avx512, bytes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: the caller's promise.
        unsafe {
            let odd = _mm512_and_si512(bytes, _mm512_set1_epi16(0xff00_u16.cast_signed()));
            (bf16_of_f16(_mm512_slli_epi16::<8>(bytes)), bf16_of_f16(odd))
        }
    }
}

impl Paired for i8 {
    const COLUMNS: usize = 32;

    #[inline(always)]
    unsafe fn widen(_: Avx512, bytes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: the caller's promise.
        unsafe {
            let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes));
            (bf16_of_i16(even), bf16_of_i16(_mm512_srai_epi16::<8>(bytes)))
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn bf16_of_f16(halves: __m512i) -> __m512i {
    let lower = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    let upper = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves));
    rounded(lower, upper)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn bf16_of_i16(integers: __m512i) -> __m512i {
    let lower = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(integers)));
    let upper = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64::<1>(integers)));
    rounded(lower, upper)
}

/// The nearest bf16 of 32 numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn rounded(lower: __m512, upper: __m512) -> __m512i {
    // SAFETY: both types are 512 bits of bf16.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(upper, lower)) }
}

/// # Safety
/// As [`Avx512Bf16::interleave`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn interleave<T: Paired>(
    avx512: Avx512,
    rows: (Option<*const T>, Option<*const T>),
    width: usize,
    to: *mut f32,
) -> (bool, bool) {
    let exponent = _mm512_set1_epi16(0x7f80);
    let mut special = 0;
    for at in (0..width).step_by(T::COLUMNS) {
        // SAFETY: the caller's promise.
        unsafe {
            let from = |row: Option<*const T>| row.map(|row| row.add(at));
            let pairs = T::pairs(avx512, (from(rows.0), from(rows.1)));
            for (i, pairs) in pairs.into_iter().take(T::COLUMNS / 16).enumerate() {
                special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs, exponent), exponent);
                _mm512_storeu_si512(to.add(at + 16 * i).cast(), pairs);
            }
        }
    }
    (special & 0x5555_5555 == 0, special & 0xaaaa_aaaa == 0)
}

/// # Safety
/// As [`super::Dots::round_weights`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn round(weights: *const f32, width: usize, to: *mut bf16) {
    for at in (0..width).step_by(DEPTH) {
        // SAFETY: the caller's promise.
        unsafe {
            let lower = _mm512_loadu_ps(weights.add(at));
            let upper =
                if at + 16 < width { _mm512_loadu_ps(weights.add(at + 16)) } else { _mm512_setzero_ps() };
            // a whole line at once: a tile's load would wait for two halves of one
            _mm512_storeu_si512(to.add(at).cast(), rounded(lower, upper));
        }
    }
}
