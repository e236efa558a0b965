//! The P·V product `o += weights · values`, restricted to the visible keys of each row.

use super::{
    Simd, Task,
    tile::{self, Matrix, RhsMatrix},
};
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
        let (before, after) = (run_mask(&(0..common.start)), !run_mask(&(0..common.end)));
        // SAFETY: the contract of `PvProduct::run`; rows and keys stay within the shapes.
        unsafe {
            accumulate_separately(simd, (visible, before), dim, (weights, values), o);
            let weights_of_common = Matrix { ptr: weights.ptr.add(common.start), ..weights };
            let shape = (visible.len(), dim, common.len());
            tile::multiply_add(simd, shape, weights_of_common, values.skip(common.start), o);
            accumulate_separately(simd, (visible, after), dim, (weights, values), o);
        }
    }
}

/// Accumulates the visible keys of `part` for each row separately, run by run.
///
/// # Safety
/// Same as [`PvProduct::run`].
#[inline(always)]
unsafe fn accumulate_separately<S: Simd, B: RhsMatrix>(
    simd: S,
    (visible, part): (&[u64], u64),
    dim: usize,
    (weights, values): (Matrix<*const f32>, B),
    o: Matrix<*mut f32>,
) {
    for (r, &visible) in visible.iter().enumerate() {
        let mut bits = visible & part;
        while bits != 0 {
            let run = first_run(bits);
            bits &= !run_mask(&run);
            // SAFETY: upheld by the caller.
            unsafe {
                let weights = Matrix { ptr: weights.ptr.add(r * weights.stride + run.start), ..weights };
                let o = Matrix { ptr: o.ptr.add(r * o.stride), ..o };
                tile::multiply_add(simd, (1, dim, run.len()), weights, values.skip(run.start), o);
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
