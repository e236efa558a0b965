//! Unsigned division. Assemblers emit a division routine of some 20 instructions even for constant divisors, so the builder replaces
//! those by shifts, or by a multiplication ("Division by Invariant Integers using Multiplication", Granlund and Montgomery 1994,
//! figure 4.1: exact for every dividend of 32 bits).

use super::{IntoOperand, Value};
use crate::{ir::Operand, isa::pure::PureOp};
use std::ops;

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
