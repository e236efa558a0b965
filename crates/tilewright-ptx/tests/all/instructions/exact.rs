//! Exact arithmetic: integers of any size times a power of 2, and rounding to binary formats.

use num_bigint::BigUint;
use std::cmp::Ordering;

/// A magnitude times a power of 2, with a sign (0 is signed).
#[derive(Debug, Clone)]
pub(crate) struct Exact {
    pub(crate) negative: bool,
    pub(crate) magnitude: BigUint,
    pub(crate) exponent: i32,
}

impl Exact {
    pub(crate) fn integer(value: i128) -> Self {
        Self { negative: value < 0, magnitude: BigUint::from(value.unsigned_abs()), exponent: 0 }
    }

    pub(crate) fn times(&self, other: &Self) -> Self {
        Self {
            negative: self.negative != other.negative,
            magnitude: &self.magnitude * &other.magnitude,
            exponent: self.exponent + other.exponent,
        }
    }

    /// The sum; an exact 0 is positive unless both are negative (round to nearest).
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let exponent = self.exponent.min(other.exponent);
        let a = &self.magnitude << (self.exponent - exponent);
        let b = &other.magnitude << (other.exponent - exponent);
        if self.negative == other.negative {
            return Self { negative: self.negative, magnitude: a + b, exponent };
        }
        match a.cmp(&b) {
            Ordering::Equal => Self { negative: false, magnitude: BigUint::ZERO, exponent },
            Ordering::Greater => Self { negative: self.negative, magnitude: a - b, exponent },
            Ordering::Less => Self { negative: other.negative, magnitude: b - a, exponent },
        }
    }

    /// The magnitude in units of `2^quantum`, rounded to nearest, ties to even.
    fn steps(&self, quantum: i32) -> u128 {
        let cut = quantum - self.exponent;
        if cut <= 0 {
            return low(&(&self.magnitude << -cut));
        }
        let whole = low(&(&self.magnitude >> cut));
        let up = self.magnitude.bit(cut as u64 - 1) && (self.any_below(cut - 1) || whole % 2 == 1);
        whole + u128::from(up)
    }

    /// The nearest integer, ties to even; 2^64 and above become 2^100.
    pub(crate) fn nearest_integer(&self) -> i128 {
        self.signed_integer(self.steps(0))
    }

    /// The integer part, rounded towards 0.
    pub(crate) fn truncated(&self) -> i128 {
        self.signed_integer(low(&((&self.magnitude >> (-self.exponent).max(0)) << self.exponent.max(0))))
    }

    pub(crate) fn is_integer(&self) -> bool {
        self.exponent >= 0 || !self.any_below(-self.exponent)
    }

    /// Whether one of the lowest `bits` bits of the magnitude is set.
    fn any_below(&self, bits: i32) -> bool {
        self.magnitude.trailing_zeros().is_some_and(|zeros| (zeros as i32) < bits)
    }

    fn signed_integer(&self, magnitude: u128) -> i128 {
        let huge = bit_len(&self.magnitude) + self.exponent > 64;
        let magnitude = if huge { 1 << 100 } else { magnitude.cast_signed() };
        if self.negative { -magnitude } else { magnitude }
    }
}

fn bit_len(magnitude: &BigUint) -> i32 {
    magnitude.bits() as i32
}

/// The lowest 128 bits.
pub(crate) fn low(magnitude: &BigUint) -> u128 {
    let mut digits = magnitude.iter_u64_digits().map(u128::from);
    let [low, high] = [(); 2].map(|()| digits.next().unwrap_or(0));
    high << 64 | low
}

/// An IEEE 754 binary format: significand bits including the hidden one, exponent of the smallest subnormal, width in bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    digits: i32,
    lowest: i32,
    width: i32,
}

pub(crate) const F16: Format = Format { digits: 11, lowest: -24, width: 16 };
pub(crate) const BF16: Format = Format { digits: 8, lowest: -133, width: 16 };
pub(crate) const F32: Format = Format { digits: 24, lowest: -149, width: 32 };
pub(crate) const F64: Format = Format { digits: 53, lowest: -1074, width: 64 };

/// A decoded float.
#[derive(Debug, Clone)]
pub(crate) enum Number {
    Nan,
    /// With a sign.
    Infinite(bool),
    Finite(Exact),
}

impl Format {
    /// The bits of infinity.
    pub(crate) fn infinity(self) -> u64 {
        (1 << (self.width - 1)) - (1 << (self.digits - 1))
    }

    pub(crate) fn sign(self, bits: u64) -> bool {
        bits >> (self.width - 1) & 1 != 0
    }

    /// The bits of the negative number with these bits of its magnitude.
    pub(crate) fn negative(self, magnitude: u64) -> u64 {
        magnitude | 1 << (self.width - 1)
    }

    /// The bits without their sign.
    pub(crate) fn magnitude(self, bits: u64) -> u64 {
        bits & ((1 << (self.width - 1)) - 1)
    }

    pub(crate) fn is_nan(self, bits: u64) -> bool {
        self.magnitude(bits) > self.infinity()
    }

    pub(crate) fn is_subnormal(self, bits: u64) -> bool {
        (1..1 << (self.digits - 1)).contains(&self.magnitude(bits))
    }

    pub(crate) fn decode(self, bits: u64) -> Number {
        let (negative, bits) = (self.sign(bits), self.magnitude(bits));
        let hidden = 1 << (self.digits - 1);
        let (field, fraction) = ((bits / hidden) as i32, bits % hidden);
        if bits > self.infinity() {
            return Number::Nan;
        }
        if bits == self.infinity() {
            return Number::Infinite(negative);
        }
        let significand = if field == 0 { fraction } else { fraction + hidden };
        let magnitude = BigUint::from(significand);
        Number::Finite(Exact { negative, magnitude, exponent: self.lowest + (field - 1).max(0) })
    }

    /// Rounds to nearest, ties to even, with overflow to infinity. `None` for NaN.
    pub(crate) fn encode(self, number: &Number) -> Option<u64> {
        let signed = |negative: bool, bits: u64| bits | u64::from(negative) << (self.width - 1);
        match number {
            Number::Nan => None,
            Number::Infinite(negative) => Some(signed(*negative, self.infinity())),
            Number::Finite(exact) => {
                let top = bit_len(&exact.magnitude) + exact.exponent;
                let quantum = (top - self.digits).max(self.lowest);
                let steps = exact.steps(quantum) as u64;
                // the hidden bit of `steps` adds one to the exponent field
                let bits = if exact.magnitude == BigUint::ZERO {
                    0
                } else {
                    ((quantum - self.lowest) as u64)
                        .saturating_mul(1 << (self.digits - 1))
                        .saturating_add(steps)
                };
                Some(signed(exact.negative, bits.min(self.infinity())))
            }
        }
    }
}

/// `a + b` in every case.
pub(crate) fn plus(a: &Number, b: &Number) -> Number {
    match (a, b) {
        (Number::Finite(a), Number::Finite(b)) => Number::Finite(a.plus(b)),
        (Number::Nan, _) | (_, Number::Nan) => Number::Nan,
        (Number::Infinite(a), Number::Infinite(b)) if a != b => Number::Nan,
        (Number::Infinite(sign), _) | (_, Number::Infinite(sign)) => Number::Infinite(*sign),
    }
}

/// `a · b` in every case.
pub(crate) fn times(a: &Number, b: &Number) -> Number {
    match (a, b) {
        (Number::Finite(a), Number::Finite(b)) => Number::Finite(a.times(b)),
        (Number::Nan, _) | (_, Number::Nan) => Number::Nan,
        (Number::Infinite(a), Number::Infinite(b)) => Number::Infinite(a != b),
        (Number::Infinite(sign), Number::Finite(a)) | (Number::Finite(a), Number::Infinite(sign)) => {
            if a.magnitude == BigUint::ZERO { Number::Nan } else { Number::Infinite(*sign != a.negative) }
        }
    }
}
