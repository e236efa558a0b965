//! The matrix micro-kernel: `C += A · B` on a strip of at most six rows.
//!
//! ```text
//! for each block of columns:  keep C's strip in registers
//!     for k in 0..depth:      one row of B, one element of A per row, one multiply-add each
//! ```
//!
//! Each element of C is one chain of multiply-adds over ascending `k`, whatever strip or column block it falls
//! in: that is why attention gives the same bits for a row alone and among others.

use super::Simd;

/// A row-major matrix in memory: its first element and the distance between rows.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<P> {
    pub(crate) at: P,
    pub(crate) stride: usize,
}

/// `c += a · b`.
///
/// # Safety
/// With `width` rounded up to whole registers: `a` is readable as `[rows, depth]`, `b` as `[depth, width]`, `c`
/// readable and writable as `[rows, width]`, and `c` overlaps neither; `rows <= 6`.
#[inline(always)]
pub(crate) unsafe fn multiply_add<S: Simd>(
    simd: S,
    (rows, width, depth): (usize, usize, usize),
    a: Matrix<*const f32>,
    b: Matrix<*const f32>,
    c: Matrix<*mut f32>,
) {
    let shape = (width, depth);
    // SAFETY: the caller's promise; each arm takes as many rows as it says.
    unsafe {
        match rows {
            0 => {}
            1 => strip::<S, 1>(simd, shape, a, b, c),
            2 => strip::<S, 2>(simd, shape, a, b, c),
            3 => strip::<S, 3>(simd, shape, a, b, c),
            4 => strip::<S, 4>(simd, shape, a, b, c),
            5 => strip::<S, 5>(simd, shape, a, b, c),
            _ => strip::<S, 6>(simd, shape, a, b, c),
        }
    }
}

/// # Safety
/// As [`multiply_add`].
#[inline(always)]
unsafe fn strip<S: Simd, const ROWS: usize>(
    simd: S,
    (width, depth): (usize, usize),
    a: Matrix<*const f32>,
    b: Matrix<*const f32>,
    c: Matrix<*mut f32>,
) {
    let mut column = 0;
    while column < width {
        let registers = (width - column).div_ceil(S::LANES);
        let (b, c) =
            (Matrix { at: b.at.wrapping_add(column), ..b }, Matrix { at: c.at.wrapping_add(column), ..c });
        // SAFETY: the caller's promise for the columns from `column` on.
        unsafe {
            if S::TILE_COLUMNS == 4 && registers >= 4 {
                block::<S, ROWS, 4>(simd, depth, a, b, c);
                column += 4 * S::LANES;
            } else if registers >= 2 {
                block::<S, ROWS, 2>(simd, depth, a, b, c);
                column += 2 * S::LANES;
            } else {
                block::<S, ROWS, 1>(simd, depth, a, b, c);
                column += S::LANES;
            }
        }
    }
}

/// # Safety
/// As [`multiply_add`], for `ROWS` rows and `COLUMNS` registers.
#[inline(always)]
unsafe fn block<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    depth: usize,
    a: Matrix<*const f32>,
    b: Matrix<*const f32>,
    c: Matrix<*mut f32>,
) {
    // SAFETY: the caller's promise; all offsets are inside the shapes it names.
    unsafe {
        let mut sum = [[simd.splat(0.0); COLUMNS]; ROWS];
        for (r, row) in sum.iter_mut().enumerate() {
            for (v, register) in row.iter_mut().enumerate() {
                *register = simd.load(c.at.add(r * c.stride + v * S::LANES));
            }
        }
        let mut b_row = b.at;
        for k in 0..depth {
            let mut right = [simd.splat(0.0); COLUMNS];
            for (v, register) in right.iter_mut().enumerate() {
                *register = simd.load(b_row.add(v * S::LANES));
            }
            for (r, row) in sum.iter_mut().enumerate() {
                let left = simd.splat(*a.at.add(r * a.stride + k));
                for (register, right) in row.iter_mut().zip(right) {
                    *register = simd.mul_add(left, right, *register);
                }
            }
            b_row = b_row.wrapping_add(b.stride);
        }
        for (r, row) in sum.into_iter().enumerate() {
            for (v, register) in row.into_iter().enumerate() {
                simd.store(c.at.add(r * c.stride + v * S::LANES), register);
            }
        }
    }
}
