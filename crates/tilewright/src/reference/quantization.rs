//! Quantization to 8 bits in f64, from the definitions: decoding of a bit pattern, the nearest pattern by search, the scale of a group.
//!
//! `e4m3` and `e5m2` are `(-1)^sign · 2^(exponent - bias) · 1.mantissa`. With exponent bits of 0, the exponent is 1 and the
//! leading 1 is absent (OCP 8-bit floating point specification). In e5m2 the largest exponent encodes infinity and
//! NaN; in e4m3 all ones encode NaN, and there is no infinity. `int8` is two's complement.

use crate::Dtype;
use std::sync::OnceLock;

/// The value of the pattern `bits`.
///
/// # Panics
/// When `dtype` does not have 8 bits.
pub fn decode(dtype: Dtype, bits: u8) -> f64 {
    let (mantissa_bits, bias) = match dtype {
        Dtype::E4m3 => (3, 7),
        Dtype::E5m2 => (2, 15),
        Dtype::I8 => return f64::from(bits.cast_signed()),
        _ => panic!("{dtype} does not have 8 bits"),
    };
    let sign = if bits < 0x80 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits & 0x7f) >> mantissa_bits, bits % (1 << mantissa_bits));
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    sign * match (dtype, exponent, mantissa) {
        (Dtype::E4m3, 15, 7) => f64::NAN,
        (Dtype::E5m2, 31, 0) => f64::INFINITY,
        (Dtype::E5m2, 31, _) => f64::NAN,
        (_, 0, _) => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    }
}

/// The finite value of `dtype` nearest to `value`, ties to the even pattern. Out-of-range values, infinity included,
/// saturate. NaN stays NaN; in int8 it becomes 0.
///
/// # Panics
/// When `dtype` does not have 8 bits.
pub fn quantize(dtype: Dtype, value: f64) -> f64 {
    if value.is_nan() {
        return if dtype == Dtype::I8 { 0.0 } else { f64::NAN };
    }
    let finite = finite_values(dtype);
    let range = finite.iter().fold((0.0, 0.0), |(least, most), (_, v)| (v.min(least), v.max(most)));
    let value = value.clamp(range.0, range.1);
    let distance = |v: f64| (v - value).abs();
    let nearest =
        finite.iter().min_by(|a, b| distance(a.1).total_cmp(&distance(b.1)).then((a.0 & 1).cmp(&(b.0 & 1))));
    nearest.map_or(f64::NAN, |(_, v)| *v)
}

/// The finite values of `dtype` with their patterns. Tests quantize millions of numbers, so they are decoded once.
fn finite_values(dtype: Dtype) -> &'static [(u8, f64)] {
    static TABLES: [OnceLock<Vec<(u8, f64)>>; 3] = [const { OnceLock::new() }; 3];
    let table = match dtype {
        Dtype::E4m3 => 0,
        Dtype::E5m2 => 1,
        Dtype::I8 => 2,
        _ => panic!("{dtype} does not have 8 bits"),
    };
    TABLES[table].get_or_init(|| {
        let values = (0..=u8::MAX).map(|bits| (bits, decode(dtype, bits)));
        // -0 equals 0
        values.filter(|(bits, v)| v.is_finite() && (*bits != 0x80 || dtype == Dtype::I8)).collect()
    })
}

/// The scale of a group: `max(max |x|, eps) / limit`, rounded up to a power of two if `power_of_two`; NaN if a number is.
pub fn group_scale(group: &[f64], eps: f64, limit: f64, power_of_two: bool) -> f64 {
    if group.iter().any(|x| x.is_nan()) {
        return f64::NAN;
    }
    let scale = group.iter().fold(eps, |largest, x| largest.max(x.abs())) / limit;
    if !power_of_two || scale.is_infinite() {
        return scale;
    }
    (-126..=128).map(|exponent| 2f64.powi(exponent)).find(|power| *power >= scale).unwrap_or(f64::INFINITY)
}
