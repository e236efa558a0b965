//! Exact arithmetic: arbitrary-precision naturals times a power of 2, and rounding to binary formats.

use std::cmp::Ordering;

/// A natural number: 32-bit limbs, lowest first, highest nonzero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Natural(Vec<u32>);

impl Natural {
    pub(crate) fn new(mut value: u128) -> Self {
        let mut limbs = Vec::new();
        while value != 0 {
            limbs.push(value as u32);
            value >>= 32;
        }
        Self(limbs)
    }

    fn trimmed(mut limbs: Vec<u32>) -> Self {
        while limbs.last() == Some(&0) {
            limbs.pop();
        }
        Self(limbs)
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn bit_len(&self) -> i32 {
        self.0.last().map_or(0, |top| 32 * self.0.len() as i32 - top.leading_zeros() as i32)
    }

    pub(crate) fn bit(&self, at: i32) -> bool {
        self.0.get((at / 32) as usize).is_some_and(|limb| limb >> (at % 32) & 1 != 0)
    }

    /// The lowest 128 bits.
    pub(crate) fn low(&self) -> u128 {
        self.0.iter().take(4).rev().fold(0, |value, &limb| value << 32 | u128::from(limb))
    }

    fn shifted_left(&self, by: i32) -> Self {
        let (limbs, bits) = ((by / 32) as usize, by % 32);
        let mut out = vec![0; limbs];
        let mut carry = 0;
        for &limb in &self.0 {
            let wide = u64::from(limb) << bits | carry;
            out.push(wide as u32);
            carry = wide >> 32;
        }
        out.push(carry as u32);
        Self::trimmed(out)
    }

    fn shifted_right(&self, by: i32) -> Self {
        let (limbs, bits) = ((by / 32) as usize, by % 32);
        let limb = |at: usize| u64::from(self.0.get(at).copied().unwrap_or(0));
        let out = (limbs..self.0.len()).map(|at| ((limb(at) | limb(at + 1) << 32) >> bits) as u32);
        Self::trimmed(out.collect())
    }

    fn any_below(&self, at: i32) -> bool {
        (0..at.min(self.bit_len())).any(|at| self.bit(at))
    }

    fn cmp(&self, other: &Self) -> Ordering {
        (self.0.len().cmp(&other.0.len())).then_with(|| self.0.iter().rev().cmp(other.0.iter().rev()))
    }

    fn plus(&self, other: &Self) -> Self {
        let limb = |of: &Self, at: usize| u64::from(of.0.get(at).copied().unwrap_or(0));
        let mut carry = 0;
        let sum = (0..=self.0.len().max(other.0.len())).map(|at| {
            let wide = limb(self, at) + limb(other, at) + carry;
            carry = wide >> 32;
            wide as u32
        });
        Self::trimmed(sum.collect())
    }

    /// `other` must not be greater.
    fn minus(&self, other: &Self) -> Self {
        let mut borrow = false;
        let difference = self.0.iter().enumerate().map(|(at, &limb)| {
            let (value, first) = limb.overflowing_sub(other.0.get(at).copied().unwrap_or(0));
            let (value, second) = value.overflowing_sub(u32::from(borrow));
            borrow = first | second;
            value
        });
        Self::trimmed(difference.collect())
    }

    fn times(&self, other: &Self) -> Self {
        let mut out = vec![0; self.0.len() + other.0.len()];
        for (i, &a) in self.0.iter().enumerate() {
            let mut carry = 0;
            for (j, &b) in other.0.iter().enumerate() {
                let wide = u64::from(a) * u64::from(b) + u64::from(out[i + j]) + carry;
                out[i + j] = wide as u32;
                carry = wide >> 32;
            }
            out[i + other.0.len()] = carry as u32;
        }
        Self::trimmed(out)
    }
}

/// A magnitude times a power of 2, with a sign (0 is signed).
#[derive(Debug, Clone)]
pub(crate) struct Exact {
    pub(crate) negative: bool,
    pub(crate) magnitude: Natural,
    pub(crate) exponent: i32,
}

impl Exact {
    pub(crate) fn integer(value: i128) -> Self {
        Self { negative: value < 0, magnitude: Natural::new(value.unsigned_abs()), exponent: 0 }
    }

    pub(crate) fn times(&self, other: &Self) -> Self {
        Self {
            negative: self.negative != other.negative,
            magnitude: self.magnitude.times(&other.magnitude),
            exponent: self.exponent + other.exponent,
        }
    }

    /// The sum; an exact 0 is positive unless both are negative (round to nearest).
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let exponent = self.exponent.min(other.exponent);
        let a = self.magnitude.shifted_left(self.exponent - exponent);
        let b = other.magnitude.shifted_left(other.exponent - exponent);
        if self.negative == other.negative {
            return Self { negative: self.negative, magnitude: a.plus(&b), exponent };
        }
        match a.cmp(&b) {
            Ordering::Equal => Self { negative: false, magnitude: Natural::new(0), exponent },
            Ordering::Greater => Self { negative: self.negative, magnitude: a.minus(&b), exponent },
            Ordering::Less => Self { negative: other.negative, magnitude: b.minus(&a), exponent },
        }
    }

    /// The magnitude in units of `2^quantum`, rounded to nearest, ties to even.
    fn steps(&self, quantum: i32) -> u128 {
        let cut = quantum - self.exponent;
        if cut <= 0 {
            return self.magnitude.shifted_left(-cut).low();
        }
        let whole = self.magnitude.shifted_right(cut).low();
        let up = self.magnitude.bit(cut - 1) && (self.magnitude.any_below(cut - 1) || whole % 2 == 1);
        whole + u128::from(up)
    }

    /// The nearest integer, ties to even; 2^64 and above become 2^100.
    pub(crate) fn nearest_integer(&self) -> i128 {
        self.signed_integer(self.steps(0))
    }

    /// The integer part, rounded towards 0.
    pub(crate) fn truncated(&self) -> i128 {
        self.signed_integer(
            self.magnitude.shifted_right((-self.exponent).max(0)).shifted_left(self.exponent.max(0)).low(),
        )
    }

    pub(crate) fn is_integer(&self) -> bool {
        self.exponent >= 0 || !self.magnitude.any_below(-self.exponent)
    }

    fn signed_integer(&self, magnitude: u128) -> i128 {
        let huge = self.magnitude.bit_len() + self.exponent > 64;
        let magnitude = if huge { 1 << 100 } else { magnitude.cast_signed() };
        if self.negative { -magnitude } else { magnitude }
    }
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
        let magnitude = Natural::new(u128::from(significand));
        Number::Finite(Exact { negative, magnitude, exponent: self.lowest + (field - 1).max(0) })
    }

    /// Rounds to nearest, ties to even, with overflow to infinity. `None` for NaN.
    pub(crate) fn encode(self, number: &Number) -> Option<u64> {
        let signed = |negative: bool, bits: u64| bits | u64::from(negative) << (self.width - 1);
        match number {
            Number::Nan => None,
            Number::Infinite(negative) => Some(signed(*negative, self.infinity())),
            Number::Finite(exact) => {
                let top = exact.magnitude.bit_len() + exact.exponent;
                let quantum = (top - self.digits).max(self.lowest);
                let steps = exact.steps(quantum) as u64;
                // the hidden bit of `steps` adds one to the exponent field
                let bits = if exact.magnitude.is_zero() {
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
            if a.magnitude.is_zero() { Number::Nan } else { Number::Infinite(*sign != a.negative) }
        }
    }
}
