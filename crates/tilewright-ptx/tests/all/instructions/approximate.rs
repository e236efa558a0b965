//! Approximate instructions: f64 rounded to the format, within one or two ulp; corner cases from the manual's tables.

use super::{
    check::{Definition, Expected, check, halves},
    exact::{BF16, F16, F32, F64, Format},
};
use tilewright_ptx::isa::pure::PureOp::{self, *};

#[test]
fn approximations_are_near_their_definitions() {
    check(definition, |_| Vec::new());
}

/// The tolerance in ulp: f32 functions are not correctly rounded on every host, and the manual allows at least this much for
/// each instruction (2 ulp of f32 are 2^-22).
const PLACES: u64 = 2;

fn value(format: Format, bits: u64) -> f64 {
    F64.encode(&format.decode(bits)).map_or(f64::NAN, f64::from_bits)
}

fn nearest(format: Format, value: f64) -> Option<u64> {
    format.encode(&F64.decode(value.to_bits()))
}

fn flushed(format: Format, bits: u64) -> u64 {
    if format.is_subnormal(bits) { bits - format.magnitude(bits) } else { bits }
}

/// Flushes operand and result (`.ftz`).
fn ftz(format: Format, bits: u64, function: fn(f64) -> f64) -> Option<u64> {
    let result = nearest(format, function(value(format, flushed(format, bits))));
    result.map(|bits| flushed(format, bits))
}

fn single(x: &[u64; 4], function: fn(f64) -> f64) -> Expected {
    Expected::Near(F32, ftz(F32, x[0], function), PLACES)
}

fn pair(format: Format, x: &[u64; 4], function: fn(f64) -> f64) -> Expected {
    Expected::NearPair(format, halves(x[0]).map(|bits| nearest(format, function(value(format, bits)))), 1)
}

pub(crate) fn definition(op: PureOp) -> Option<Definition> {
    Some(match op {
        Ex2F32 => |x| single(x, f64::exp2),
        Lg2F32 => |x| single(x, f64::log2),
        RcpApproxF32 => |x| single(x, |a| 1.0 / a),
        SqrtApproxF32 => |x| single(x, f64::sqrt),
        RsqrtApproxF32 => |x| single(x, |a| 1.0 / a.sqrt()),
        SinApproxF32 => |x| single(x, f64::sin),
        CosApproxF32 => |x| single(x, f64::cos),
        TanhApproxF32 => |x| Expected::Near(F32, nearest(F32, value(F32, x[0]).tanh()), PLACES),
        Ex2F16 => |x| Expected::Near(F16, nearest(F16, value(F16, x[0]).exp2()), 1),
        Ex2F16x2 => |x| pair(F16, x, f64::exp2),
        Ex2Bf16x2 => |x| Expected::NearPair(BF16, halves(x[0]).map(|bits| ftz(BF16, bits, f64::exp2)), 1),
        TanhF16x2 => |x| pair(F16, x, f64::tanh),
        TanhBf16x2 => |x| pair(BF16, x, f64::tanh),
        _ => return None,
    })
}

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;
const TINY: f32 = f32::from_bits(1);

/// Operands of the manual's tables.
const CORNERS: [f32; 9] = [-INF, -1.0, -TINY, -0.0, 0.0, TINY, 1.0, INF, NAN];

/// Results of the corner cases; `None` if rounded.
const RESULTS: [(PureOp, [Option<f32>; 9]); 8] = {
    const fn s(a: f32) -> Option<f32> {
        Some(a)
    }
    let (o, i, n, none) = (s(0.0), s(INF), s(NAN), None);
    let (m, e) = (s(-0.0), s(-INF));
    [
        (Ex2F32, [o, s(0.5), s(1.0), s(1.0), s(1.0), s(1.0), s(2.0), i, n]),
        (Lg2F32, [n, n, e, e, e, e, o, i, n]),
        (RcpApproxF32, [m, s(-1.0), e, e, i, i, s(1.0), o, n]),
        (SqrtApproxF32, [n, n, m, m, o, o, s(1.0), i, n]),
        (RsqrtApproxF32, [n, n, e, e, i, i, s(1.0), o, n]),
        (SinApproxF32, [n, none, m, m, o, o, none, n, n]),
        (CosApproxF32, [n, none, s(1.0), s(1.0), s(1.0), s(1.0), none, n, n]),
        (TanhApproxF32, [s(-1.0), none, s(-TINY), m, o, s(TINY), none, s(1.0), n]),
    ]
};

/// Includes signs of zeros, which `near` ignores.
#[test]
fn corner_cases_are_exact() {
    let zeros = [0; 32];
    for (op, results) in RESULTS {
        for (operand, want) in CORNERS.into_iter().zip(results) {
            let operands = [operand.to_bits().into(); 32];
            let got = f32::from_bits(op.eval([&operands, &zeros, &zeros, &zeros])[31] as u32);
            let agrees = |want: f32| want.to_bits() == got.to_bits() || (want.is_nan() && got.is_nan());
            assert!(want.is_none_or(agrees), "{op:?} of {operand:e} is {got:e}, not {want:?}");
        }
    }
}
