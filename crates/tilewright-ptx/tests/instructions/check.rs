//! What a definition says, and whether the table agrees.

use super::{
    exact::{F16, F32, Format, Number},
    inputs::{Args, inputs},
};
use tilewright_ptx::isa::pure::{Lanes, PureOp};

/// A definition: what operands give.
pub(crate) type Meaning = fn(&Args) -> Want;

/// What a result has to be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Want {
    /// These bits.
    Bits(u64),
    /// This float, or any NaN of its format: instructions "return an unspecified NaN".
    Float(Format, Option<u64>),
    /// Two floats of 16 bits, the first in the low half.
    Pair(Format, [Option<u64>; 2]),
    /// One of the floats that are at most so many from this value.
    Near(Format, Option<u64>, u64),
    /// Two of them.
    NearPair(Format, [Option<u64>; 2], u64),
    /// The manual leaves it open.
    Anything,
}

impl Want {
    pub(crate) fn float(format: Format, number: &Number) -> Self {
        Self::Float(format, format.encode(number))
    }

    fn accepts(self, got: u64) -> bool {
        let near = |format: Format, want: Option<u64>, got: u64, distance: u64| match want {
            None => format.is_nan(got),
            // either zero is as near to its neighbours; else signs agree
            Some(want) if distance == 0 => want == got,
            Some(want) => ordinal(format, want).abs_diff(ordinal(format, got)) <= u128::from(distance),
        };
        match self {
            Self::Anything => true,
            Self::Bits(bits) => bits == got,
            Self::Float(format, want) => narrow(format, got) && near(format, want, got, 0),
            Self::Near(format, want, distance) => narrow(format, got) && near(format, want, got, distance),
            Self::Pair(format, [low, high]) => Self::NearPair(format, [low, high], 0).accepts(got),
            Self::NearPair(format, [low, high], distance) => {
                narrow(F32, got)
                    && near(format, low, got & 0xffff, distance)
                    && near(format, high, got >> 16, distance)
            }
        }
    }
}

/// Whether nothing lies above the format's bits.
fn narrow(format: Format, bits: u64) -> bool {
    bits <= format.magnitude(u64::MAX) * 2 + 1
}

/// The place among the floats in order; both zeros are 0, NaN is beyond infinity.
fn ordinal(format: Format, bits: u64) -> i128 {
    let magnitude = i128::from(format.magnitude(bits));
    if format.sign(bits) { -magnitude } else { magnitude }
}

/// Both halves of 32 bits.
pub(crate) fn halves(bits: u64) -> [u64; 2] {
    [bits & 0xffff, bits >> 16]
}

/// Compares the rows of a family with their definitions, 32 lanes at a time.
pub(crate) fn check(family: fn(PureOp) -> Option<Meaning>, more: impl Fn(PureOp) -> Vec<Args>) {
    let rows = PureOp::ALL.iter().filter_map(|&op| Some((op, family(op)?)));
    for (op, meaning) in rows {
        let inputs = [inputs(op), more(op)].concat();
        for args in inputs.chunks(32) {
            let lane = |operand: usize| -> Lanes {
                std::array::from_fn(|lane| args.get(lane).map_or(0, |args| args[operand]))
            };
            let got = op.eval([&lane(0), &lane(1), &lane(2), &lane(3)]);
            for (args, &got) in args.iter().zip(&got) {
                let want = meaning(args);
                assert!(want.accepts(got), "{op:?} of {args:x?} is {got:#x}, not {want:x?}");
            }
        }
    }
}

#[test]
fn a_wrong_result_is_refused() {
    assert!(Want::Bits(1).accepts(1) && !Want::Bits(1).accepts(1 << 32 | 1));
    let nan = Want::Float(F32, None);
    assert!(nan.accepts(0x7fc0_0001) && nan.accepts(0xffc0_0000) && !nan.accepts(0x7f80_0000));
    let zero = Want::Float(F32, Some(0));
    assert!(zero.accepts(0) && !zero.accepts(0x8000_0000) && !zero.accepts(1 << 32));
    let one = Want::Near(F32, Some(0x3f80_0000), 1);
    assert!(one.accepts(0x3f7f_ffff) && !one.accepts(0x3f7f_fffe) && !one.accepts(0xbf80_0000));
    let pair = Want::Pair(F16, [Some(0x3c00), None]);
    assert!(pair.accepts(0x7e00_3c00) && !pair.accepts(0x3c00_3c00) && !pair.accepts(0x7e00_3c01));
}
