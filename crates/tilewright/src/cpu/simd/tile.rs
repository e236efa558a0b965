//! The matrix micro-kernel: `C += A · B` on a strip of at most six rows.
//!
//! ```text
//! for each block of columns:  keep C's strip in registers
//!     for k in 0..depth:      one row of B, one element of A per row, one multiply-add each
//! ```
//!
//! Each element of C is one chain of multiply-adds over ascending `k`, whatever strip or column block it falls
//! in: that is why attention gives the same bits for a row alone and among others.

use super::{Simd, Task};
use crate::{E4m3, E5m2};
use half::{bf16, f16};

/// A row-major matrix in memory: its first element and the distance between rows.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<P> {
    pub(crate) at: P,
    pub(crate) stride: usize,
}

/// The right side of a product: rows that are read register by register.
pub(crate) trait Right: Copy {
    /// Elements `column..column + LANES` of row `k`.
    ///
    /// # Safety
    /// The elements are there.
    unsafe fn load<S: Simd>(self, simd: S, k: usize, column: usize) -> S::V;
    /// `N` registers of row `k` from `column` on.
    ///
    /// # Safety
    /// The elements are there.
    #[inline(always)]
    unsafe fn load_row<S: Simd, const N: usize>(self, simd: S, k: usize, column: usize) -> [S::V; N] {
        let mut row = [simd.splat(0.0); N];
        for (v, register) in row.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *register = unsafe { self.load(simd, k, column + v * S::LANES) };
        }
        row
    }
    /// The same without the first `rows` rows.
    fn skip(self, rows: usize) -> Self;
}

impl Right for Matrix<*const f32> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load(self.at.add(k * self.stride + column)) }
    }
    #[inline(always)]
    fn skip(self, rows: usize) -> Self {
        Self { at: self.at.wrapping_add(rows * self.stride), ..self }
    }
}

/// Rows of any dtype that begin at `offsets`, widened as they are read.
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    offsets: &'a [usize],
}

impl<'a, T> Rows<'a, T> {
    /// Rows of `width` elements, all of which are in `data`.
    #[inline(always)]
    pub(crate) fn new(data: &'a [T], offsets: &'a [usize], width: usize) -> Self {
        assert!(offsets.iter().all(|offset| offset + width <= data.len()), "rows lie inside the data");
        Self { data, offsets }
    }
}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Rows<'_, T> {}

macro_rules! right_of_rows {
    ($($T:ty, $load:ident $(, $load_four:ident)?);+) => {$(
        impl Right for Rows<'_, $T> {
            #[inline(always)]
            unsafe fn load<S: Simd>(self, simd: S, k: usize, column: usize) -> S::V {
                // SAFETY: the caller's promise.
                unsafe { simd.$load(self.data.as_ptr().add(*self.offsets.get_unchecked(k) + column)) }
            }
            $(
                #[inline(always)]
                unsafe fn load_row<S: Simd, const N: usize>(self, simd: S, k: usize, column: usize) -> [S::V; N] {
                    let mut row = [simd.splat(0.0); N];
                    // SAFETY: the caller's promise.
                    unsafe {
                        let at = self.data.as_ptr().add(*self.offsets.get_unchecked(k) + column);
                        if N == 4 {
                            row.copy_from_slice(&simd.$load_four(at));
                        } else {
                            for (v, register) in row.iter_mut().enumerate() {
                                *register = simd.$load(at.add(v * S::LANES));
                            }
                        }
                    }
                    row
                }
            )?
            #[inline(always)]
            fn skip(self, rows: usize) -> Self {
                Self { offsets: &self.offsets[rows..], ..self }
            }
        }
    )+};
}
right_of_rows!(f32, load; f16, load_f16; bf16, load_bf16; E4m3, load_e4m3, load_four_e4m3; E5m2, load_e5m2; i8, load_i8);

/// `c += a · b` as a function of its own: see [`Simd::vectorize`].
pub(super) struct Product<B> {
    /// Rows, width, depth.
    pub(super) shape: (usize, usize, usize),
    pub(super) a: Matrix<*const f32>,
    pub(super) b: B,
    pub(super) c: Matrix<*mut f32>,
}

impl<B: Right> Product<B> {
    /// Does it.
    ///
    /// # Safety
    /// As [`multiply_add`].
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd>(self, simd: S) {
        simd.vectorize(Promised(self));
    }
}

/// A product whose caller has made its promise.
struct Promised<B>(Product<B>);

impl<B: Right> Task for Promised<B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Product { shape, a, b, c } = self.0;
        // SAFETY: promised to the one function that makes a `Promised`.
        unsafe { multiply_add(simd, shape, a, b, c) };
    }
}

/// `c += a · b`.
///
/// # Safety
/// With `width` rounded up to whole registers: `a` is readable as `[rows, depth]`, `b` as `[depth, width]`, `c`
/// readable and writable as `[rows, width]`, and `c` overlaps neither; `rows <= 6`.
#[inline(always)]
pub(crate) unsafe fn multiply_add<S: Simd, B: Right>(
    simd: S,
    (rows, width, depth): (usize, usize, usize),
    a: Matrix<*const f32>,
    b: B,
    c: Matrix<*mut f32>,
) {
    let shape = (width, depth);
    // SAFETY: the caller's promise; each arm takes as many rows as it says.
    unsafe {
        match rows {
            0 => {}
            1 => strip::<S, B, 1>(simd, shape, a, b, c),
            2 => strip::<S, B, 2>(simd, shape, a, b, c),
            3 => strip::<S, B, 3>(simd, shape, a, b, c),
            4 => strip::<S, B, 4>(simd, shape, a, b, c),
            5 => strip::<S, B, 5>(simd, shape, a, b, c),
            _ => strip::<S, B, 6>(simd, shape, a, b, c),
        }
    }
}

/// # Safety
/// As [`multiply_add`].
#[inline(always)]
unsafe fn strip<S: Simd, B: Right, const ROWS: usize>(
    simd: S,
    (width, depth): (usize, usize),
    a: Matrix<*const f32>,
    b: B,
    c: Matrix<*mut f32>,
) {
    let mut column = 0;
    while column < width {
        let registers = (width - column).div_ceil(S::LANES);
        let c = Matrix { at: c.at.wrapping_add(column), ..c };
        // SAFETY: the caller's promise for the columns from `column` on.
        unsafe {
            if S::TILE_COLUMNS == 4 && registers >= 4 {
                block::<S, B, ROWS, 4>(simd, depth, a, (b, column), c);
                column += 4 * S::LANES;
            } else if registers >= 2 {
                block::<S, B, ROWS, 2>(simd, depth, a, (b, column), c);
                column += 2 * S::LANES;
            } else {
                block::<S, B, ROWS, 1>(simd, depth, a, (b, column), c);
                column += S::LANES;
            }
        }
    }
}

/// # Safety
/// As [`multiply_add`], for `ROWS` rows and `COLUMNS` registers from column `first` of `b` on.
#[inline(always)]
unsafe fn block<S: Simd, B: Right, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    depth: usize,
    a: Matrix<*const f32>,
    (b, first): (B, usize),
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
        for k in 0..depth {
            let right: [S::V; COLUMNS] = b.load_row(simd, k, first);
            for (r, row) in sum.iter_mut().enumerate() {
                let left = simd.splat(*a.at.add(r * a.stride + k));
                for (register, right) in row.iter_mut().zip(right) {
                    *register = simd.mul_add(left, right, *register);
                }
            }
        }
        for (r, row) in sum.into_iter().enumerate() {
            for (v, register) in row.into_iter().enumerate() {
                simd.store(c.at.add(r * c.stride + v * S::LANES), register);
            }
        }
    }
}
