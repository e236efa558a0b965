//! Online softmax: updates the running maximum and sum of a row and turns its logits into weights.

use super::Simd;
use crate::attention::ones;

/// State of a row: logits of a tile, running maximum, and running sums, one per lane.
///
/// The maximum is taken before scaling, so that its weight is exactly 1. A fused `logit · scale - max · scale` would keep the
/// rounding error of `max · scale`, which is large for large logits.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxRow {
    pub(crate) logits: *mut f32,
    pub(crate) max: *mut f32,
    pub(crate) sums: *mut f32,
}

impl SoftmaxRow {
    /// The running maximum and `Σ 2^((logit - max) · scale)`.
    ///
    /// # Safety
    /// `max` is readable as one element, `sums` as one register.
    #[inline(always)]
    pub(crate) unsafe fn state<S: Simd>(&self, simd: S) -> (f32, f32) {
        // SAFETY: the caller guarantees a readable element at `max` and a register at `sums`.
        unsafe { (*self.max, simd.reduce_add(simd.load(self.sums))) }
    }

    /// Multiplies `width` logits elementwise by `factors`.
    ///
    /// # Safety
    /// Same as [`SoftmaxRow::update`]; `factors` is readable for `width` elements.
    #[inline(always)]
    pub(crate) unsafe fn multiply_each<S: Simd>(&self, simd: S, width: usize, factors: *const f32) {
        for at in (0..width).step_by(S::LANES) {
            // SAFETY: `at` advances in whole registers through `width`, for which the caller guarantees both pointers.
            unsafe {
                let product = simd.mul(simd.load(self.logits.add(at)), simd.load(factors.add(at)));
                simd.store(self.logits.add(at), product);
            }
        }
    }

    /// Multiplies `width` logits by `factor`.
    ///
    /// # Safety
    /// Same as [`SoftmaxRow::update`].
    #[inline(always)]
    pub(crate) unsafe fn scale<S: Simd>(&self, simd: S, width: usize, factor: f32) {
        for at in (0..width).step_by(S::LANES) {
            // SAFETY: `at` advances in whole registers through `width`, for which the caller guarantees the logits.
            unsafe {
                simd.store(self.logits.add(at), simd.mul(simd.load(self.logits.add(at)), simd.splat(factor)));
            };
        }
    }

    /// Replaces the logits whose bit in `visible` is 0 by `value`, up to `width`.
    ///
    /// # Safety
    /// Same as [`SoftmaxRow::update`].
    #[inline(always)]
    pub(crate) unsafe fn mask_out(&self, visible: u64, width: usize, value: f32) {
        let mut hidden = !visible & ones(width);
        while hidden != 0 {
            // SAFETY: the bit is below `width`.
            unsafe { *self.logits.add(hidden.trailing_zeros() as usize) = value };
            hidden &= hidden - 1;
        }
    }

    /// Replaces `width` logits (a multiple of the lanes; masked ones are -inf) by the weights `2^((logit - max) · scale)`.
    /// Returns the factor that rescales earlier weights to the new maximum.
    ///
    /// # Safety
    /// `max`, one register of `sums` and `width` elements of `logits` are readable and writable, without other references.
    #[inline(always)]
    pub(crate) unsafe fn update<S: Simd>(&self, simd: S, width: usize, scale: f32) -> f32 {
        // SAFETY: the caller guarantees `max`, a register of `sums` and `width` logits; offsets advance in whole registers.
        unsafe {
            let mut largest = simd.splat(f32::NEG_INFINITY);
            for at in (0..width).step_by(S::LANES) {
                largest = simd.max(simd.load(self.logits.add(at)), largest);
            }
            let mut factor = 1.0;
            // rarely true after the first tiles, which saves the horizontal reduction
            if simd.any_greater(largest, simd.splat(*self.max)) {
                let max = simd.reduce_max(largest);
                factor = ((*self.max - max) * scale).exp2();
                *self.max = max;
            }
            // without visible keys, subtract 0: (-inf) - (-inf) would be NaN
            let shift = if *self.max == f32::NEG_INFINITY { 0.0 } else { *self.max };
            let (scale, shift) = (simd.splat(scale), simd.splat(shift));
            let mut sums = simd.mul(simd.load(self.sums), simd.splat(factor));
            for at in (0..width).step_by(S::LANES) {
                let logit = simd.load(self.logits.add(at));
                let weight = exp2(simd, simd.mul(simd.sub(logit, shift), scale));
                simd.store(self.logits.add(at), weight);
                sums = simd.add(sums, weight);
            }
            simd.store(self.sums, sums);
            factor
        }
    }
}

/// `2^x` within 2 ulp on -126..=127; 0 below, NaN for NaN.
///
/// `x = n + f` with integral `n` and `|f| <= 1/2`; `2^f` is the polynomial of Cephes' `exp2f`.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::V) -> S::V {
    const COEFFICIENTS: [f32; 7] =
        [1.535_336_2e-4, 1.339_887_5e-3, 9.618_437e-3, 5.550_332_6e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0];
    // max returns its second operand if one is NaN
    let bounded = simd.max(simd.splat(-127.0), x);
    let n = simd.round(bounded);
    let f = simd.sub(bounded, n);
    let mut power = simd.splat(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        power = simd.mul_add(power, f, simd.splat(*coefficient));
    }
    simd.scale_or_zero(power, n, x)
}
