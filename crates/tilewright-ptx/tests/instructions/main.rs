//! Every instruction against a definition of its own, written from the manual's text and not from the table: whole numbers by
//! i128 and loops over bits, floats by exact arithmetic of any length, layouts by the figures' formulas.

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

use check::Meaning;
use tilewright_ptx::isa::pure::PureOp;

/// The families, each with its definitions.
const FAMILIES: [fn(PureOp) -> Option<Meaning>; 6] = [
    integers::meaning,
    bits::meaning,
    comparisons::meaning,
    floats::meaning,
    approximate::meaning,
    conversions::meaning,
];

#[test]
fn every_row_of_the_table_has_one_definition() {
    for &op in PureOp::ALL {
        let count = FAMILIES.iter().filter(|family| family(op).is_some()).count();
        assert_eq!(count, 1, "{op:?} has {count} definitions");
    }
}
