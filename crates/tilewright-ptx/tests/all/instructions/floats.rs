//! Correctly rounded float operations: exact arithmetic, then one rounding to the format.

use super::{
    check::{Definition, Expected, check, halves},
    exact::{BF16, Exact, F16, F32, F64, Format, Number, low, plus, times},
    inputs::{Args, Random},
};
use num_bigint::BigUint;
use tilewright_ptx::isa::pure::PureOp::{self, *};

#[test]
fn floats_match_their_definitions() {
    check(definition, cancelling);
}

/// Fused multiply-add operands with cancellation (product near `-c`) and near ties, which random operands rarely hit.
fn cancelling(op: PureOp) -> Vec<Args> {
    let format = match op {
        FmaF16 | FmaF16x2 => F16,
        FmaBf16 | FmaBf16x2 => BF16,
        FmaF32 | FmaDownF32 | FmaSatF32 => F32,
        _ => return Vec::new(),
    };
    let mut random = Random(7);
    let mut inputs = Vec::new();
    for _ in 0..30_000 {
        let a = random.next() & format.magnitude(u64::MAX);
        let b = random.next() & format.magnitude(u64::MAX);
        let Some(product) = format.encode(&times(&format.decode(a), &format.decode(b))) else { continue };
        let beside = product.wrapping_add(random.below(5)).wrapping_sub(2);
        let sign = (format.magnitude(u64::MAX) + 1) * random.below(2);
        let c = format.magnitude(beside) | sign;
        inputs.push([a, b, c, 0]);
    }
    inputs
}

fn negated(number: Number) -> Number {
    match number {
        Number::Nan => Number::Nan,
        Number::Infinite(sign) => Number::Infinite(!sign),
        Number::Finite(exact) => Number::Finite(Exact { negative: !exact.negative, ..exact }),
    }
}

type Binary = fn(Format, u64, u64) -> Option<u64>;

fn sum(format: Format, a: u64, b: u64) -> Option<u64> {
    format.encode(&plus(&format.decode(a), &format.decode(b)))
}

fn difference(format: Format, a: u64, b: u64) -> Option<u64> {
    format.encode(&plus(&format.decode(a), &negated(format.decode(b))))
}

fn product(format: Format, a: u64, b: u64) -> Option<u64> {
    format.encode(&times(&format.decode(a), &format.decode(b)))
}

fn fused(format: Format, a: u64, b: u64, c: u64) -> Option<u64> {
    format.encode(&plus(&times(&format.decode(a), &format.decode(b)), &format.decode(c)))
}

/// Rounded towards negative infinity; an exact sum of 0 is negative if one of its terms is.
fn fused_down(format: Format, a: u64, b: u64, c: u64) -> Option<u64> {
    let (product, addend) = (times(&format.decode(a), &format.decode(b)), format.decode(c));
    let exact = match (plus(&product, &addend), &product, &addend) {
        (Number::Finite(sum), Number::Finite(a), Number::Finite(b)) if sum.magnitude == BigUint::ZERO => {
            Number::Finite(Exact { negative: a.negative || b.negative, ..sum })
        }
        (sum, ..) => sum,
    };
    let near = format.encode(&exact)?;
    let is_above = match (&exact, plus(&format.decode(near), &negated(exact.clone()))) {
        (Number::Finite(_), Number::Infinite(negative)) => !negative,
        (Number::Finite(_), Number::Finite(excess)) => !excess.negative && excess.magnitude != BigUint::ZERO,
        _ => false,
    };
    Some(if !is_above {
        near
    } else if format.magnitude(near) == 0 {
        format.negative(1)
    } else if format.sign(near) {
        near + 1
    } else {
        near - 1
    })
}

/// Clamped to [0, 1]; NaN becomes 0.
fn saturated(format: Format, bits: Option<u64>) -> u64 {
    let one = format.encode(&Number::Finite(Exact::integer(1))).expect("a number");
    bits.filter(|&bits| !format.sign(bits)).map_or(0, |bits| bits.min(one))
}

/// The minimum, or the maximum: "+0.0 > -0.0"; if one is NaN, the other.
fn extremum(format: Format, a: u64, b: u64, maximum: bool) -> Option<u64> {
    let rank = |bits: u64| {
        let magnitude = i128::from(format.magnitude(bits));
        if format.sign(bits) { -1 - magnitude } else { magnitude }
    };
    match (format.is_nan(a), format.is_nan(b)) {
        (true, true) => None,
        (true, false) => Some(b),
        (false, true) => Some(a),
        (false, false) => Some(if (rank(a) < rank(b)) != maximum { a } else { b }),
    }
}

fn minimum(format: Format, a: u64, b: u64) -> Option<u64> {
    extremum(format, a, b, false)
}

fn maximum(format: Format, a: u64, b: u64) -> Option<u64> {
    extremum(format, a, b, true)
}

/// The quotient to at least 56 bits, and a sticky bit for the remainder.
fn quotient(a: &Number, b: &Number) -> Number {
    match (a, b) {
        (Number::Nan, _) | (_, Number::Nan) | (Number::Infinite(_), Number::Infinite(_)) => Number::Nan,
        (Number::Infinite(sign), Number::Finite(b)) => Number::Infinite(*sign != b.negative),
        (Number::Finite(a), Number::Infinite(sign)) => {
            Number::Finite(Exact { negative: a.negative != *sign, ..Exact::integer(0) })
        }
        (Number::Finite(a), Number::Finite(b)) => {
            let negative = a.negative != b.negative;
            if b.magnitude == BigUint::ZERO {
                return if a.magnitude == BigUint::ZERO { Number::Nan } else { Number::Infinite(negative) };
            }
            let (above, below) = (low(&a.magnitude) << 80, low(&b.magnitude));
            let magnitude = BigUint::from((above / below) << 1 | u128::from(above % below != 0));
            Number::Finite(Exact { negative, magnitude, exponent: a.exponent - b.exponent - 81 })
        }
    }
}

fn root(a: Number) -> Number {
    let Number::Finite(exact) = a else {
        return if matches!(a, Number::Infinite(false)) { a } else { Number::Nan };
    };
    if exact.magnitude == BigUint::ZERO {
        return Number::Finite(exact);
    }
    if exact.negative {
        return Number::Nan;
    }
    let shift = 80 + exact.exponent.rem_euclid(2);
    let square = low(&exact.magnitude) << shift;
    let magnitude = BigUint::from(square.isqrt() << 1 | u128::from(square.isqrt().pow(2) != square));
    Number::Finite(Exact { negative: false, magnitude, exponent: (exact.exponent - shift) / 2 - 1 })
}

fn pair(format: Format, x: &Args, each: Binary) -> Expected {
    let [[a, c], [b, d]] = [halves(x[0]), halves(x[1])];
    Expected::Pair(format, [each(format, a, b), each(format, c, d)])
}

fn fused_pair(format: Format, x: &Args) -> Expected {
    let [[a, d], [b, e], [c, f]] = [halves(x[0]), halves(x[1]), halves(x[2])];
    Expected::Pair(format, [fused(format, a, b, c), fused(format, d, e, f)])
}

fn one(format: Format, x: &Args, each: Binary) -> Expected {
    Expected::Float(format, each(format, x[0], x[1]))
}

/// The sign of `-a` is the other one; a NaN stays one.
fn minus(format: Format, bits: u64) -> Option<u64> {
    format.encode(&negated(format.decode(bits)))
}

fn magnitude(format: Format, bits: u64) -> Expected {
    Expected::Float(format, (!format.is_nan(bits)).then(|| format.magnitude(bits)))
}

pub(crate) fn definition(op: PureOp) -> Option<Definition> {
    singles(op).or_else(|| f16s(op)).or_else(|| bf16s(op))
}

fn singles(op: PureOp) -> Option<Definition> {
    Some(match op {
        AddF32 => |x| one(F32, x, sum),
        SubF32 => |x| one(F32, x, difference),
        MulF32 => |x| one(F32, x, product),
        FmaF32 => |x| Expected::Float(F32, fused(F32, x[0], x[1], x[2])),
        FmaDownF32 => |x| Expected::Float(F32, fused_down(F32, x[0], x[1], x[2])),
        FmaSatF32 => |x| Expected::Float(F32, Some(saturated(F32, fused(F32, x[0], x[1], x[2])))),
        DivF32 => |x| Expected::float(F32, &quotient(&F32.decode(x[0]), &F32.decode(x[1]))),
        RcpF32 => |x| Expected::float(F32, &quotient(&Number::Finite(Exact::integer(1)), &F32.decode(x[0]))),
        SqrtF32 => |x| Expected::float(F32, &root(F32.decode(x[0]))),
        MinF32 => |x| one(F32, x, minimum),
        MaxF32 => |x| one(F32, x, maximum),
        MaxNanF32 => |x| {
            let nan = F32.is_nan(x[0]) || F32.is_nan(x[1]);
            if nan { Expected::Float(F32, None) } else { one(F32, x, maximum) }
        },
        NegF32 => |x| Expected::Float(F32, minus(F32, x[0])),
        AbsF32 => |x| magnitude(F32, x[0]),
        AddF64 => |x| one(F64, x, sum),
        MulF64 => |x| one(F64, x, product),
        _ => return None,
    })
}

/// Instructions on one number, then on pairs.
macro_rules! of_16_bits {
    ($name:ident $float:ident: $add:ident $sub:ident $mul:ident $fma:ident $min:ident $max:ident $neg:ident,
        $add2:ident $sub2:ident $mul2:ident $fma2:ident $min2:ident $max2:ident $neg2:ident) => {
        fn $name(op: PureOp) -> Option<Definition> {
            Some(match op {
                $add => |x| one($float, x, sum),
                $sub => |x| one($float, x, difference),
                $mul => |x| one($float, x, product),
                $fma => |x| Expected::Float($float, fused($float, x[0], x[1], x[2])),
                $min => |x| one($float, x, minimum),
                $max => |x| one($float, x, maximum),
                $neg => |x| Expected::Float($float, minus($float, x[0])),
                $add2 => |x| pair($float, x, sum),
                $sub2 => |x| pair($float, x, difference),
                $mul2 => |x| pair($float, x, product),
                $fma2 => |x| fused_pair($float, x),
                $min2 => |x| pair($float, x, minimum),
                $max2 => |x| pair($float, x, maximum),
                $neg2 => |x| Expected::Pair($float, halves(x[0]).map(|half| minus($float, half))),
                _ => return None,
            })
        }
    };
}
of_16_bits!(f16s F16: AddF16 SubF16 MulF16 FmaF16 MinF16 MaxF16 NegF16,
    AddF16x2 SubF16x2 MulF16x2 FmaF16x2 MinF16x2 MaxF16x2 NegF16x2);
of_16_bits!(bf16s BF16: AddBf16 SubBf16 MulBf16 FmaBf16 MinBf16 MaxBf16 NegBf16,
    AddBf16x2 SubBf16x2 MulBf16x2 FmaBf16x2 MinBf16x2 MaxBf16x2 NegBf16x2);
