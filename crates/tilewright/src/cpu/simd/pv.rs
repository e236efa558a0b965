//! The P·V product `o += weights · values`, restricted to the visible keys of each row.

use super::{Matrix, MatrixProduct, ProductShape, RhsMatrix, Simd, Task, tile::multiply_add};
use std::ops::Range;

/// `o += weights · values` over the visible keys of each row.
///
/// 1. Rows are processed separately over the keys before the longest run that is visible to all rows.
/// 2. All rows are processed together over that run.
/// 3. Rows are processed separately over the keys after it.
///
/// Each row adds its keys in ascending order, so its result does not depend on the other rows.
pub(super) struct PvProduct<'a, B> {
    /// Visible mask of each row.
    pub(super) visible: &'a [u64],
    /// Elements per value.
    pub(super) dim: usize,
    /// `[visible.len(), 64]`
    pub(super) weights: Matrix<*const f32>,
    /// `[keys, dim]`, where `keys` is one more than the highest set bit.
    pub(super) values: B,
    /// `[visible.len(), dim]`
    pub(super) o: Matrix<*mut f32>,
}

impl<B: RhsMatrix> PvProduct<'_, B> {
    /// Runs the product as a separate function (see [`Simd::vectorize`]).
    ///
    /// # Safety
    /// With `dim` rounded up to whole registers, weights and values are readable and `o` is writable in the shapes of the
    /// fields; `o` overlaps neither.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd>(self, simd: S) {
        simd.vectorize(PvTask(self));
    }
}

/// A [`PvProduct`] that meets the contract of [`PvProduct::run`], its only constructor.
struct PvTask<'a, B>(PvProduct<'a, B>);

impl<B: RhsMatrix> Task for PvTask<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PvProduct { visible, dim, weights, values, o } = self.0;
        let common = longest_run(visible.iter().fold(u64::MAX, |common, visible| common & visible));
        let phases = [
            (run_mask(&(0..common.start)), 1),
            (run_mask(&common), visible.len()),
            (!run_mask(&(0..common.end)), 1),
        ];
        // one call of the micro-kernel for all phases, because each call compiles all of its forms
        for (part, rows) in phases {
            for first in (0..visible.len()).step_by(rows.max(1)) {
                let mut bits = visible[first] & part;
                while bits != 0 {
                    let run = first_run(bits);
                    bits &= !run_mask(&run);
                    // SAFETY: the contract of `PvProduct::run`; rows and keys stay within the shapes.
                    unsafe {
                        let ptr = weights.ptr.add(first * weights.stride + run.start);
                        let (weights, o) =
                            (Matrix { ptr, ..weights }, Matrix { ptr: o.ptr.add(first * o.stride), ..o });
                        let shape = ProductShape { rows, columns: dim, depth: run.len() };
                        let b = values.skip(run.start);
                        multiply_add(simd, MatrixProduct { shape, a: weights, b, c: o });
                    }
                }
            }
        }
    }
}

/// The first run of ones. `bits` is not 0.
#[inline(always)]
fn first_run(bits: u64) -> Range<usize> {
    let start = bits.trailing_zeros() as usize;
    start..start + (bits >> start).trailing_ones() as usize
}

/// The first of the longest runs of ones; `0..0` if `bits` is 0.
#[inline(always)]
fn longest_run(mut bits: u64) -> Range<usize> {
    let mut longest = 0..0;
    while bits != 0 {
        let run = first_run(bits);
        bits &= !run_mask(&run);
        if run.len() > longest.len() {
            longest = run;
        }
    }
    longest
}

/// A mask with ones at the bits of `run`.
#[inline(always)]
fn run_mask(run: &Range<usize>) -> u64 {
    let below = |count: usize| if count >= 64 { u64::MAX } else { (1 << count) - 1 };
    below(run.end) & !below(run.start)
}
