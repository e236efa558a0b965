//! Conversions: the exact value, rounded to the format; e4m3 by a table of its values.

use super::{Args, BF16, Definition, Exact, Expected, F16, F32, F64, Format, Number, check::check};
use std::sync::LazyLock;
use tilewright_ptx::isa::pure::PureOp::{self, *};

#[test]
fn conversions_match_their_definitions() {
    check(definition, near_ties);
}

/// The largest magnitude of e4m3.
const MAX_E4M3: u32 = 0x7e;

/// The value of magnitude bits of e4m3, including those above the maximum.
fn e4m3_value(bits: u32) -> f64 {
    let (field, fraction) = (bits / 8, bits % 8);
    let steps = if field == 0 { fraction } else { fraction + 8 };
    f64::from(steps) * f64::from(-9 + (field as i32 - 1).max(0)).exp2()
}

/// The midpoints of adjacent magnitudes of e4m3.
static E4M3_TIES: LazyLock<Vec<f64>> =
    LazyLock::new(|| (0..MAX_E4M3).map(|bits| (e4m3_value(bits) + e4m3_value(bits + 1)) / 2.0).collect());

/// `cvt.rn.satfinite` to 8 bits: the result is the number of ties below the value; a tie rounds to even.
fn e4m3_of(bits: u64) -> u64 {
    if F32.is_nan(bits) {
        return 0x7f;
    }
    let magnitude = F64.encode(&F32.decode(F32.magnitude(bits))).map_or(f64::NAN, f64::from_bits);
    let mut below = E4M3_TIES.partition_point(|&tie| tie < magnitude);
    if E4M3_TIES.get(below) == Some(&magnitude) && below % 2 == 1 {
        below += 1;
    }
    below as u64 | if F32.sign(bits) { 0x80 } else { 0 }
}

/// An e4m3 as f16, which represents all of them.
pub(crate) fn e4m3_as_f16(bits: u64) -> Option<u64> {
    let magnitude = (bits & 0x7f) as u32;
    let half = F16.encode(&F64.decode(e4m3_value(magnitude).to_bits()))?;
    (magnitude <= MAX_E4M3).then_some(half | (bits & 0x80) << 8)
}

/// f32 at and next to every tie of f16, bf16 and e4m3.
fn near_ties(op: PureOp) -> Vec<Args> {
    let beside = |bits: u64| [bits.wrapping_sub(1), bits, bits + 1];
    let of = |value: f64| u64::from((value as f32).to_bits());
    let between = |format: Format| {
        (0..format.infinity()).flat_map(move |bits| {
            let value = |bits: u64| F64.encode(&format.decode(bits)).map_or(0.0, f64::from_bits);
            let next = if bits + 1 == format.infinity() {
                2.0 * value(bits) - value(bits - 1)
            } else {
                value(bits + 1)
            };
            beside(of((value(bits) + next) / 2.0))
        })
    };
    let mut inputs: Vec<u64> = match op {
        F32ToF16 | F32ToF16x2 => between(F16).collect(),
        F32ToBf16 | F32ToBf16x2 => between(BF16).collect(),
        F32ToE4m3x2 => E4M3_TIES.iter().flat_map(|&tie| beside(of(tie))).collect(),
        F32ToI32 | F32ToI8 | RoundF32 => (0..600).flat_map(|n| beside(of(f64::from(n) / 2.0))).collect(),
        _ => return Vec::new(),
    };
    inputs.extend(inputs.clone().iter().map(|bits| bits | 1 << 31));
    inputs.iter().enumerate().map(|(at, &bits)| [bits, inputs[inputs.len() - 1 - at], 0, 0]).collect()
}

fn converted(from: Format, to: Format, bits: u64) -> Option<u64> {
    to.encode(&from.decode(bits))
}

#[derive(Clone, Copy)]
enum Rounding {
    Nearest,
    Zero,
    Below,
}

fn whole(exact: &Exact, toward: Rounding) -> i128 {
    let away = i128::from(!exact.is_integer());
    match toward {
        Rounding::Nearest => exact.nearest_integer(),
        Rounding::Zero => exact.truncated(),
        Rounding::Below => exact.truncated() - if exact.negative { away } else { 0 },
    }
}

/// A float rounded to an integral value; 0 keeps its sign.
fn rounded(bits: u64, toward: Rounding) -> Expected {
    match F32.decode(bits) {
        Number::Finite(exact) if !exact.is_integer() => {
            let value = Exact { negative: exact.negative, ..Exact::integer(whole(&exact, toward)) };
            Expected::float(F32, &Number::Finite(value))
        }
        number => Expected::float(F32, &number),
    }
}

/// An integer clamped to `least..=most`, as a 32-bit register.
fn integer(bits: u64, toward: Rounding, least: i128, most: i128) -> Expected {
    let value = match F32.decode(bits) {
        Number::Nan => 0,
        Number::Infinite(negative) => {
            if negative {
                least
            } else {
                most
            }
        }
        Number::Finite(exact) => whole(&exact, toward).clamp(least, most),
    };
    Expected::Bits((value & 0xffff_ffff) as u64)
}

fn from_integer(value: i128, format: Format) -> Expected {
    Expected::float(format, &Number::Finite(Exact::integer(value)))
}

pub(crate) fn definition(op: PureOp) -> Option<Definition> {
    floats(op).or_else(|| small(op)).or_else(|| integers(op))
}

fn floats(op: PureOp) -> Option<Definition> {
    Some(match op {
        F32ToF16 => |x| Expected::Float(F16, converted(F32, F16, x[0])),
        F16ToF32 => |x| Expected::Float(F32, converted(F16, F32, x[0])),
        F32ToBf16 => |x| Expected::Float(BF16, converted(F32, BF16, x[0])),
        F32ToF16x2 => |x| Expected::Pair(F16, [converted(F32, F16, x[1]), converted(F32, F16, x[0])]),
        F32ToBf16x2 => |x| Expected::Pair(BF16, [converted(F32, BF16, x[1]), converted(F32, BF16, x[0])]),
        F32ToF64 => |x| Expected::Float(F64, converted(F32, F64, x[0])),
        FloorF32 => |x| rounded(x[0], Rounding::Below),
        RoundF32 => |x| rounded(x[0], Rounding::Nearest),
        _ => return None,
    })
}

fn small(op: PureOp) -> Option<Definition> {
    Some(match op {
        F32ToE4m3x2 => |x| Expected::Bits(e4m3_of(x[1]) | e4m3_of(x[0]) << 8),
        E4m3x2ToF16x2 => |x| Expected::Pair(F16, [x[0] & 0xff, x[0] >> 8].map(e4m3_as_f16)),
        _ => return None,
    })
}

fn integers(op: PureOp) -> Option<Definition> {
    const LEAST: i128 = -(1 << 31);
    const MOST: i128 = (1 << 31) - 1;
    Some(match op {
        U32ToF32 => |x| from_integer(x[0].into(), F32),
        I32ToF32 => |x| from_integer(i128::from(x[0]) - if x[0] >> 31 == 1 { 1 << 32 } else { 0 }, F32),
        U32ToF64 => |x| from_integer(x[0].into(), F64),
        F32ToI32 => |x| integer(x[0], Rounding::Nearest, LEAST, MOST),
        F32TruncI32 => |x| integer(x[0], Rounding::Zero, LEAST, MOST),
        F32ToI8 => |x| integer(x[0], Rounding::Nearest, -128, 127),
        _ => return None,
    })
}
