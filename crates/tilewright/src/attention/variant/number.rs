//! Number abstraction of hooks: one source evaluates on f32, on vector lanes, or records an expression graph.
//!
//! Indices are numbers too: integers, exact below 2^24. Comparisons with NaN are false. Provided methods are algorithms
//! over the required ones, so scalars and lanes differ only where multiply-add is fused.

use super::{At, ExpressionVariant, Hook, HookBuffer, elementary};
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

/// Methods that are one expression: `fn name(self, arguments) -> result = expression;`
macro_rules! inline_methods {
    ($(fn $name:ident($this:ident $(, $arg:ident: $ty:ty)*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name($this $(, $arg: $ty)*) -> $result {
            $body
        }
    )*};
}
pub(crate) use inline_methods;

/// A number in a hook: f32, a vector register, or a recorded expression.
///
/// Constants are built from an existing value: `x.number(0.5)`. Hooks use [`Number::select`] instead of `if`.
pub trait Number:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self>
{
    /// The result of a comparison; supports `&`, `|` and `!`.
    type Bool: Copy + BitAnd<Output = Self::Bool> + BitOr<Output = Self::Bool> + Not<Output = Self::Bool>;

    /// The constant `value`, of the same kind as `self`.
    #[must_use]
    fn number(self, value: f32) -> Self;
    /// The constant condition `value`, of the same kind as `self`.
    fn truth(self, value: bool) -> Self::Bool;

    /// `self` where it is less, otherwise `other`; hence `other` if either is NaN.
    #[must_use]
    fn min(self, other: Self) -> Self;
    /// `self` where it is greater, otherwise `other`; hence `other` if either is NaN.
    #[must_use]
    fn max(self, other: Self) -> Self;
    /// `|self|`
    #[must_use]
    fn abs(self) -> Self;
    /// The maximum integer not above `self`.
    #[must_use]
    fn floor(self) -> Self;
    /// The square root, NaN for negative numbers.
    #[must_use]
    fn sqrt(self) -> Self;
    /// `self · factor + summand`, fused where the hardware supports it.
    #[must_use]
    fn mul_add(self, factor: Self, summand: Self) -> Self;

    /// `self < other`
    fn lt(self, other: Self) -> Self::Bool;
    /// `self <= other`
    fn le(self, other: Self) -> Self::Bool;
    /// `self == other`
    fn eq(self, other: Self) -> Self::Bool;
    /// `self > other`
    #[inline(always)]
    fn gt(self, other: Self) -> Self::Bool {
        other.lt(self)
    }
    /// `self >= other`
    #[inline(always)]
    fn ge(self, other: Self) -> Self::Bool {
        other.le(self)
    }
    /// `a` where `condition` holds, otherwise `b`. Both are evaluated.
    #[must_use]
    fn select(condition: Self::Bool, a: Self, b: Self) -> Self;

    /// `2^self` within about 2 ulp; 0 below -126, +inf from 128 on.
    #[must_use]
    fn exp2(self) -> Self;
    /// The logarithm to base 2.
    #[must_use]
    fn log2(self) -> Self;
    /// `e^self = 2^(self · log2 e)`; rounding of the product causes a relative error of up to `|self| · 2^-24`.
    #[must_use]
    #[inline(always)]
    fn exp(self) -> Self {
        (self * self.number(std::f32::consts::LOG2_E)).exp2()
    }
    /// The hyperbolic tangent, within a few ulp.
    #[must_use]
    #[inline(always)]
    fn tanh(self) -> Self {
        elementary::tanh(self)
    }
    /// `1 / (1 + e^-self)`
    #[must_use]
    #[inline(always)]
    fn sigmoid(self) -> Self {
        let one = self.number(1.0);
        one / (one + (-self).exp())
    }
    /// Sine and cosine of `2π · self` for `self` in `-0.5..=0.5`, each within about 1e-7.
    #[inline(always)]
    fn sin_cos_turns(self) -> (Self, Self) {
        elementary::sin_cos_turns(self)
    }
    /// `self · (high + low)` minus the nearest integer, computed exactly and rounded once: the angle, in turns, of
    /// position `self` at a frequency of `high + low` turns per position. Valid for products below 2^22.
    #[must_use]
    fn turns(self, high: Self, low: Self) -> Self;

    /// Implements [`At::scalar`](super::At::scalar).
    #[must_use]
    #[inline(always)]
    fn scalar(self, name: &str, value: f32) -> Self {
        let _ = name;
        self.number(value)
    }
    /// Implements [`At::read`](super::At::read); `self` is the index.
    #[must_use]
    fn read(self, name: &str, table: &[f32]) -> Self;
    /// Implements [`At::store`](super::At::store); `self` is the value.
    fn store(self, name: &str, buffer: &HookBuffer, index: Self);

    /// The results of a recorded hook: numbers and a condition; unused ones are unspecified. A separate function per
    /// number type, because it instantiates every operation.
    #[doc(hidden)]
    fn interpret(
        variant: &ExpressionVariant,
        hook: Hook,
        at: &At<Self>,
        arguments: [Self; 2],
    ) -> ([Self; 2], Self::Bool) {
        variant.evaluate(hook, at, arguments)
    }
}

impl Number for f32 {
    type Bool = bool;

    inline_methods! {
        fn number(self, value: f32) -> Self = value;
        fn truth(self, value: bool) -> bool = value;
        fn min(self, other: Self) -> Self = if self < other { self } else { other };
        fn max(self, other: Self) -> Self = if self > other { self } else { other };
        fn abs(self) -> Self = Self::abs(self);
        fn floor(self) -> Self = Self::floor(self);
        fn sqrt(self) -> Self = Self::sqrt(self);
        fn lt(self, other: Self) -> bool = self < other;
        fn le(self, other: Self) -> bool = self <= other;
        fn eq(self, other: Self) -> bool = self == other;
        fn exp2(self) -> Self = if self < -126.0 { 0.0 } else { Self::exp2(self) };
        fn log2(self) -> Self = Self::log2(self);
        fn turns(self, high: Self, low: Self) -> Self = elementary::turns_in_f64(self, high, low);
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, summand: Self) -> Self {
        // f32::mul_add calls a library function on targets without FMA
        self * factor + summand
    }
    #[inline(always)]
    fn select(condition: bool, a: Self, b: Self) -> Self {
        if condition { a } else { b }
    }
    #[inline(always)]
    fn read(self, _: &str, table: &[f32]) -> Self {
        // the cast maps NaN and negative values to 0
        let last = table.len().saturating_sub(1);
        table.get((self as usize).min(last)).copied().unwrap_or(Self::NAN)
    }
    #[inline(always)]
    fn store(self, _: &str, buffer: &HookBuffer, index: Self) {
        buffer.set(index, self);
    }
    fn interpret(
        variant: &ExpressionVariant,
        hook: Hook,
        at: &At<Self>,
        arguments: [Self; 2],
    ) -> ([Self; 2], bool) {
        variant.evaluate(hook, at, arguments)
    }
}
