//! Arithmetic, comparison and bit operators and methods of values.
//!
//! Unsigned division: assemblers emit a routine of some 20 instructions even for constant divisors, so the builder replaces those by
//! shifts, or by a multiplication ("Division by Invariant Integers using Multiplication", Granlund and Montgomery 1994, figure 4.1:
//! exact for every dividend of 32 bits).

use super::{Builder, IntoOperand, Value};
use crate::{
    ir::Operand,
    isa::{Bf16x2, Class, F16x2, Op, PureOp, Scalar},
};
use half::{bf16, f16};
use std::ops;

/// Types with `+`, `-` and `*`.
pub trait Arithmetic: Scalar {
    /// `a + b`
    const ADD: PureOp;
    /// `a - b`
    const SUB: PureOp;
    /// `a · b`; the low half for integers.
    const MUL: PureOp;
    /// `a · b + c`, rounded once.
    const MAD: PureOp;
    /// The minimum.
    const MIN: PureOp;
    /// The maximum.
    const MAX: PureOp;
}

/// Types with an order.
pub trait Compare: Scalar {
    /// `==`, `!=`, `<`, `<=`, `>`, `>=`
    const COMPARE: [PureOp; 6];
}

/// Types with bitwise operators.
pub trait Bits: Scalar {
    /// `&`, `|`, `^`, `!`
    const LOGIC: [PureOp; 4];
}

macro_rules! arithmetic {
    ($($ty:ty: $add:ident $sub:ident $mul:ident $mad:ident $min:ident $max:ident;)*) => {$(
        impl Arithmetic for $ty {
            const ADD: PureOp = PureOp::$add;
            const SUB: PureOp = PureOp::$sub;
            const MUL: PureOp = PureOp::$mul;
            const MAD: PureOp = PureOp::$mad;
            const MIN: PureOp = PureOp::$min;
            const MAX: PureOp = PureOp::$max;
        }
    )*};
}
arithmetic! {
    u32: AddU32 SubU32 MulU32 MadU32 MinU32 MaxU32;
    i32: AddI32 SubI32 MulI32 MadI32 MinI32 MaxI32;
    u64: AddU64 SubU64 MulU64 MadU64 MinU64 MaxU64;
    i64: AddI64 SubI64 MulI64 MadI64 MinI64 MaxI64;
    f32: AddF32 SubF32 MulF32 FmaF32 MinF32 MaxF32;
    f16: AddF16 SubF16 MulF16 FmaF16 MinF16 MaxF16;
    bf16: AddBf16 SubBf16 MulBf16 FmaBf16 MinBf16 MaxBf16;
    F16x2: AddF16x2 SubF16x2 MulF16x2 FmaF16x2 MinF16x2 MaxF16x2;
    Bf16x2: AddBf16x2 SubBf16x2 MulBf16x2 FmaBf16x2 MinBf16x2 MaxBf16x2;
}

macro_rules! compare {
    ($($ty:ty: $($op:ident)*;)*) => {$(
        impl Compare for $ty {
            const COMPARE: [PureOp; 6] = [$(PureOp::$op),*];
        }
    )*};
}
compare! {
    u32: EqU32 NeU32 LtU32 LeU32 GtU32 GeU32;
    i32: EqI32 NeI32 LtI32 LeI32 GtI32 GeI32;
    u64: EqU64 NeU64 LtU64 LeU64 GtU64 GeU64;
    i64: EqI64 NeI64 LtI64 LeI64 GtI64 GeI64;
    f32: EqF32 NeF32 LtF32 LeF32 GtF32 GeF32;
    f16: EqF16 NeF16 LtF16 LeF16 GtF16 GeF16;
    bf16: EqBf16 NeBf16 LtBf16 LeBf16 GtBf16 GeBf16;
}

macro_rules! bits {
    ($($ty:ty: $($op:ident)*;)*) => {$(
        impl Bits for $ty {
            const LOGIC: [PureOp; 4] = [$(PureOp::$op),*];
        }
    )*};
}
bits! {
    u32: AndB32 OrB32 XorB32 NotB32;
    i32: AndB32 OrB32 XorB32 NotB32;
    u64: AndB64 OrB64 XorB64 NotB64;
    bool: AndPred OrPred XorPred NotPred;
}

impl Builder {
    /// Records a pure instruction and returns its result.
    #[track_caller]
    pub(super) fn compute<T: Scalar>(&self, op: PureOp, operands: &[Operand]) -> Value<'_, T> {
        debug_assert!(op.result() == T::CLASS, "{op:?} gives {:?}", op.result());
        self.pure(Op::Pure(op), operands)
    }
}

macro_rules! operators {
    ($($bound:ident { $($trait:ident $method:ident $op:expr;)* })*) => {$($(
        impl<'k, T: $bound, B: IntoOperand<T>> ops::$trait<B> for Value<'k, T> {
            type Output = Self;
            #[track_caller]
            fn $method(self, b: B) -> Self {
                self.k.compute($op, &[self.operand, b.into_operand()])
            }
        }
    )*)*};
}
operators! {
    Arithmetic { Add add T::ADD; Sub sub T::SUB; Mul mul T::MUL; }
    Bits { BitAnd bitand T::LOGIC[0]; BitOr bitor T::LOGIC[1]; BitXor bitxor T::LOGIC[2]; }
}

impl<T: Bits> ops::Not for Value<'_, T> {
    type Output = Self;
    #[track_caller]
    fn not(self) -> Self {
        self.k.compute(T::LOGIC[3], &[self.operand])
    }
}

macro_rules! on_one_type {
    ($($trait:ident $method:ident { $($ty:ty, $b:ty, $op:ident;)* })*) => {$($(
        impl<'k, B: IntoOperand<$b>> ops::$trait<B> for Value<'k, $ty> {
            type Output = Self;
            #[track_caller]
            fn $method(self, b: B) -> Self {
                self.k.compute(PureOp::$op, &[self.operand, b.into_operand()])
            }
        }
    )*)*};
}
on_one_type! {
    Add add { f64, f64, AddF64; }
    Mul mul { f64, f64, MulF64; }
    Div div { i32, i32, DivI32; u64, u64, DivU64; f32, f32, DivF32; }
    Rem rem { i32, i32, RemI32; u64, u64, RemU64; }
    Shl shl { u32, u32, ShlB32; u64, u32, ShlB64; }
    Shr shr { u32, u32, ShrU32; u64, u32, ShrU64; i32, u32, ShrI32; }
}

macro_rules! negated {
    ($($ty:ty, $op:ident;)*) => {$(
        impl ops::Neg for Value<'_, $ty> {
            type Output = Self;
            #[track_caller]
            fn neg(self) -> Self {
                self.k.compute(PureOp::$op, &[self.operand])
            }
        }
    )*};
}
negated! { f32, NegF32; i32, NegI32; f16, NegF16; bf16, NegBf16; F16x2, NegF16x2; Bf16x2, NegBf16x2; }

#[allow(clippy::should_implement_trait, reason = "a comparison on the device does not return a Rust bool")]
impl<'k, T: Compare> Value<'k, T> {
    /// `self == b`
    #[track_caller]
    pub fn eq(self, b: impl IntoOperand<T>) -> Value<'k, bool> {
        self.k.compute(T::COMPARE[0], &[self.operand, b.into_operand()])
    }
    /// `self != b`; false where either is NaN.
    #[track_caller]
    pub fn ne(self, b: impl IntoOperand<T>) -> Value<'k, bool> {
        self.k.compute(T::COMPARE[1], &[self.operand, b.into_operand()])
    }
    /// `self < b`
    #[track_caller]
    pub fn lt(self, b: impl IntoOperand<T>) -> Value<'k, bool> {
        self.k.compute(T::COMPARE[2], &[self.operand, b.into_operand()])
    }
    /// `self <= b`
    #[track_caller]
    pub fn le(self, b: impl IntoOperand<T>) -> Value<'k, bool> {
        self.k.compute(T::COMPARE[3], &[self.operand, b.into_operand()])
    }
    /// `self > b`
    #[track_caller]
    pub fn gt(self, b: impl IntoOperand<T>) -> Value<'k, bool> {
        self.k.compute(T::COMPARE[4], &[self.operand, b.into_operand()])
    }
    /// `self >= b`
    #[track_caller]
    pub fn ge(self, b: impl IntoOperand<T>) -> Value<'k, bool> {
        self.k.compute(T::COMPARE[5], &[self.operand, b.into_operand()])
    }
}

impl<T: Arithmetic> Value<'_, T> {
    /// The minimum; for floats, if one is NaN, the other.
    #[must_use]
    #[track_caller]
    pub fn min(self, b: impl IntoOperand<T>) -> Self {
        self.k.compute(T::MIN, &[self.operand, b.into_operand()])
    }
    /// The maximum; for floats, if one is NaN, the other.
    #[must_use]
    #[track_caller]
    pub fn max(self, b: impl IntoOperand<T>) -> Self {
        self.k.compute(T::MAX, &[self.operand, b.into_operand()])
    }
    /// `self · b + c`; rounded once for floats.
    #[must_use]
    #[track_caller]
    pub fn mul_add(self, b: impl IntoOperand<T>, c: impl IntoOperand<T>) -> Self {
        self.k.compute(T::MAD, &[self.operand, b.into_operand(), c.into_operand()])
    }
}

impl<'k> Value<'k, bool> {
    /// `a` if true, otherwise `b`.
    #[track_caller]
    pub fn select<T: Scalar>(self, a: impl IntoOperand<T>, b: impl IntoOperand<T>) -> Value<'k, T> {
        let op = match T::CLASS {
            Class::B16 => PureOp::SelB16,
            Class::B32 => PureOp::SelB32,
            Class::B64 => PureOp::SelB64,
            Class::Pred => {
                let (a, b) = (
                    Value::<bool>::new(self.k, a.into_operand()),
                    Value::<bool>::new(self.k, b.into_operand()),
                );
                return Value::new(self.k, ((self & a) | (!self & b)).operand);
            }
        };
        if let Some(known) = self.known() {
            return Value::new(self.k, if known { a.into_operand() } else { b.into_operand() });
        }
        self.k.compute(op, &[a.into_operand(), b.into_operand(), self.operand])
    }
}

/// Methods of one instruction on one value.
macro_rules! methods {
    ($($(#[$doc:meta])* $ty:ty: $name:ident $op:ident -> $out:ty;)*) => {$(
        impl<'k> Value<'k, $ty> {
            $(#[$doc])*
            #[track_caller]
            pub fn $name(self) -> Value<'k, $out> {
                self.k.compute(PureOp::$op, &[self.operand])
            }
        }
    )*};
}
pub(super) use methods;
methods! {
    /// `|self|`
    f32: abs AbsF32 -> f32;
    /// `2^self`, to 2 ulp; subnormal results are flushed to 0.
    f32: exp2 Ex2F32 -> f32;
    /// The logarithm to base 2, with an error of at most 2^-22.
    f32: log2 Lg2F32 -> f32;
    /// `1 / self`, to 1 ulp.
    f32: recip RcpApproxF32 -> f32;
    /// `1 / self`, correctly rounded.
    f32: recip_exact RcpF32 -> f32;
    /// The square root, correctly rounded.
    f32: sqrt SqrtF32 -> f32;
    /// `1 / sqrt(self)`, with a relative error of at most 2^-22.9.
    f32: rsqrt RsqrtApproxF32 -> f32;
    /// Rounds towards negative infinity.
    f32: floor FloorF32 -> f32;
    /// Rounds to the nearest integer, ties to even.
    f32: round RoundF32 -> f32;
    /// The number of leading zeros.
    u32: leading_zeros Clz -> u32;
}

impl<'k> Value<'k, f32> {
    /// Returns whether the value is NaN.
    #[track_caller]
    pub fn is_nan(self) -> Value<'k, bool> {
        self.k.compute(PureOp::IsNanF32, &[self.operand, self.operand])
    }
    /// `self · b + c`, rounded towards negative infinity.
    #[must_use]
    #[track_caller]
    pub fn mul_add_down(self, b: impl IntoOperand<f32>, c: impl IntoOperand<f32>) -> Self {
        self.k.compute(PureOp::FmaDownF32, &[self.operand, b.into_operand(), c.into_operand()])
    }
    /// `self · b + c`, rounded once and clamped to [0, 1]; 0 instead of NaN.
    #[must_use]
    #[track_caller]
    pub fn mul_add_saturated(self, b: impl IntoOperand<f32>, c: impl IntoOperand<f32>) -> Self {
        self.k.compute(PureOp::FmaSatF32, &[self.operand, b.into_operand(), c.into_operand()])
    }
    /// The maximum, or NaN if one is NaN.
    #[must_use]
    #[track_caller]
    pub fn max_nan(self, b: impl IntoOperand<f32>) -> Self {
        self.k.compute(PureOp::MaxNanF32, &[self.operand, b.into_operand()])
    }
}

impl Value<'_, u32> {
    /// The high half of `self · b`.
    #[must_use]
    #[track_caller]
    pub fn mul_high(self, b: impl IntoOperand<u32>) -> Self {
        self.k.compute(PureOp::MulHiU32, &[self.operand, b.into_operand()])
    }
    /// Four bytes of `{b, self}`, selected by `selector` (`prmt`).
    #[must_use]
    #[track_caller]
    pub fn permute_bytes(self, b: impl IntoOperand<u32>, selector: impl IntoOperand<u32>) -> Self {
        self.k.compute(PureOp::Prmt, &[self.operand, b.into_operand(), selector.into_operand()])
    }
    /// Extracts `len` bits starting at bit `at`.
    #[must_use]
    #[track_caller]
    pub fn bits(self, at: impl IntoOperand<u32>, len: impl IntoOperand<u32>) -> Self {
        self.k.compute(PureOp::Bfe, &[self.operand, at.into_operand(), len.into_operand()])
    }
}

#[allow(clippy::suspicious_arithmetic_impl, reason = "a shift is how it divides")]
impl<'k, B: IntoOperand<u32>> ops::Div<B> for Value<'k, u32> {
    type Output = Self;
    #[track_caller]
    fn div(self, by: B) -> Self {
        match constant(by) {
            Ok(by) if by.is_power_of_two() => self >> by.trailing_zeros(),
            Ok(by) => self.quotient(by),
            Err(by) => self.k.compute(PureOp::DivU32, &[self.operand, by]),
        }
    }
}

#[allow(clippy::suspicious_arithmetic_impl, reason = "a mask is how it divides")]
impl<'k, B: IntoOperand<u32>> ops::Rem<B> for Value<'k, u32> {
    type Output = Self;
    #[track_caller]
    fn rem(self, by: B) -> Self {
        match constant(by) {
            Ok(by) if by.is_power_of_two() => self & (by - 1),
            Ok(by) => self - self.quotient(by) * by,
            Err(by) => self.k.compute(PureOp::RemU32, &[self.operand, by]),
        }
    }
}

/// A constant divisor above 0; otherwise the operand.
fn constant(by: impl IntoOperand<u32>) -> Result<u32, Operand> {
    match by.into_operand() {
        Operand::Const(bits) if bits != 0 => Ok(bits as u32),
        operand => Err(operand),
    }
}

impl Value<'_, u32> {
    /// The quotient by a constant that is not a power of two.
    #[track_caller]
    fn quotient(self, by: u32) -> Self {
        let bits = 32 - (by - 1).leading_zeros();
        let by = u64::from(by);
        let multiplier = ((((1_u64 << bits) - by) << 32) / by + 1) as u32;
        let high = self.mul_high(multiplier);
        (high + ((self - high) >> 1_u32)) >> (bits - 1)
    }
}
