//! What some instructions mean, where that is more than an expression.

use half::{bf16, f16};

/// `f32` results that are subnormal become 0 of the same sign (`.ftz`).
#[inline(always)]
pub(super) fn flush(a: f32) -> f32 {
    if a.is_subnormal() { 0.0_f32.copysign(a) } else { a }
}

/// The lesser; the other where one is NaN; -0 is less than +0.
#[inline(always)]
pub(super) fn min_number(a: f32, b: f32) -> f32 {
    if a.is_nan() || b < a || (a == b && b.is_sign_negative()) { b } else { a }
}

/// The greater; the other where one is NaN; +0 is greater than -0.
#[inline(always)]
pub(super) fn max_number(a: f32, b: f32) -> f32 {
    if a.is_nan() || b > a || (a == b && b.is_sign_positive()) { b } else { a }
}

/// Two words as one, the first below.
#[inline(always)]
pub(super) fn joined(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// `prmt`: each of four selectors of 4 bits names a byte of `{b, a}`, or, with its upper bit set, that byte's sign spread.
#[inline(always)]
pub(super) fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = joined(a, b).to_le_bytes();
    let chosen = [0, 4, 8, 12].map(|shift| {
        let selector = selector >> shift;
        let byte = bytes[(selector & 7) as usize];
        if selector & 8 == 0 { byte } else { (byte.cast_signed() >> 7).cast_unsigned() }
    });
    u32::from_le_bytes(chosen)
}

/// `lop3`: bit `4 a + 2 b + c` of the table, for each bit.
#[inline(always)]
pub(super) fn look_up(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut result = 0;
    for case in 0..8 {
        if table >> case & 1 != 0 {
            let pick = |word: u32, bit: u32| if case >> bit & 1 != 0 { word } else { !word };
            result |= pick(a, 2) & pick(b, 1) & pick(c, 0);
        }
    }
    result
}

/// `bfe.u32`: `len` bits of `a` from bit `at` on; both are bytes.
#[inline(always)]
pub(super) fn extract(a: u32, at: u32, len: u32) -> u32 {
    let (at, len) = (at & 255, len & 255);
    let low = a.checked_shr(at).unwrap_or(0);
    if len >= 32 { low } else { low & ((1 << len) - 1) }
}

/// `bfi.b32`: `b` with `len` bits of `a` from bit `at` on; both are bytes.
#[inline(always)]
pub(super) fn insert(a: u32, b: u32, at: u32, len: u32) -> u32 {
    let (at, len) = (at & 255, len & 255);
    let ones = if len >= 32 { u32::MAX } else { (1 << len) - 1 };
    let mask = ones.checked_shl(at).unwrap_or(0);
    b & !mask | a.checked_shl(at).unwrap_or(0) & mask
}

/// Formats of 16 bits whose fused multiply-add rounds once.
pub(super) trait Fused: Copy {
    /// Exactly.
    fn to_f64(self) -> f64;
    /// The nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Fused for f16 {
    fn to_f64(self) -> f64 {
        self.to_f64()
    }
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Fused for bf16 {
    fn to_f64(self) -> f64 {
        self.to_f64()
    }
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// `a · b + c`, rounded once: the product is exact in f64; what the sum loses there and on the way to f32 is kept in the last
/// bit of the f32 ("round to odd"), so that the rounding to 16 bits sees on which side of a tie it was.
#[inline(always)]
pub(super) fn fused<T: Fused>(a: T, b: T, c: T) -> T {
    let (product, c) = (a.to_f64() * b.to_f64(), c.to_f64());
    let sum = product + c;
    let back = sum - product;
    let error = (product - (sum - back)) + (c - back);
    let near = sum as f32;
    if !near.is_finite() || near == 0.0 || (error == 0.0 && f64::from(near) == sum) {
        return T::from_f32(near);
    }
    let beyond = f64::from(near.abs()) > sum.abs();
    let short = f64::from(near) == sum && (error > 0.0) != (sum > 0.0);
    let truncated = near.to_bits() - u32::from(beyond || short);
    T::from_f32(f32::from_bits(truncated | 1))
}

/// The value of an e4m3 ("fn": 0x7f is NaN, no infinity).
#[inline(always)]
pub(crate) fn of_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * (-6.0_f32).exp2(),
        _ => (1.0 + mantissa / 8.0) * ((exponent - 7) as f32).exp2(),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// An e5m2 is the upper half of an f16.
#[inline(always)]
pub(crate) fn of_e5m2(byte: u8) -> f16 {
    f16::from_bits(u16::from(byte) << 8)
}

/// The nearest e4m3, ties to even, saturated at 448; NaN for NaN.
#[inline(always)]
pub(super) fn e4m3_of(a: f32) -> u8 {
    if a.is_nan() {
        return 0x7f;
    }
    nearest(a, 3, -6, 448.0, 0x7e)
}

/// The nearest e5m2, ties to even, saturated at 57344; NaN for NaN.
#[inline(always)]
pub(super) fn e5m2_of(a: f32) -> u8 {
    if a.is_nan() {
        return 0x7f;
    }
    nearest(a, 2, -14, 57344.0, 0x7b)
}

/// The nearest 8-bit float with `digits` bits of mantissa and `lowest` exponent of a normal number; at most `largest`, whose
/// bits are `top`.
fn nearest(a: f32, digits: i32, lowest: i32, largest: f32, top: u8) -> u8 {
    let sign = if a.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(a.abs());
    if magnitude >= f64::from(largest) {
        return sign | top;
    }
    let exponent = (magnitude.log2().floor().max(f64::from(lowest))) as i32;
    // how many steps of this binade; rounding up to the next one carries into the exponent by itself
    let steps = (magnitude * f64::from(digits - exponent).exp2()).round_ties_even() as i32;
    let bits = ((exponent - lowest) << digits) + steps;
    sign | (bits as u8).min(top)
}
