//! f32 matrix micro-kernel: `C += A · B` for a strip of at most six rows.
//!
//! ```text
//! for each block of columns:  load the strip of C into registers
//!     for k in 0..depth:      load one row of B, broadcast one element of A per row, multiply-add
//!                             store the strip of C
//! ```
//!
//! Each element of C is one chain of multiply-adds over ascending `k`, independent of its strip and column block.
//! So attention over a row is bit-identical for every batch.

use super::{Simd, Task};
use crate::{E4m3, E5m2};
use half::{bf16, f16};

/// A row-major matrix in memory: pointer to its first element and row stride.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<P> {
    pub(crate) ptr: P,
    pub(crate) stride: usize,
}

/// The shape of a product `[rows, depth] · [depth, columns]`.
#[derive(Clone, Copy)]
pub(crate) struct ProductShape {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
}

/// The right-hand side of a product, loaded row by row in registers.
pub(crate) trait RhsMatrix: Copy {
    /// Elements `column..column + LANES` of row `k`.
    ///
    /// # Safety
    /// The elements are readable.
    unsafe fn load<S: Simd>(self, simd: S, k: usize, column: usize) -> S::V;
    /// `N` registers of row `k` from `column` on.
    ///
    /// # Safety
    /// The elements are readable.
    #[inline(always)]
    unsafe fn load_row<S: Simd, const N: usize>(self, simd: S, k: usize, column: usize) -> [S::V; N] {
        let mut row = [simd.splat(0.0); N];
        for (v, register) in row.iter_mut().enumerate() {
            // SAFETY: the caller guarantees `N` readable registers of row `k` from `column` on.
            *register = unsafe { self.load(simd, k, column + v * S::LANES) };
        }
        row
    }
    /// The matrix without its first `rows` rows.
    fn skip(self, rows: usize) -> Self;
}

impl RhsMatrix for Matrix<*const f32> {
    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, k: usize, column: usize) -> S::V {
        // SAFETY: the caller guarantees a readable register of row `k` at `column`.
        unsafe { simd.load(self.ptr.add(k * self.stride + column)) }
    }
    #[inline(always)]
    fn skip(self, rows: usize) -> Self {
        Self { ptr: self.ptr.wrapping_add(rows * self.stride), ..self }
    }
}

/// Rows of any dtype at `offsets`, dequantized as they are loaded.
pub(crate) struct KvRows<'a, T> {
    data: &'a [T],
    offsets: &'a [usize],
}

impl<'a, T> KvRows<'a, T> {
    /// Rows of `width` elements.
    ///
    /// # Panics
    /// If a row exceeds `data`.
    #[inline(always)]
    pub(crate) fn new(data: &'a [T], offsets: &'a [usize], width: usize) -> Self {
        assert!(offsets.iter().all(|offset| offset + width <= data.len()), "rows lie inside the data");
        Self { data, offsets }
    }
}

impl<T> Clone for KvRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for KvRows<'_, T> {}

macro_rules! kv_rows {
    ($($T:ty, $load:ident $(, $load_four:ident)?);+) => {$(
        impl RhsMatrix for KvRows<'_, $T> {
            #[inline(always)]
            unsafe fn load<S: Simd>(self, simd: S, k: usize, column: usize) -> S::V {
                // SAFETY: `new` checked the rows; the caller guarantees row `k` and a register of it at `column`.
                unsafe { simd.$load(self.data.as_ptr().add(*self.offsets.get_unchecked(k) + column)) }
            }
            $(
                #[inline(always)]
                unsafe fn load_row<S: Simd, const N: usize>(self, simd: S, k: usize, column: usize) -> [S::V; N] {
                    let mut row = [simd.splat(0.0); N];
                    // SAFETY: `new` checked the rows; the caller guarantees row `k` and `N` registers from `column` on.
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
kv_rows!(f32, load; f16, load_f16; bf16, load_bf16; E4m3, load_e4m3, load_four_e4m3; E5m2, load_e5m2; i8, load_i8);

/// `c += a · b`.
#[derive(Clone, Copy)]
pub(super) struct MatrixProduct<B> {
    pub(super) shape: ProductShape,
    pub(super) a: Matrix<*const f32>,
    pub(super) b: B,
    pub(super) c: Matrix<*mut f32>,
}

impl<B: RhsMatrix> MatrixProduct<B> {
    /// Runs the product as a separate function (see [`Simd::vectorize`]).
    ///
    /// # Safety
    /// Same as [`multiply_add`].
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd>(self, simd: S) {
        simd.vectorize(ProductTask(self));
    }
}

/// A product that meets the contract of [`MatrixProduct::run`], its only constructor.
struct ProductTask<B>(MatrixProduct<B>);

impl<B: RhsMatrix> Task for ProductTask<B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: the contract of `MatrixProduct::run`.
        unsafe { multiply_add(simd, self.0) };
    }
}

/// `c += a · b`.
///
/// # Safety
/// With `columns` rounded up to whole registers: `a` is readable as `[rows, depth]`, `b` as `[depth, columns]`, `c`
/// readable and writable as `[rows, columns]`, and `c` overlaps neither; `rows <= S::TILE_ROWS`.
#[inline(always)]
pub(super) unsafe fn multiply_add<S: Simd, B: RhsMatrix>(simd: S, product: MatrixProduct<B>) {
    // SAFETY: the caller guarantees `a`, `b` and `c` in `shape`; each arm processes `rows` rows.
    unsafe {
        match product.shape.rows {
            0 => {}
            1 => strip::<S, B, 1>(simd, product),
            2 => strip::<S, B, 2>(simd, product),
            3 => strip::<S, B, 3>(simd, product),
            4 => strip::<S, B, 4>(simd, product),
            // constant conditions: a set with shorter strips has no code for these
            5 if const { S::TILE_ROWS >= 5 } => strip::<S, B, 5>(simd, product),
            6 if const { S::TILE_ROWS >= 6 } => strip::<S, B, 6>(simd, product),
            _ => unreachable!("at most `TILE_ROWS` rows"),
        }
    }
}

/// # Safety
/// Same as [`multiply_add`].
#[inline(always)]
unsafe fn strip<S: Simd, B: RhsMatrix, const ROWS: usize>(simd: S, product: MatrixProduct<B>) {
    let mut column = 0;
    while column < product.shape.columns {
        let registers = (product.shape.columns - column).div_ceil(S::LANES);
        // SAFETY: the columns from `column` on, rounded up to whole registers, are in the caller's shapes.
        unsafe {
            if const { S::TILE_COLUMNS == 4 } && registers >= 4 {
                block::<S, B, ROWS, 4>(simd, product, column);
                column += 4 * S::LANES;
            } else if registers >= 2 {
                block::<S, B, ROWS, 2>(simd, product, column);
                column += 2 * S::LANES;
            } else {
                block::<S, B, ROWS, 1>(simd, product, column);
                column += S::LANES;
            }
        }
    }
}

/// # Safety
/// Same as [`multiply_add`], for `ROWS` rows and `COLUMNS` registers from column `first` on.
#[inline(always)]
unsafe fn block<S: Simd, B: RhsMatrix, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    MatrixProduct { shape, a, b, c }: MatrixProduct<B>,
    first: usize,
) {
    let c = Matrix { ptr: c.ptr.wrapping_add(first), ..c };
    // SAFETY: the caller guarantees `ROWS` rows, `depth` and `COLUMNS` registers; all offsets are within them.
    unsafe {
        let mut sum = [[simd.splat(0.0); COLUMNS]; ROWS];
        for (r, row) in sum.iter_mut().enumerate() {
            for (v, register) in row.iter_mut().enumerate() {
                *register = simd.load(c.ptr.add(r * c.stride + v * S::LANES));
            }
        }
        for k in 0..shape.depth {
            let right: [S::V; COLUMNS] = b.load_row(simd, k, first);
            for (r, row) in sum.iter_mut().enumerate() {
                let left = simd.splat(*a.ptr.add(r * a.stride + k));
                for (register, right) in row.iter_mut().zip(right) {
                    *register = simd.mul_add(left, right, *register);
                }
            }
        }
        for (r, row) in sum.into_iter().enumerate() {
            for (v, register) in row.into_iter().enumerate() {
                simd.store(c.ptr.add(r * c.stride + v * S::LANES), register);
            }
        }
    }
}
