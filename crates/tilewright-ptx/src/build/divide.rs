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

#[cfg(test)]
mod tests {
    use crate::{
        build::Builder,
        sim::{Arg, Launch, Memory},
    };

    #[test]
    fn quotients_and_remainders_by_constants_are_exact() {
        let divisors =
            [1, 2, 3, 5, 6, 7, 10, 24, 48, 64, 96, 641, 6_700_417, 1 << 31, (1 << 31) + 1, u32::MAX];
        let near = divisors.iter().flat_map(|&by| {
            let last = u32::MAX / by;
            [0, 1, last / 2, last].map(|times| times.wrapping_mul(by)).into_iter()
        });
        let mut numbers: Vec<u32> =
            near.flat_map(|n| [n.wrapping_sub(1), n, n.wrapping_add(1)]).chain([0, u32::MAX]).collect();
        numbers.resize(numbers.len().next_multiple_of(32), 12_345);
        let kernel = Builder::kernel("divide", 32, |k| {
            let (from, to) = (k.global::<u32>("from"), k.global::<u32>("to"));
            let n = from.at(k.cta() * 32 + k.thread()).load();
            for (at, &by) in divisors.iter().enumerate() {
                let to = to.at((k.cta() * 32 + k.thread()) * (2 * divisors.len()) as u32).plus(2 * at);
                to.store(n / by);
                to.plus(1).store(n % by);
            }
        })
        .unwrap();
        let text = crate::text::ptx(&kernel, 80).unwrap();
        assert!(!text.contains("div.u32") && !text.contains("rem.u32"), "a division is left");
        let mut memory = Memory::new();
        let (from, to) = (memory.alloc_from(&numbers), memory.alloc(numbers.len() * divisors.len() * 8));
        let (args, grid) = ([Arg::U64(from), Arg::U64(to)], [numbers.len() as u32 / 32, 1, 1]);
        Launch { kernel: &kernel, grid, args: &args, seed: 0 }.run(&mut memory).unwrap();
        let found = memory.read::<u32>(to, numbers.len() * divisors.len() * 2).unwrap();
        for (n, found) in numbers.iter().zip(found.chunks(2 * divisors.len())) {
            for (by, found) in divisors.iter().zip(found.chunks(2)) {
                assert_eq!(found, [n / by, n % by], "{n} by {by}");
            }
        }
    }
}
