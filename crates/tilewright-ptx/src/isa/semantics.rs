//! Instruction semantics that need more than one expression in the table.

use half::{bf16, f16};

/// Flushes a subnormal f32 to 0 of the same sign (`.ftz`).
#[inline(always)]
pub(super) fn flush(a: f32) -> f32 {
    if a.is_subnormal() { 0.0_f32.copysign(a) } else { a }
}

/// The minimum; if one is NaN, the other; -0 is less than +0.
#[inline(always)]
pub(super) fn min_number(a: f32, b: f32) -> f32 {
    if a.is_nan() || b < a || (a == b && b.is_sign_negative()) { b } else { a }
}

/// The maximum; if one is NaN, the other; +0 is greater than -0.
#[inline(always)]
pub(super) fn max_number(a: f32, b: f32) -> f32 {
    if a.is_nan() || b > a || (a == b && b.is_sign_positive()) { b } else { a }
}

/// Concatenates two words, `low` first.
#[inline(always)]
pub(super) fn concat_words(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// `prmt`: each of four 4-bit selectors picks a byte of `{b, a}`; with its upper bit set, that byte's sign is replicated.
#[inline(always)]
pub(super) fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = concat_words(a, b).to_le_bytes();
    let chosen = [0, 4, 8, 12].map(|shift| {
        let selector = selector >> shift;
        let byte = bytes[(selector & 7) as usize];
        if selector & 8 == 0 { byte } else { (byte.cast_signed() >> 7).cast_unsigned() }
    });
    u32::from_le_bytes(chosen)
}

/// `lop3`: for each bit position, bit `4 a + 2 b + c` of the table.
#[inline(always)]
pub(super) fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut result = 0;
    for case in 0..8 {
        if table >> case & 1 != 0 {
            let pick = |word: u32, bit: u32| if case >> bit & 1 != 0 { word } else { !word };
            result |= pick(a, 2) & pick(b, 1) & pick(c, 0);
        }
    }
    result
}

/// `bfe.u32`: `len` bits of `a` starting at bit `at`; both are taken modulo 256.
#[inline(always)]
pub(super) fn extract(a: u32, at: u32, len: u32) -> u32 {
    let (at, len) = (at & 255, len & 255);
    let low = a.checked_shr(at).unwrap_or(0);
    if len >= 32 { low } else { low & ((1 << len) - 1) }
}

/// 16-bit formats with a fused multiply-add that rounds once.
pub(super) trait FmaFormat: Copy {
    /// Exact.
    fn to_f64(self) -> f64;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl FmaFormat for f16 {
    fn to_f64(self) -> f64 {
        self.to_f64()
    }
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl FmaFormat for bf16 {
    fn to_f64(self) -> f64 {
        self.to_f64()
    }
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// The rounded sum, and what rounding has taken from it (Knuth's TwoSum).
#[inline(always)]
fn sum_and_error(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let back = sum - a;
    (sum, (a - (sum - back)) + (b - back))
}

/// `a · b + c`, rounded once. The product is exact in f64. The sum is rounded to odd in f32: the last bit records inexactness,
/// so the final rounding to 16 bits resolves ties correctly.
#[inline(always)]
pub(super) fn fma<T: FmaFormat>(a: T, b: T, c: T) -> T {
    let (sum, error) = sum_and_error(a.to_f64() * b.to_f64(), c.to_f64());
    let near = sum as f32;
    if !near.is_finite() || near == 0.0 || (error == 0.0 && f64::from(near) == sum) {
        return T::from_f32(near);
    }
    let beyond = f64::from(near.abs()) > sum.abs();
    let short = f64::from(near) == sum && (error > 0.0) != (sum > 0.0);
    let truncated = near.to_bits() - u32::from(beyond || short);
    T::from_f32(f32::from_bits(truncated | 1))
}

/// `a · b + c`, rounded towards negative infinity. The product is exact in f64, so the rounding error of its sum is too.
#[inline(always)]
pub(super) fn fma_down(a: f32, b: f32, c: f32) -> f32 {
    let near = a.mul_add(b, c);
    let (product, addend) = (f64::from(a) * f64::from(b), f64::from(c));
    let (sum, error) = sum_and_error(product, addend);
    if sum == 0.0 {
        // exact: -0 unless both terms are +0
        return if product.is_sign_positive() && c.is_sign_positive() { 0.0 } else { -0.0 };
    }
    let is_above = f64::from(near) > sum || (f64::from(near) == sum && error < 0.0);
    if is_above && sum.is_finite() { near.next_down() } else { near }
}

/// Clamps to [0, 1]; NaN becomes +0 (`.sat`).
#[inline(always)]
pub(super) fn saturate(a: f32) -> f32 {
    if a > 0.0 { a.min(1.0) } else { 0.0 }
}

/// Converts an e4m3 ("fn": 0x7f is NaN, no infinity) to f32.
#[inline(always)]
pub(crate) fn e4m3_to_f32(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * (-6.0_f32).exp2(),
        _ => (1.0 + mantissa / 8.0) * ((exponent - 7) as f32).exp2(),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Rounds to the nearest e4m3, ties to even, saturated at 448; NaN for NaN.
#[inline(always)]
pub(super) fn f32_to_e4m3(a: f32) -> u8 {
    const DIGITS: i32 = 3;
    const LOWEST: i32 = -6;
    const MAX_BITS: u8 = 0x7e;
    if a.is_nan() {
        return 0x7f;
    }
    let sign = if a.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(a.abs());
    if magnitude >= 448.0 {
        return sign | MAX_BITS;
    }
    let exponent = (magnitude.log2().floor().max(f64::from(LOWEST))) as i32;
    // in units of this binade's ulp; rounding up to the next binade carries into the exponent
    let steps = (magnitude * f64::from(DIGITS - exponent).exp2()).round_ties_even() as i32;
    let bits = ((exponent - LOWEST) << DIGITS) + steps;
    sign | (bits as u8).min(MAX_BITS)
}
