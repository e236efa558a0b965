//! Division by a launch-time constant: one multiplication and two shifts.

use tilewright_ptx::Value;

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
    pub(crate) fn quotient(self, n: Value<'k, u32>) -> Value<'k, u32> {
        (n << 1).mul_high(self.multiplier) >> self.shift
    }

    /// `n / by` and `n % by`, for `n` below 2^31.
    #[track_caller]
    pub(crate) fn divide(self, n: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, u32>) {
        let quotient = self.quotient(n);
        (quotient, n - quotient * self.by)
    }
}
