//! bf16 dot products of AVX-512, and the moving and rounding that its and AMX's products need.

use super::DEPTH;
use crate::cpu::simd::{avx512::Avx512, tile::Matrix};
use half::bf16;
use std::arch::x86_64::*;

/// Rows of a block of accumulators: with 4 registers a row, enough to hide the latency of the products.
const ROWS: usize = 4;

/// Proof that this machine has AVX-512 F, BW, DQ, VL and BF16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Bf16(());

impl Avx512Bf16 {
    pub(crate) fn new() -> Option<Self> {
        let found = Avx512::new().is_some() && is_x86_feature_detected!("avx512bf16");
        found.then_some(Self(()))
    }

    /// # Safety
    /// As [`super::Dots::multiply`].
    pub(super) unsafe fn multiply(
        self,
        (rows, columns, depth): (usize, usize, usize),
        a: Matrix<*const bf16>,
        b: Matrix<*const f32>,
        c: Matrix<*mut f32>,
    ) {
        // SAFETY: `self` is proof of the instructions; the rest is the caller's promise.
        unsafe { multiply((rows, columns, depth), a, b, c) }
    }

    /// Writes `(rows.0[i], rows.1[i])` for `width` columns, 0 for a row that is not there; says whether each is finite.
    ///
    /// # Safety
    /// `to` has room for `width` pairs; `width` is a multiple of 16 and the length of both rows.
    pub(super) unsafe fn interleave(
        self,
        rows: (Option<&[bf16]>, Option<&[bf16]>),
        width: usize,
        to: *mut f32,
    ) -> (bool, bool) {
        let at = |row: Option<&[bf16]>| row.map(|row| row[..width].as_ptr());
        // SAFETY: `self` is proof of the instructions; the rest is the caller's promise.
        unsafe { interleave((at(rows.0), at(rows.1)), width, to) }
    }

    /// # Safety
    /// As one row of [`super::Dots::round_weights`].
    pub(super) unsafe fn round(self, weights: *const f32, width: usize, to: *mut bf16) {
        // SAFETY: `self` is proof of the instructions; the rest is the caller's promise.
        unsafe { round(weights, width, to) }
    }
}

/// # Safety
/// As [`super::Dots::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn multiply(
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
                    block::<4>(depth, a, b, c);
                    column += 64;
                } else {
                    block::<1>(depth, a, b, c);
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
unsafe fn block<const COLUMNS: usize>(
    depth: usize,
    a: Matrix<*const bf16>,
    b: Matrix<*const f32>,
    c: Matrix<*mut f32>,
) {
    let mut sum = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
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

/// # Safety
/// As [`Avx512Bf16::interleave`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave(
    rows: (Option<*const bf16>, Option<*const bf16>),
    width: usize,
    to: *mut f32,
) -> (bool, bool) {
    let exponent = _mm256_set1_epi16(0x7f80);
    let special = |row| _mm256_cmpeq_epi16_mask(_mm256_and_si256(row, exponent), exponent);
    let mut found = (0, 0);
    for at in (0..width).step_by(16) {
        let load = |row: Option<*const bf16>| match row {
            // SAFETY: the row has `width` elements, a multiple of 16.
            Some(row) => unsafe { _mm256_loadu_si256(row.add(at).cast()) },
            None => _mm256_setzero_si256(),
        };
        let (a, b) = (load(rows.0), load(rows.1));
        found = (found.0 | special(a), found.1 | special(b));
        let (lower, upper) = (_mm512_cvtepu16_epi32(a), _mm512_cvtepu16_epi32(b));
        let pairs = _mm512_or_si512(lower, _mm512_slli_epi32::<16>(upper));
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.add(at).cast(), pairs) };
    }
    (found.0 == 0, found.1 == 0)
}

/// # Safety
/// As one row of [`super::Dots::round_weights`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn round(weights: *const f32, width: usize, to: *mut bf16) {
    for at in (0..width.next_multiple_of(DEPTH)).step_by(16) {
        // SAFETY: the caller's promise; the transmuted types are 256 bits of bf16.
        unsafe {
            let rounded = match at < width {
                true => {
                    let rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(weights.add(at)));
                    std::mem::transmute::<__m256bh, __m256i>(rounded)
                }
                false => _mm256_setzero_si256(),
            };
            _mm256_storeu_si256(to.add(at).cast(), rounded);
        }
    }
}
