//! Elementary functions over any [`Number`]: polynomials shared by f32 and lanes.

use super::Number;

/// `tanh(x)` as `x · P(x²) / Q(x²)` on -9..=9, beyond which f32 rounds to ±1: the minimax fit of Eigen's `ptanh`. One
/// division, no cancellation near 0.
#[inline(always)]
pub(super) fn tanh<N: Number>(x: N) -> N {
    const BOUND: f32 = 9.0;
    const P: [f32; 7] = [
        -2.760_768_5e-16, 2.000_188e-13, -8.604_672e-11, 5.122_297e-8, 1.485_722_4e-5, 6.372_619e-4,
        4.893_524_6e-3,
    ];
    const Q: [f32; 4] = [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3];
    // this operand order propagates NaN
    let bounded = x.number(-BOUND).max(x.number(BOUND).min(x));
    let square = bounded * bounded;
    let ratio = bounded * polynomial(square, &P) / polynomial(square, &Q);
    // the quotient may round to just above 1
    x.number(-1.0).max(x.number(1.0).min(ratio))
}

/// Sine and cosine of `2π·x`. Range reduction to the nearest quarter turn, Cephes' `sinf` and `cosf` polynomials on the
/// remainder (at most an eighth), then swaps and sign changes per quadrant.
#[inline(always)]
pub(super) fn sin_cos_turns<N: Number>(x: N) -> (N, N) {
    const SIN: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
    const COS: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];
    let number = |value| x.number(value);
    let quarters = (x * number(4.0) + number(0.5)).floor();
    let angle = (x - quarters * number(0.25)) * number(std::f32::consts::TAU);
    let square = angle * angle;
    let sin = (polynomial(square, &SIN) * square).mul_add(angle, angle);
    let cos = (polynomial(square, &COS) * square).mul_add(square, number(-0.5).mul_add(square, number(1.0)));
    // quarters are -2..=2; odd ones swap sine and cosine
    let odd = quarters.abs().eq(number(1.0));
    let (a, b) = (N::select(odd, cos, sin), N::select(odd, sin, cos));
    let half = number(2.0).le(quarters.abs());
    let sin_negative = half | quarters.eq(number(-1.0));
    let cos_negative = half | quarters.eq(number(1.0));
    (N::select(sin_negative, -a, a), N::select(cos_negative, -b, b))
}

/// Horner's scheme; coefficients from the highest power down.
#[inline(always)]
fn polynomial<N: Number>(x: N, coefficients: &[f32]) -> N {
    let (first, rest) = (x.number(coefficients[0]), &coefficients[1..]);
    rest.iter().fold(first, |sum, &coefficient| sum.mul_add(x, x.number(coefficient)))
}

/// [`Number::turns`] without FMA: a product of two f32 is exact in f64.
#[inline(always)]
pub(crate) fn turns_in_f64(position: f32, high: f32, low: f32) -> f32 {
    let turns = f64::from(position) * f64::from(high) + f64::from(position) * f64::from(low);
    (turns - turns.round()) as f32
}
