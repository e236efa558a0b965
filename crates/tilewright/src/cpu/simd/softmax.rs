//! One step of the online softmax: a row of logits becomes weights, and the running maximum moves on.

use super::Simd;

/// Running maximum and sum of a row: `sum = Σ 2^((logit - max) · scale)`. The maximum is that of the logits before
/// scaling, so that its own weight is exactly 1, however large it is: `logit · scale - max · scale` in one rounding
/// would leave the rounding error of `max · scale`, which is no small number where logits are huge.
/// Laid out as two f32, so that scratch memory can hold it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Running {
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

impl Running {
    /// Nothing seen yet.
    pub(crate) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// `log2 Σ 2^(logit · scale)`, -inf when nothing was seen.
    pub(crate) fn lse(&self, scale: f32) -> f32 {
        if self.sum == 0.0 { f32::NEG_INFINITY } else { self.max * scale + self.sum.log2() }
    }

    /// What the weighted values are multiplied with in the end: `1 / sum`, 0 when nothing was seen.
    pub(crate) fn normalizer(&self) -> f32 {
        if self.sum == 0.0 { 0.0 } else { self.sum.recip() }
    }
}

/// Turns `row` (`width` logits, a multiple of the lanes; unseen ones are -inf) into weights
/// `2^((logit - max) · scale)` and returns the factor that brings earlier weights to the new maximum.
///
/// # Safety
/// `row` points to `width` readable and writable elements.
#[inline(always)]
pub(crate) unsafe fn step<S: Simd>(
    simd: S,
    row: *mut f32,
    width: usize,
    scale: f32,
    running: &mut Running,
) -> f32 {
    // SAFETY: the caller's promise; offsets step through `width` in whole registers.
    unsafe {
        let mut max = simd.splat(f32::NEG_INFINITY);
        for at in (0..width).step_by(S::LANES) {
            max = simd.max(simd.load(row.add(at)), max);
        }
        let max = running.max.max(simd.reduce_max(max));
        // a row that has seen nothing subtracts 0: (-inf) - (-inf) would be NaN
        let reference = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let factor = if running.max == max { 1.0 } else { ((running.max - reference) * scale).exp2() };
        let (scale, reference) = (simd.splat(scale), simd.splat(reference));
        let mut sum = simd.splat(0.0);
        for at in (0..width).step_by(S::LANES) {
            let weight = exp2(simd, simd.mul(simd.sub(simd.load(row.add(at)), reference), scale));
            simd.store(row.add(at), weight);
            sum = simd.add(sum, weight);
        }
        running.sum = running.sum * factor + simd.reduce_add(sum);
        running.max = max;
        factor
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
