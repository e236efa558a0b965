//! Elementary f32 functions from additions and multiplications only: the same bits in the simulator and on every GPU, within a
//! few units in the last place.
//!
//! The hardware's (`ex2.approx`, `lg2.approx`, `sin.approx`) are faster and less exact; [`super::Arithmetic`] selects. Sine,
//! cosine and turns are always exact, because the hardware's have an error of 2^-20.

use tilewright_ptx::Value;

/// An f32 per thread.
type Number<'k> = Value<'k, f32>;

/// Adding it rounds to an integer, which is then in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// `2^f` for `|f| <= 1/2`: the polynomial of Cephes' `exp2f`. Coefficients here are from the highest power down.
const EXP2: [f32; 7] =
    [1.535_336_2e-4, 1.339_887_5e-3, 9.618_437e-3, 5.550_332_6e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0];

/// `2^x` for `x <= 0`, within 2 units in the last place down to -126; 0 below -126.5 and for -inf, NaN for NaN.
#[track_caller]
pub(crate) fn exp2_of_negative(x: Number<'_>) -> Number<'_> {
    // a comparison keeps NaN, a maximum would not
    let (n, power) = split_exp2(x.lt(-127.0).select(-127.0, x));
    // the exponent bits of 2^-127 are 0, and so is the factor
    power * power_of_two(n)
}

/// `2^x`, within 2 units in the last place: 0 below -126, +inf from 128 on, NaN for NaN.
#[track_caller]
pub(crate) fn exp2(x: Number<'_>) -> Number<'_> {
    let bounded = x.lt(-126.0).select(-126.0, x);
    let (n, power) = split_exp2(bounded.gt(129.0).select(129.0, bounded));
    // two factors, because 2^128 is not representable
    let half = n >> 1;
    x.lt(-126.0).select(0.0, power * power_of_two(half) * power_of_two(n - half))
}

/// The nearest integer `n`, and `2^(x - n)`.
#[track_caller]
fn split_exp2(x: Number<'_>) -> (Value<'_, i32>, Number<'_>) {
    let shifted = x + ROUND;
    let n = (shifted.reinterpret::<u32>() - ROUND.to_bits()).reinterpret::<i32>();
    (n, polynomial(x - (shifted - ROUND), &EXP2))
}

/// `2^n` for `n` in -126..=127, 0 for -127.
#[track_caller]
fn power_of_two(n: Value<'_, i32>) -> Number<'_> {
    ((n.reinterpret::<u32>() + 127) << 23).reinterpret()
}

/// The logarithm to base 2, within 2 units in the last place: -inf for 0, NaN below.
///
/// `x = 2^e · (1 + f)` with `1 + f` in `sqrt(1/2)..sqrt(2)`; `ln (1 + f) = f - f²/2 + f³ · P(f)` with the polynomial of Cephes'
/// `logf`. log2 e is split into 1 and the rest, so that large terms are added last.
#[track_caller]
pub(crate) fn log2(x: Number<'_>) -> Number<'_> {
    const P: [f32; 9] = [
        7.037_684e-2, -1.151_461e-1, 1.167_699_9e-1, -1.242_014_1e-1, 1.424_932_3e-1, -1.666_805_8e-1,
        2.000_071_5e-1, -2.499_999_4e-1, 3.333_333e-1,
    ];
    const LOG2_E_LESS_1: f32 = 0.442_695_04;
    let k = x.builder();
    let subnormal = x.lt(f32::MIN_POSITIVE);
    let bits = subnormal.select(x * 8_388_608.0, x).reinterpret::<u32>();
    let e = (bits - std::f32::consts::FRAC_1_SQRT_2.to_bits()).reinterpret::<i32>() >> 23;
    let f = (bits - (e.reinterpret::<u32>() << 23)).reinterpret::<f32>() - 1.0;
    let square = f * f;
    let y = square.mul_add(-0.5, square * f * polynomial(f, &P));
    let small = y.mul_add(LOG2_E_LESS_1, f * LOG2_E_LESS_1) + y + f;
    let sum = small + e.to_f32() - subnormal.select(23.0, k.constant(0.0));
    let positive = x.gt(0.0);
    let end = x.eq(0.0).select(f32::NEG_INFINITY, positive.select(x, k.constant(f32::NAN)));
    (positive & x.lt(f32::INFINITY)).select(sum, end)
}

/// The hyperbolic tangent as `x · P(x²) / Q(x²)` on -9..=9, beyond which f32 has only ±1: the minimax fit of Eigen's `ptanh`.
#[track_caller]
pub(crate) fn tanh(x: Number<'_>) -> Number<'_> {
    const P: [f32; 7] = [
        -2.760_768_5e-16, 2.000_188e-13, -8.604_672e-11, 5.122_297e-8, 1.485_722_4e-5, 6.372_619e-4,
        4.893_524_6e-3,
    ];
    const Q: [f32; 4] = [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3];
    let x = bounded(x, 9.0);
    let square = x * x;
    // the quotient may round to just above 1
    bounded(x * polynomial(square, &P) / polynomial(square, &Q), 1.0)
}

/// `x ↦ out · tanh(factor · x)` for small arguments, without the special-function unit: the odd polynomial with the least maximum
/// error, 4e-8. Factors are part of its coefficients, so an element takes five operations.
pub(super) struct SmallTanh<'k> {
    /// From the highest power down.
    coefficients: [Number<'k>; 4],
    factor: Number<'k>,
}

impl<'k> SmallTanh<'k> {
    /// Largest argument of `tanh`.
    const MAX: f32 = 0.4375;
    const POLYNOMIAL: [f32; 4] = [-4.557_896e-2, 1.321_782e-1, -3.332_733_2e-1, 9.999_991_7e-1];

    #[track_caller]
    pub(super) fn new(factor: Number<'k>, out: Number<'k>) -> Self {
        let (square, first) = (factor * factor, factor * out);
        let third = first * square;
        let fifth = third * square;
        let powers = [fifth * square, fifth, third, first];
        let coefficients = std::array::from_fn(|at| powers[at] * Self::POLYNOMIAL[at]);
        Self { coefficients, factor }
    }

    /// Whether elements up to a magnitude have small arguments, and no coefficient left the normal range.
    #[track_caller]
    pub(super) fn holds(&self, magnitude: Number<'k>) -> Value<'k, bool> {
        let last = self.coefficients[0].abs();
        (magnitude * self.factor.abs()).le(Self::MAX) & last.gt(1e-36) & last.lt(1e36)
    }

    #[track_caller]
    pub(super) fn of(&self, elements: &[Number<'k>]) -> Vec<Number<'k>> {
        elements.iter().map(|x| *x * self.quotient(*x)).collect()
    }

    /// The result divided by `x`.
    #[track_caller]
    fn quotient(&self, x: Number<'k>) -> Number<'k> {
        let [first, others @ ..] = self.coefficients;
        let square = x * x;
        others.into_iter().fold(first, |sum, coefficient| sum.mul_add(square, coefficient))
    }
}

/// A soft cap of products, `x ↦ out · tanh(factor · x)`, that is part of the exponent of a weight if all products are small.
pub(crate) struct SoftCapped<'k> {
    tanh: SmallTanh<'k>,
    increases: Value<'k, bool>,
}

impl<'k> SoftCapped<'k> {
    #[track_caller]
    pub(super) fn new([factor, out]: [Number<'k>; 2]) -> Self {
        Self { tanh: SmallTanh::new(factor, out), increases: (factor * out).gt(0.0) }
    }

    /// Whether products up to a magnitude are small, and the function increases.
    #[track_caller]
    pub(crate) fn holds(&self, magnitude: Number<'k>) -> Value<'k, bool> {
        self.tanh.holds(magnitude) & self.increases
    }

    /// The capped logit of a small product.
    #[track_caller]
    pub(crate) fn of(&self, x: Number<'k>) -> Number<'k> {
        x * self.tanh.quotient(x)
    }

    /// This function times a scale.
    #[track_caller]
    pub(crate) fn times(self, scale: Number<'k>) -> Self {
        let Self { tanh: SmallTanh { coefficients, factor }, increases } = self;
        Self { tanh: SmallTanh { coefficients: coefficients.map(|c| c * scale), factor }, increases }
    }

    /// The capped logit of a small product plus an offset.
    #[track_caller]
    pub(crate) fn plus(&self, x: Number<'k>, offset: Number<'k>) -> Number<'k> {
        x.mul_add(self.tanh.quotient(x), offset)
    }
}

/// `x` in `-bound..=bound`; NaN stays.
#[track_caller]
fn bounded(x: Number<'_>, bound: f32) -> Number<'_> {
    let x = x.gt(bound).select(bound, x);
    x.lt(-bound).select(-bound, x)
}

/// Sine and cosine of `2π · x` for `x` in -0.5..=0.5, within about 1e-7: subtract the nearest quarter turn, evaluate Cephes'
/// `sinf` and `cosf` on the rest, and restore the quarters by exchange and negation.
#[track_caller]
pub(super) fn sin_cos_turns<'k>(x: Number<'k>) -> (Number<'k>, Number<'k>) {
    const SIN: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
    const COS: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];
    let one = x.builder().constant(1.0_f32);
    let quarters = (x * 4.0 + 0.5).floor();
    let angle = (x - quarters * 0.25) * std::f32::consts::TAU;
    let square = angle * angle;
    let sin = (polynomial(square, &SIN) * square).mul_add(angle, angle);
    let cos = (polynomial(square, &COS) * square).mul_add(square, square.mul_add(-0.5, one));
    // quarters are -2..=2; odd ones exchange sine and cosine
    let odd = quarters.abs().eq(1.0);
    let (a, b): (Number<'k>, Number<'k>) = (odd.select(cos, sin), odd.select(sin, cos));
    let half = quarters.abs().ge(2.0);
    let (sin_negative, cos_negative) = (half | quarters.eq(-1.0), half | quarters.eq(1.0));
    (sin_negative.select(-a, a), cos_negative.select(-b, b))
}

/// `position · (high + low)` minus the nearest integer, as if computed exactly: a fused multiply-add recovers the rounding error
/// of the product.
#[track_caller]
pub(super) fn turns<'k>(position: Number<'k>, high: Number<'k>, low: Number<'k>) -> Number<'k> {
    let product = position * high;
    let lost = position.mul_add(high, -product);
    let turns = (product - product.round()) + position.mul_add(low, lost);
    // the remainder may have carried it past a half
    turns - turns.round()
}

/// Coefficients from the highest power down.
#[track_caller]
fn polynomial<'k>(x: Number<'k>, coefficients: &[f32]) -> Number<'k> {
    let first = x.builder().constant(coefficients[0]);
    coefficients[1..].iter().fold(first, |sum, &coefficient| sum.mul_add(x, coefficient))
}
