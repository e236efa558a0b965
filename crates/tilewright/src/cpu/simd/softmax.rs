//! One step of the online softmax: a row of logits becomes weights, and the running maximum moves on.

use super::Simd;
use crate::attention::ones;

/// A row on its way: its logits, its maximum, and a register of sums that are added up only in the end.
///
/// The maximum is that of the logits before scaling, so that its own weight is exactly 1, however large it is:
/// `logit · scale - max · scale` in one rounding would leave the rounding error of `max · scale`, which is no small number
/// where logits are huge.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) logits: *mut f32,
    pub(crate) max: *mut f32,
    pub(crate) sums: *mut f32,
}

impl Row {
    /// The maximum and `Σ 2^((logit - max) · scale)` of all that was seen.
    ///
    /// # Safety
    /// `max` points to an element and `sums` to a register's worth of them.
    #[inline(always)]
    pub(crate) unsafe fn seen<S: Simd>(&self, simd: S) -> (f32, f32) {
        // SAFETY: the caller's promise.
        unsafe { (*self.max, simd.reduce_add(simd.load(self.sums))) }
    }

    /// Multiplies each of `width` logits by its own factor.
    ///
    /// # Safety
    /// As [`Row::step`]; `factors` points to `width` elements.
    #[inline(always)]
    pub(crate) unsafe fn multiply<S: Simd>(&self, simd: S, width: usize, factors: *const f32) {
        for at in (0..width).step_by(S::LANES) {
            // SAFETY: the caller's promise.
            unsafe {
                let product = simd.mul(simd.load(self.logits.add(at)), simd.load(factors.add(at)));
                simd.store(self.logits.add(at), product);
            }
        }
    }

    /// Multiplies `width` logits by `factor`.
    ///
    /// # Safety
    /// As [`Row::step`].
    #[inline(always)]
    pub(crate) unsafe fn scale<S: Simd>(&self, simd: S, width: usize, factor: f32) {
        for at in (0..width).step_by(S::LANES) {
            // SAFETY: the caller's promise.
            unsafe {
                simd.store(self.logits.add(at), simd.mul(simd.load(self.logits.add(at)), simd.splat(factor)));
            };
        }
    }

    /// Puts `value` in the place of those of `width` logits whose bit in `seen` is 0.
    ///
    /// # Safety
    /// As [`Row::step`].
    #[inline(always)]
    pub(crate) unsafe fn hide(&self, seen: u64, width: usize, value: f32) {
        let mut hidden = !seen & ones(width);
        while hidden != 0 {
            // SAFETY: the bit is below `width`.
            unsafe { *self.logits.add(hidden.trailing_zeros() as usize) = value };
            hidden &= hidden - 1;
        }
    }

    /// Turns `width` logits (a multiple of the lanes; unseen ones are -inf) into weights
    /// `2^((logit - max) · scale)` and returns the factor that brings earlier weights to the new maximum.
    ///
    /// # Safety
    /// As [`Row::seen`], and `logits` points to `width` elements; all are writable and nobody else's.
    #[inline(always)]
    pub(crate) unsafe fn step<S: Simd>(&self, simd: S, width: usize, scale: f32) -> f32 {
        // SAFETY: the caller's promise; offsets step through `width` in whole registers.
        unsafe {
            let mut largest = simd.splat(f32::NEG_INFINITY);
            for at in (0..width).step_by(S::LANES) {
                largest = simd.max(simd.load(self.logits.add(at)), largest);
            }
            let mut factor = 1.0;
            // seldom after the first tiles, and then the way across the lanes is spared
            if simd.any_above(largest, simd.splat(*self.max)) {
                let max = simd.reduce_max(largest);
                factor = ((*self.max - max) * scale).exp2();
                *self.max = max;
            }
            // a row that has seen nothing subtracts 0: (-inf) - (-inf) would be NaN
            let reference = if *self.max == f32::NEG_INFINITY { 0.0 } else { *self.max };
            let (scale, reference) = (simd.splat(scale), simd.splat(reference));
            let mut sums = simd.mul(simd.load(self.sums), simd.splat(factor));
            for at in (0..width).step_by(S::LANES) {
                let logit = simd.load(self.logits.add(at));
                let weight = exp2(simd, simd.mul(simd.sub(logit, reference), scale));
                simd.store(self.logits.add(at), weight);
                sums = simd.add(sums, weight);
            }
            simd.store(self.sums, sums);
            factor
        }
    }
}

/// `2^x`, within 2 units in the last place on -126..=127; 0 below, NaN for NaN.
///
/// `x = n + f` with integral `n` and `|f| <= 1/2`; `2^f` is the polynomial of Cephes' `exp2f`.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::V) -> S::V {
    const COEFFICIENTS: [f32; 7] =
        [1.535_336_2e-4, 1.339_887_5e-3, 9.618_437e-3, 5.550_332_6e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0];
    // max takes its second operand where one is NaN
    let bounded = simd.max(simd.splat(-127.0), x);
    let n = simd.round(bounded);
    let f = simd.sub(bounded, n);
    let mut power = simd.splat(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        power = simd.mul_add(power, f, simd.splat(*coefficient));
    }
    simd.scale_or_zero(power, n, x)
}
