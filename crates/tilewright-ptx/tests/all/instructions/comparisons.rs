//! Comparisons: integers by their bits, floats by rank; NaN is unordered.

use super::{BF16, Definition, Expected, F16, F32, Format, check::check};
use std::cmp::Ordering::{self, Equal, Greater, Less};
use tilewright_ptx::isa::pure::PureOp::{self, *};

#[test]
fn comparisons_match_their_definitions() {
    check(definition, |_| Vec::new());
}

fn holds(order: Option<Ordering>, wanted: &[Ordering]) -> Expected {
    Expected::Bits(u64::from(order.is_some_and(|order| wanted.contains(&order))))
}

fn unsigned(x: &[u64; 4]) -> Option<Ordering> {
    Some(x[0].cmp(&x[1]))
}

/// Two's complement orders like the bits with the top bit flipped.
fn signed(x: &[u64; 4], width: u32) -> Option<Ordering> {
    let top = 1 << (width - 1);
    Some((x[0] ^ top).cmp(&(x[1] ^ top)))
}

fn floats(x: &[u64; 4], format: Format) -> Option<Ordering> {
    let place = |bits: u64| {
        let magnitude = i128::from(format.magnitude(bits));
        let place = if format.sign(bits) { -magnitude } else { magnitude };
        (!format.is_nan(bits)).then_some(place)
    };
    Some(place(x[0])?.cmp(&place(x[1])?))
}

macro_rules! comparisons {
    ($op:ident: $($eq:ident $ne:ident $lt:ident $le:ident $gt:ident $ge:ident by $order:expr;)*) => {
        match $op {
            $($eq => |x| holds($order(x), &[Equal]),
            $ne => |x| holds($order(x), &[Less, Greater]),
            $lt => |x| holds($order(x), &[Less]),
            $le => |x| holds($order(x), &[Less, Equal]),
            $gt => |x| holds($order(x), &[Greater]),
            $ge => |x| holds($order(x), &[Greater, Equal]),)*
            IsNanF32 => |x| Expected::Bits(u64::from(F32.is_nan(x[0]) || F32.is_nan(x[1]))),
            _ => return None,
        }
    };
}

pub(crate) fn definition(op: PureOp) -> Option<Definition> {
    Some(comparisons! {
        op:
        EqU32 NeU32 LtU32 LeU32 GtU32 GeU32 by unsigned;
        EqI32 NeI32 LtI32 LeI32 GtI32 GeI32 by |x| signed(x, 32);
        EqU64 NeU64 LtU64 LeU64 GtU64 GeU64 by unsigned;
        EqI64 NeI64 LtI64 LeI64 GtI64 GeI64 by |x| signed(x, 64);
        EqF32 NeF32 LtF32 LeF32 GtF32 GeF32 by |x| floats(x, F32);
        EqF16 NeF16 LtF16 LeF16 GtF16 GeF16 by |x| floats(x, F16);
        EqBf16 NeBf16 LtBf16 LeBf16 GtBf16 GeBf16 by |x| floats(x, BF16);
    })
}
