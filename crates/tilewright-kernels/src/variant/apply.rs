//! Recording of one operation of a hook.
//!
//! The semantics are those of [`tilewright::attention::variant::Number`]: comparisons with NaN are false, and `min` and `max`
//! return the second operand if either is NaN.

use super::elementary;
use tilewright::attention::variant::Op;
use tilewright_ptx::{Builder, Value};

#[derive(Debug, Clone, Copy)]
pub(super) enum NodeValue<'k> {
    Number(Value<'k, f32>),
    Truth(Value<'k, bool>),
}

impl<'k> NodeValue<'k> {
    pub(super) fn number(self) -> Option<Value<'k, f32>> {
        match self {
            Self::Number(number) => Some(number),
            Self::Truth(_) => None,
        }
    }
}

/// Precision of exponentials, logarithms and quotients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// Hardware approximations: `tanh` and `sigmoid` through `2^x` and `1 / x`, with an absolute error of about 1e-7. Quotients
    /// that are not computed once use `1 / x`, with a relative error of about 2e-7.
    #[default]
    Fast,
    /// Within a few units in the last place, as on the CPU, and the same on every GPU and in the simulator.
    Exact,
}

/// Records an operation. `once` means that it is computed once, so that an exact quotient costs nothing.
#[track_caller]
pub(super) fn apply<'k>(
    k: &'k Builder,
    op: Op,
    operands: &[NodeValue<'k>],
    arithmetic: Arithmetic,
    once: bool,
) -> NodeValue<'k> {
    use NodeValue::{Number, Truth};
    match (op, operands) {
        (Op::Not, &[Truth(a)]) => Truth(!a),
        (Op::And, &[Truth(a), Truth(b)]) => Truth(a & b),
        (Op::Or, &[Truth(a), Truth(b)]) => Truth(a | b),
        (Op::Lt, &[Number(a), Number(b)]) => Truth(a.lt(b)),
        (Op::Le, &[Number(a), Number(b)]) => Truth(a.le(b)),
        (Op::Eq, &[Number(a), Number(b)]) => Truth(a.eq(b)),
        (Op::Select, &[Truth(p), Number(a), Number(b)]) => Number(p.select(a, b)),
        (Op::Add, &[Number(a), Number(b)]) => Number(a + b),
        (Op::Sub, &[Number(a), Number(b)]) => Number(a - b),
        (Op::Mul, &[Number(a), Number(b)]) => Number(a * b),
        (Op::Div, &[Number(a), Number(b)]) if once || arithmetic == Arithmetic::Exact => Number(a / b),
        (Op::Div, &[Number(a), Number(b)]) => Number(a * b.recip()),
        // the `min` and `max` instructions treat NaN differently
        (Op::Min, &[Number(a), Number(b)]) => Number(a.lt(b).select(a, b)),
        (Op::Max, &[Number(a), Number(b)]) => Number(a.gt(b).select(a, b)),
        (Op::MulAdd, &[Number(a), Number(b), Number(c)]) => Number(a.mul_add(b, c)),
        (Op::Turns, &[Number(a), Number(b), Number(c)]) => Number(elementary::turns(a, b, c)),
        (op, &[Number(a)]) => Number(match arithmetic {
            Arithmetic::Fast => fast(k, op, a),
            Arithmetic::Exact => exact(op, a),
        }),
        // signatures were checked at graph construction
        (_, operands) => operands.first().copied().unwrap_or(Number(k.constant(0.0))),
    }
}

const LOG2_E: f32 = std::f32::consts::LOG2_E;

#[track_caller]
fn fast<'k>(k: &'k Builder, op: Op, a: Value<'k, f32>) -> Value<'k, f32> {
    let one = k.constant(1.0_f32);
    match op {
        Op::Exp2 => a.exp2(),
        Op::Log2 => a.log2(),
        Op::Exp => (a * LOG2_E).exp2(),
        Op::Tanh => ((a * (2.0 * LOG2_E)).exp2() + 1.0).recip().mul_add(-2.0, one),
        Op::Sigmoid => ((a * -LOG2_E).exp2() + 1.0).recip(),
        op => common(op, a),
    }
}

#[track_caller]
fn exact(op: Op, a: Value<'_, f32>) -> Value<'_, f32> {
    match op {
        Op::Exp2 => elementary::exp2(a),
        Op::Log2 => elementary::log2(a),
        Op::Exp => elementary::exp2(a * LOG2_E),
        Op::Tanh => elementary::tanh(a),
        Op::Sigmoid => (elementary::exp2(-a * LOG2_E) + 1.0).recip_exact(),
        op => common(op, a),
    }
}

/// Operations that are the same in both.
#[track_caller]
fn common(op: Op, a: Value<'_, f32>) -> Value<'_, f32> {
    match op {
        Op::Neg => -a,
        Op::Abs => a.abs(),
        Op::Floor => a.floor(),
        Op::Sqrt => a.sqrt(),
        Op::SinTurns => elementary::sin_cos_turns(a).0,
        Op::CosTurns => elementary::sin_cos_turns(a).1,
        _ => a,
    }
}
