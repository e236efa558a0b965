//! Every instruction against an independent definition, written from the manual and not from the table: integers in i128 and
//! bit loops, floats in exact arbitrary-precision arithmetic, layouts by the formulas of the figures.

mod approximate;
mod bits;
mod check;
mod comparisons;
mod conversions;
mod descriptors;
mod effects;
mod exact;
mod floats;
mod fragments;
mod harness;
mod inputs;
mod integers;
mod ldmatrix;
mod products;
mod tensor;
mod waits;

use check::{Definition, Expected};
use exact::{BF16, Exact, F16, F32, F64, Format, Number};
use fragments::{ALL, Matrix};
use inputs::{Args, Random};

use tilewright_ptx::isa::pure::PureOp;

/// The instruction families with their definitions.
const FAMILIES: [fn(PureOp) -> Option<Definition>; 6] = [
    integers::definition,
    bits::definition,
    comparisons::definition,
    floats::definition,
    approximate::definition,
    conversions::definition,
];

#[test]
fn every_pure_instruction_has_one_definition() {
    for &op in PureOp::ALL {
        let count = FAMILIES.iter().filter(|family| family(op).is_some()).count();
        assert_eq!(count, 1, "{op:?} has {count} definitions");
    }
}
