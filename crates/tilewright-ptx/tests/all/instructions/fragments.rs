//! Fragment layouts of the manual: the matrix position of element `i` of a lane, counted through its registers.
//! (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "mma.m16n8k32", with `groupID` and `threadID_in_group`.)

use super::exact::{BF16, Exact, F16, Number};
use tilewright_ptx::{Elements, isa::pure::Lanes};

pub(crate) const ALL: [Elements; 3] = [Elements::F16, Elements::Bf16, Elements::E4m3];

/// A matrix of small integers, by row and column.
pub(crate) type Matrix = Vec<Vec<i8>>;

/// The bits of an integer in -3..=3.
pub(crate) fn bits(elements: Elements, value: i8) -> u64 {
    const E4M3: [u64; 4] = [0, 0x38, 0x40, 0x44];
    let magnitude = usize::from(value.unsigned_abs());
    let sign = if value < 0 { 0x80 } else { 0 };
    let float = || Number::Finite(Exact::integer(value.into()));
    match elements {
        Elements::F16 => F16.encode(&float()).unwrap(),
        Elements::Bf16 => BF16.encode(&float()).unwrap(),
        Elements::E4m3 => E4M3[magnitude] | sign,
    }
}

/// Row and column of A of element `i` of a lane.
fn position_a(elements: Elements, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    if elements.bytes() == 2 {
        let upper = matches!(i, 0 | 1 | 4 | 5);
        (if upper { group } else { group + 8 }, thread * 2 + (i & 1) + if i >= 4 { 8 } else { 0 })
    } else {
        let upper = i < 4 || (8..12).contains(&i);
        (if upper { group } else { group + 8 }, thread * 4 + (i & 3) + if i >= 8 { 16 } else { 0 })
    }
}

/// Row and column of B of element `i` of a lane.
fn position_b(elements: Elements, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    if elements.bytes() == 2 {
        (thread * 2 + (i & 1) + if i >= 2 { 8 } else { 0 }, group)
    } else {
        (thread * 4 + (i & 3) + if i >= 4 { 16 } else { 0 }, group)
    }
}

/// Row and column of C and D of register `i` of a lane.
pub(crate) fn position_c(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

type Position = fn(Elements, usize, usize) -> (usize, usize);

fn pack<const N: usize>(elements: Elements, matrix: &Matrix, position: Position) -> [Lanes; N] {
    let each = 4 / elements.bytes();
    std::array::from_fn(|register| {
        std::array::from_fn(|lane| {
            (0..each).fold(0, |word, i| {
                let (row, column) = position(elements, lane, register * each + i);
                word | bits(elements, matrix[row][column]) << (i * 8 * elements.bytes())
            })
        })
    })
}

/// Packs 16 rows of A into registers.
pub(crate) fn pack_a(elements: Elements, a: &Matrix) -> [Lanes; 4] {
    pack(elements, a, position_a)
}

/// Packs B, with K rows, into registers.
pub(crate) fn pack_b(elements: Elements, b: &Matrix) -> [Lanes; 2] {
    pack(elements, b, position_b)
}
