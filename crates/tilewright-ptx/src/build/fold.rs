//! Constant folding and algebraic identities.

use crate::{
    ir::Operand,
    isa::{Op, pure::PureOp},
};

/// The operand that replaces an instruction, if its result is known at recording time.
pub(super) fn fold(op: Op, operands: &[Operand]) -> Option<Operand> {
    let Op::Pure(op) = op else { return None };
    let constants = operands.iter().filter_map(|operand| match operand {
        Operand::Const(bits) => Some(*bits),
        Operand::Reg(_) => None,
    });
    if constants.clone().count() == operands.len() {
        let mut args = [[0; 32]; 4];
        args.iter_mut().zip(constants).for_each(|(arg, bits)| *arg = [bits; 32]);
        return Some(Operand::Const(op.eval([&args[0], &args[1], &args[2], &args[3]])[0]));
    }
    unchanged(op, operands)
}

/// Integer identities such as `a + 0`. Floats are excluded: -0 + 0 is +0.
fn unchanged(op: PureOp, operands: &[Operand]) -> Option<Operand> {
    use PureOp::*;
    let is = |at: usize, bits: u64| operands.get(at) == Some(&Operand::Const(bits));
    match op {
        AddU32 | AddI32 | AddU64 | AddI64 | OrB32 | OrB64 | XorB32 | XorB64 if is(1, 0) => Some(operands[0]),
        AddU32 | AddI32 | AddU64 | AddI64 | OrB32 | OrB64 | XorB32 | XorB64 if is(0, 0) => Some(operands[1]),
        SubU32 | SubI32 | SubU64 | SubI64 | ShlB32 | ShlB64 | ShrU32 | ShrU64 | ShrI32 | ShrI64
            if is(1, 0) =>
        {
            Some(operands[0])
        }
        MulU32 | MulI32 | MulU64 | MulI64 | DivU32 | DivU64 if is(1, 1) => Some(operands[0]),
        MulU32 | MulI32 | MulU64 | MulI64 if is(0, 1) => Some(operands[1]),
        MulU32 | MulI32 | MulU64 | MulI64 | AndB32 | AndB64 if is(1, 0) || is(0, 0) => {
            Some(Operand::Const(0))
        }
        AndPred if is(1, 0) || is(0, 0) => Some(Operand::Const(0)),
        OrPred if is(1, 1) || is(0, 1) => Some(Operand::Const(1)),
        AndPred if is(1, 1) => Some(operands[0]),
        AndPred if is(0, 1) => Some(operands[1]),
        OrPred if is(1, 0) => Some(operands[0]),
        OrPred if is(0, 0) => Some(operands[1]),
        _ => None,
    }
}
