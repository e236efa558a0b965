//! `o += weights · values`, for each row only over the keys that it sees.

use super::{
    Simd, Task,
    tile::{self, Matrix, Right},
};
use std::ops::Range;

/// `o += weights · values` over the keys whose bits are set in each row's `seen`: all rows together over the run of keys
/// that all of them see, each alone before and after it. Every row adds its keys in ascending order, so that its bits are
/// the same in any company.
pub(super) struct Weigh<'a, B> {
    pub(super) seen: &'a [u64],
    /// Elements of a value.
    pub(super) width: usize,
    /// `[seen.len(), 64]`
    pub(super) weights: Matrix<*const f32>,
    /// As many keys as the highest bit says, `[keys, width]`.
    pub(super) values: B,
    /// `[seen.len(), width]`
    pub(super) o: Matrix<*mut f32>,
}

impl<B: Right> Weigh<'_, B> {
    /// Does it.
    ///
    /// # Safety
    /// With `width` rounded up to whole registers, weights and values are readable and `o` is writable in the shapes named
    /// above, and `o` overlaps neither.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd>(self, simd: S) {
        simd.vectorize(Promised(self));
    }
}

/// A [`Weigh`] whose caller has made its promise.
struct Promised<'a, B>(Weigh<'a, B>);

impl<B: Right> Task for Promised<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Weigh { seen, width, weights, values, o } = self.0;
        let common = longest_run(seen.iter().fold(u64::MAX, |common, seen| common & seen));
        let (before, after) = (mask(&(0..common.start)), !mask(&(0..common.end)));
        // SAFETY: promised to the one function that makes a `Promised`; rows and keys stay below the shapes.
        unsafe {
            alone(simd, (seen, before), width, (weights, values), o);
            let weights_of_common = Matrix { at: weights.at.add(common.start), ..weights };
            let shape = (seen.len(), width, common.len());
            tile::multiply_add(simd, shape, weights_of_common, values.skip(common.start), o);
            alone(simd, (seen, after), width, (weights, values), o);
        }
    }
}

/// Weighs the keys of `part` for each row alone, run by run.
///
/// # Safety
/// As [`Weigh::run`].
#[inline(always)]
unsafe fn alone<S: Simd, B: Right>(
    simd: S,
    (seen, part): (&[u64], u64),
    width: usize,
    (weights, values): (Matrix<*const f32>, B),
    o: Matrix<*mut f32>,
) {
    for (r, &seen) in seen.iter().enumerate() {
        let mut bits = seen & part;
        while bits != 0 {
            let run = first_run(bits);
            bits &= !mask(&run);
            // SAFETY: the caller's promise.
            unsafe {
                let weights = Matrix { at: weights.at.add(r * weights.stride + run.start), ..weights };
                let o = Matrix { at: o.at.add(r * o.stride), ..o };
                tile::multiply_add(simd, (1, width, run.len()), weights, values.skip(run.start), o);
            }
        }
    }
}

/// The first run of ones; `bits` has one.
#[inline(always)]
fn first_run(bits: u64) -> Range<usize> {
    let start = bits.trailing_zeros() as usize;
    start..start + (bits >> start).trailing_ones() as usize
}

/// The longest run of ones, the first of several; `0..0` without any.
#[inline(always)]
fn longest_run(mut bits: u64) -> Range<usize> {
    let mut longest = 0..0;
    while bits != 0 {
        let run = first_run(bits);
        bits &= !mask(&run);
        if run.len() > longest.len() {
            longest = run;
        }
    }
    longest
}

/// Ones at the bits of `run`.
#[inline(always)]
fn mask(run: &Range<usize>) -> u64 {
    let below = |count: usize| if count >= 64 { u64::MAX } else { (1 << count) - 1 };
    below(run.end) & !below(run.start)
}
