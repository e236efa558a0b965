//! Approximate instructions: f64 rounded to the format, within one or two ulp; corner cases from the manual's tables.

use super::{Definition, Expected, F32, F64, Format, check::check};
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

pub(crate) fn definition(op: PureOp) -> Option<Definition> {
    Some(match op {
        Ex2F32 => |x| single(x, f64::exp2),
        Lg2F32 => |x| single(x, f64::log2),
        RcpApproxF32 => |x| single(x, |a| 1.0 / a),
        RsqrtApproxF32 => |x| single(x, |a| 1.0 / a.sqrt()),
        _ => return None,
    })
}

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;
const TINY: f32 = f32::from_bits(1);

/// Operands of the manual's tables.
const CORNERS: [f32; 9] = [-INF, -1.0, -TINY, -0.0, 0.0, TINY, 1.0, INF, NAN];

/// Results of the corner cases.
const RESULTS: [(PureOp, [f32; 9]); 4] = [
    (Ex2F32, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0, INF, NAN]),
    (Lg2F32, [NAN, NAN, -INF, -INF, -INF, -INF, 0.0, INF, NAN]),
    (RcpApproxF32, [-0.0, -1.0, -INF, -INF, INF, INF, 1.0, 0.0, NAN]),
    (RsqrtApproxF32, [NAN, NAN, -INF, -INF, INF, INF, 1.0, 0.0, NAN]),
];

/// Includes signs of zeros, which `near` ignores.
#[test]
fn corner_cases_are_exact() {
    let zeros = [0; 32];
    for (op, results) in RESULTS {
        for (operand, want) in CORNERS.into_iter().zip(results) {
            let operands = [operand.to_bits().into(); 32];
            let got = f32::from_bits(op.eval([&operands, &zeros, &zeros, &zeros])[31] as u32);
            let agrees = want.to_bits() == got.to_bits() || (want.is_nan() && got.is_nan());
            assert!(agrees, "{op:?} of {operand:e} is {got:e}, not {want:?}");
        }
    }
}
