//! Integers: exact in i128, then truncated to the low bits.

use super::check::{Definition, Expected, check};
use Expected::{Anything, Bits};
use tilewright_ptx::isa::pure::PureOp::{self, *};

#[test]
fn integers_match_their_definitions() {
    check(definition, |_| Vec::new());
}

fn low(value: i128, width: u32) -> Expected {
    Bits((value & ((1 << width) - 1)) as u64)
}

fn u(bits: u64) -> i128 {
    i128::from(bits)
}

/// Two's complement: the top bit has negative weight.
fn s(bits: u64, width: u32) -> i128 {
    u(bits) - if bits >> (width - 1) & 1 == 1 { 1 << width } else { 0 }
}

fn divide(a: i128, b: i128, width: u32) -> Expected {
    let overflows = b == -1 && a == -(1 << (width - 1));
    if b == 0 || overflows { Anything } else { low(a / b, width) }
}

/// The remainder of division rounded towards 0.
fn remainder(a: i128, b: i128, width: u32) -> Expected {
    let overflows = b == -1 && a == -(1 << (width - 1));
    if b == 0 || overflows { Anything } else { low(a - a / b * b, width) }
}

pub(crate) fn definition(op: PureOp) -> Option<Definition> {
    unsigned(op).or_else(|| signed(op)).or_else(|| mixed(op))
}

fn unsigned(op: PureOp) -> Option<Definition> {
    Some(match op {
        AddU32 => |x| low(u(x[0]) + u(x[1]), 32),
        SubU32 => |x| low(u(x[0]) - u(x[1]), 32),
        MulU32 => |x| low(u(x[0]) * u(x[1]), 32),
        MadU32 => |x| low(u(x[0]) * u(x[1]) + u(x[2]), 32),
        DivU32 => |x| divide(u(x[0]), u(x[1]), 32),
        RemU32 => |x| remainder(u(x[0]), u(x[1]), 32),
        MinU32 => |x| Bits(if x[0] < x[1] { x[0] } else { x[1] }),
        MaxU32 => |x| Bits(if x[0] > x[1] { x[0] } else { x[1] }),
        AddU64 => |x| low(u(x[0]) + u(x[1]), 64),
        SubU64 => |x| low(u(x[0]) - u(x[1]), 64),
        MulU64 => |x| low(u(x[0]).wrapping_mul(u(x[1])), 64),
        MadU64 => |x| low(u(x[0]).wrapping_mul(u(x[1])).wrapping_add(u(x[2])), 64),
        DivU64 => |x| divide(u(x[0]), u(x[1]), 64),
        RemU64 => |x| remainder(u(x[0]), u(x[1]), 64),
        MinU64 => |x| Bits(if x[0] < x[1] { x[0] } else { x[1] }),
        MaxU64 => |x| Bits(if x[0] > x[1] { x[0] } else { x[1] }),
        _ => return None,
    })
}

fn signed(op: PureOp) -> Option<Definition> {
    Some(match op {
        AddI32 => |x| low(s(x[0], 32) + s(x[1], 32), 32),
        SubI32 => |x| low(s(x[0], 32) - s(x[1], 32), 32),
        MulI32 => |x| low(s(x[0], 32) * s(x[1], 32), 32),
        MadI32 => |x| low(s(x[0], 32) * s(x[1], 32) + s(x[2], 32), 32),
        DivI32 => |x| divide(s(x[0], 32), s(x[1], 32), 32),
        RemI32 => |x| remainder(s(x[0], 32), s(x[1], 32), 32),
        MinI32 => |x| Bits(if s(x[0], 32) < s(x[1], 32) { x[0] } else { x[1] }),
        MaxI32 => |x| Bits(if s(x[0], 32) > s(x[1], 32) { x[0] } else { x[1] }),
        AddI64 => |x| low(s(x[0], 64) + s(x[1], 64), 64),
        SubI64 => |x| low(s(x[0], 64) - s(x[1], 64), 64),
        MulI64 => |x| low(s(x[0], 64) * s(x[1], 64), 64),
        MadI64 => |x| low(s(x[0], 64) * s(x[1], 64) + s(x[2], 64), 64),
        MinI64 => |x| Bits(if s(x[0], 64) < s(x[1], 64) { x[0] } else { x[1] }),
        MaxI64 => |x| Bits(if s(x[0], 64) > s(x[1], 64) { x[0] } else { x[1] }),
        NegI32 => |x| low(-s(x[0], 32), 32),
        _ => return None,
    })
}

/// High and wide products, and width changes.
fn mixed(op: PureOp) -> Option<Definition> {
    Some(match op {
        MulHiU32 => |x| low((u(x[0]) * u(x[1])) >> 32, 32),
        MadWideU32 => |x| low(u(x[0]) * u(x[1]) + u(x[2]), 64),
        U32ToU64 | U16ToU32 => |x| Bits(x[0]),
        I32ToI64 => |x| low(s(x[0], 32), 64),
        Low32 => |x| Bits(x[0] % (1 << 32)),
        Low16 => |x| Bits(x[0] % (1 << 16)),
        High16 => |x| Bits(x[0] / (1 << 16)),
        High32 => |x| Bits(x[0] / (1 << 32)),
        Pack16 => |x| Bits(x[0] + x[1] * (1 << 16)),
        Pack32 => |x| Bits(x[0] + x[1] * (1 << 32)),
        _ => return None,
    })
}
