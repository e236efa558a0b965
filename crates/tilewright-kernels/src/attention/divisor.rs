//! Division by a launch-time constant: one multiplication and two shifts.

use tilewright_ptx::build::Value;

crate::params! {
    /// A divisor, on the host.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Divisor => DivisorRegs(this) {
        /// The divisor.
        by "": u32,
        /// `2^(31 + shift) / by`, rounded up.
        multiplier "_multiplier": u32,
        /// Base-2 logarithm of the divisor, rounded up.
        shift "_shift": u32,
    }
}

impl Divisor {
    /// Division by `by`, from 1 to 2^31; 0 is treated as 1.
    pub fn new(by: u32) -> Self {
        let by = by.clamp(1, 1 << 31);
        let shift = by.next_power_of_two().trailing_zeros();
        let multiplier = (1_u64 << (31 + shift)).div_ceil(u64::from(by)) as u32;
        Self { by, multiplier, shift }
    }
}

impl<'k> DivisorRegs<'k> {
    /// `n / by`, for `n` below 2^31.
    #[must_use]
    #[track_caller]
    pub fn quotient(self, n: Value<'k, u32>) -> Value<'k, u32> {
        (n << 1).mul_high(self.multiplier) >> self.shift
    }

    /// `n / by` and `n % by`, for `n` below 2^31.
    #[track_caller]
    pub fn divide(self, n: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, u32>) {
        let quotient = self.quotient(n);
        (quotient, n - quotient * self.by)
    }
}

#[cfg(test)]
mod tests {
    use super::Divisor;

    #[test]
    fn quotients_are_exact_below_2_to_the_31() {
        let numbers = |d: u32| {
            let near = (0_u64..40).flat_map(move |i| {
                let multiple = u64::from(d) * (1 + i * 53_687_091 / u64::from(d).max(1));
                [multiple.saturating_sub(1), multiple, multiple + 1]
            });
            near.chain([0, 1, (1 << 31) - 1, (1 << 31) - 2]).filter(|&n| n < 1 << 31)
        };
        let powers = (0..32).flat_map(|bit| [1_u32 << bit, (1 << bit) + 1, (1_u32 << bit).saturating_sub(1)]);
        for d in (1..300).chain([641, 12_345, 65_535]).chain(powers).filter(|&d| (1..=1 << 31).contains(&d)) {
            let divisor = Divisor::new(d);
            for n in numbers(d) {
                let high = (2 * n * u64::from(divisor.multiplier)) >> 32;
                assert_eq!(high >> divisor.shift, n / u64::from(d), "{n} / {d}");
            }
        }
    }
}
