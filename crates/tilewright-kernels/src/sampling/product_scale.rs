//! Non-negative f64 products of weights: built from masses, compared, and converted back to fixed point.
//!
//! An f64 holds the product of two weights. Comparisons use the bit patterns, whose order is that of the values.

use tilewright_ptx::Value;

/// `mass · 2^power`, rounded once.
#[track_caller]
pub(super) fn of_mass<'k>(mass: Value<'k, u64>, power: Value<'k, i32>) -> Value<'k, f64> {
    let k = mass.builder();
    let shifted = mass.high().to_f64() * k.constant(2_f64.powi(32));
    (shifted + mass.low().to_f64()) * power_of_two(power)
}

/// A fraction of 2^64 with 11 low zero bits, as a number in [0, 1).
#[track_caller]
pub(super) fn of_fraction(fraction: Value<'_, u64>) -> Value<'_, f64> {
    let k = fraction.builder();
    of_mass(fraction, k.constant(-64))
}

/// `2^n` for n in -1022..=1023.
#[track_caller]
fn power_of_two(n: Value<'_, i32>) -> Value<'_, f64> {
    ((n + 1023).reinterpret::<u32>().to_u64() << 52_u32).reinterpret()
}

#[track_caller]
pub(super) fn less<'k>(a: Value<'k, f64>, b: Value<'k, f64>) -> Value<'k, bool> {
    a.reinterpret::<u64>().lt(b.reinterpret::<u64>())
}

/// `max(a - b, 0)`
#[track_caller]
pub(super) fn excess<'k>(a: Value<'k, f64>, b: Value<'k, f64>) -> Value<'k, f64> {
    let minus = (b.reinterpret::<u64>() ^ (1_u64 << 63)).reinterpret::<f64>();
    let difference = (a + minus).reinterpret::<u64>();
    less(b, a).select(difference, 0_u64).reinterpret()
}

/// Fixed-point scale of f64 values up to `max`, for masses of up to `bits` bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductScale<'k> {
    shift: Value<'k, i32>,
}

impl<'k> ProductScale<'k> {
    #[track_caller]
    pub(super) fn new(bits: Value<'k, u32>, max: Value<'k, f64>) -> Self {
        Self { shift: bits.reinterpret::<i32>() - exponent(max) - 53 }
    }

    /// Converts a value to fixed point, rounded.
    #[track_caller]
    pub(super) fn mass(self, x: Value<'k, f64>) -> Value<'k, u64> {
        let bits = x.reinterpret::<u64>();
        let digits = (bits & ((1 << 52) - 1)) | (1 << 52);
        let shift = exponent(x) + self.shift;
        let (down, up) = ((-shift).max(0).reinterpret::<u32>(), shift.max(0).reinterpret::<u32>());
        let rounded = (((digits << 1_u32) >> down) + 1) >> 1_u32;
        // products of weights are never subnormal: an exponent of 0 means 0
        exponent(x).eq(0).select(0_u64, rounded << up)
    }
}

#[track_caller]
fn exponent(x: Value<'_, f64>) -> Value<'_, i32> {
    (x.reinterpret::<u64>() >> 52_u32).low().reinterpret()
}
