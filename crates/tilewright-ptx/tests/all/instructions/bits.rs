//! Bit operations: each result bit separately, following the manual's loops.

use super::check::{Definition, Expected, check};
use Expected::Bits;
use tilewright_ptx::isa::pure::PureOp::{self, *};

#[test]
fn bit_operations_match_their_definitions() {
    check(definition, |_| Vec::new());
}

fn bit(word: u64, at: u64) -> bool {
    word >> at & 1 == 1
}

/// The word with these bits.
fn word(width: u64, bit: impl Fn(u64) -> bool) -> Expected {
    Bits((0..width).map(|at| u64::from(bit(at)) << at).sum())
}

fn shift_left(a: u64, by: u64, width: u64) -> Expected {
    word(width, |at| at >= by && bit(a, at - by))
}

/// Shifts in `fill` from above.
fn shift_right(a: u64, by: u64, width: u64, fill: bool) -> Expected {
    word(width, |at| if at + by < width { bit(a, at + by) } else { fill })
}

fn permute(x: &[u64; 4]) -> Expected {
    let byte = |at: u64| if at < 4 { x[0] >> (8 * at) & 0xff } else { x[1] >> (8 * (at - 4)) & 0xff };
    let chosen = |at: u64| {
        let selector = x[2] >> (4 * at) & 0xf;
        let byte = byte(selector % 8);
        match (selector / 8, byte / 128) {
            (0, _) => byte,
            (_, sign) => 0xff * sign,
        }
    };
    Bits((0..4).map(|at| chosen(at) << (8 * at)).sum())
}

fn leading_zeros(x: &[u64; 4]) -> Expected {
    let mut count = 0;
    while count < 32 && !bit(x[0], 31 - count) {
        count += 1;
    }
    Bits(count)
}

pub(crate) fn definition(op: PureOp) -> Option<Definition> {
    Some(match op {
        AndB32 => |x| word(32, |at| bit(x[0], at) && bit(x[1], at)),
        OrB32 => |x| word(32, |at| bit(x[0], at) || bit(x[1], at)),
        XorB32 => |x| word(32, |at| bit(x[0], at) != bit(x[1], at)),
        NotB32 => |x| word(32, |at| !bit(x[0], at)),
        AndB64 => |x| word(64, |at| bit(x[0], at) && bit(x[1], at)),
        OrB64 => |x| word(64, |at| bit(x[0], at) || bit(x[1], at)),
        XorB64 => |x| word(64, |at| bit(x[0], at) != bit(x[1], at)),
        NotB64 => |x| word(64, |at| !bit(x[0], at)),
        AndPred => |x| Bits(u64::from(x[0] == 1 && x[1] == 1)),
        OrPred => |x| Bits(u64::from(x[0] == 1 || x[1] == 1)),
        XorPred => |x| Bits(u64::from(x[0] != x[1])),
        NotPred => |x| Bits(u64::from(x[0] == 0)),
        ShlB32 => |x| shift_left(x[0], x[1], 32),
        ShlB64 => |x| shift_left(x[0], x[1], 64),
        ShrU32 => |x| shift_right(x[0], x[1], 32, false),
        ShrU64 => |x| shift_right(x[0], x[1], 64, false),
        ShrI32 => |x| shift_right(x[0], x[1], 32, bit(x[0], 31)),
        ShrI64 => |x| shift_right(x[0], x[1], 64, bit(x[0], 63)),
        Prmt => permute,
        Lop3 => |x| {
            word(32, |at| {
                let case =
                    4 * u64::from(bit(x[0], at)) + 2 * u64::from(bit(x[1], at)) + u64::from(bit(x[2], at));
                bit(x[3], case)
            })
        },
        Bfe => |x| {
            let (from, len) = (x[1] & 0xff, x[2] & 0xff);
            word(32, |at| at < len && from + at <= 31 && bit(x[0], from + at))
        },
        Clz => leading_zeros,
        SelB16 | SelB32 | SelB64 => |x| Bits(if x[2] == 1 { x[0] } else { x[1] }),
        _ => return None,
    })
}
