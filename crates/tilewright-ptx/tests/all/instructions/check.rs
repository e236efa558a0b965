//! Comparison of the instruction table with the definitions.

use super::{Args, F16, F32, Format, Number, inputs::inputs};
use tilewright_ptx::isa::pure::{Lanes, PureOp};

/// A definition: the expected result of operands.
pub(crate) type Definition = fn(&Args) -> Expected;

/// An expected result.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Expected {
    /// These bits.
    Bits(u64),
    /// This float, or any NaN of its format: instructions "return an unspecified NaN".
    Float(Format, Option<u64>),
    /// Two 16-bit floats, the first in the low half.
    Pair(Format, [Option<u64>; 2]),
    /// A float at most this many representable values from the given one.
    Near(Format, Option<u64>, u64),
    /// Unspecified by the manual.
    Anything,
}

impl Expected {
    pub(crate) fn float(format: Format, number: &Number) -> Self {
        Self::Float(format, format.encode(number))
    }

    fn accepts(self, got: u64) -> bool {
        let near = |format: Format, want: Option<u64>, got: u64, distance: u64| match want {
            None => format.is_nan(got),
            // with a tolerance, both zeros are equal
            Some(want) if distance == 0 => want == got,
            Some(want) => ordinal(format, want).abs_diff(ordinal(format, got)) <= u128::from(distance),
        };
        match self {
            Self::Anything => true,
            Self::Bits(bits) => bits == got,
            Self::Float(format, want) => narrow(format, got) && near(format, want, got, 0),
            Self::Near(format, want, distance) => narrow(format, got) && near(format, want, got, distance),
            Self::Pair(format, [low, high]) => {
                narrow(F32, got) && near(format, low, got & 0xffff, 0) && near(format, high, got >> 16, 0)
            }
        }
    }
}

/// Whether all bits above the format's width are 0.
fn narrow(format: Format, bits: u64) -> bool {
    bits <= format.magnitude(u64::MAX) * 2 + 1
}

/// The rank of a float in numeric order; both zeros are 0, NaN is above infinity.
fn ordinal(format: Format, bits: u64) -> i128 {
    let magnitude = i128::from(format.magnitude(bits));
    if format.sign(bits) { -magnitude } else { magnitude }
}

/// Both halves of 32 bits.
pub(crate) fn halves(bits: u64) -> [u64; 2] {
    [bits & 0xffff, bits >> 16]
}

/// Compares the instructions of a family with their definitions, 32 inputs at a time.
pub(crate) fn check(family: fn(PureOp) -> Option<Definition>, more: impl Fn(PureOp) -> Vec<Args>) {
    let rows = PureOp::ALL.iter().filter_map(|&op| Some((op, family(op)?)));
    for (op, definition) in rows {
        let inputs = [inputs(op), more(op)].concat();
        for args in inputs.chunks(32) {
            let lane = |operand: usize| -> Lanes {
                std::array::from_fn(|lane| args.get(lane).map_or(0, |args| args[operand]))
            };
            let got = op.eval([&lane(0), &lane(1), &lane(2), &lane(3)]);
            for (args, &got) in args.iter().zip(&got) {
                let want = definition(args);
                assert!(want.accepts(got), "{op:?} of {args:x?} is {got:#x}, not {want:x?}");
            }
        }
    }
}

#[test]
fn a_wrong_result_is_rejected() {
    assert!(Expected::Bits(1).accepts(1) && !Expected::Bits(1).accepts(1 << 32 | 1));
    let nan = Expected::Float(F32, None);
    assert!(nan.accepts(0x7fc0_0001) && nan.accepts(0xffc0_0000) && !nan.accepts(0x7f80_0000));
    let zero = Expected::Float(F32, Some(0));
    assert!(zero.accepts(0) && !zero.accepts(0x8000_0000) && !zero.accepts(1 << 32));
    let one = Expected::Near(F32, Some(0x3f80_0000), 1);
    assert!(one.accepts(0x3f7f_ffff) && !one.accepts(0x3f7f_fffe) && !one.accepts(0xbf80_0000));
    let pair = Expected::Pair(F16, [Some(0x3c00), None]);
    assert!(pair.accepts(0x7e00_3c00) && !pair.accepts(0x3c00_3c00) && !pair.accepts(0x7e00_3c01));
}
