//! `ldmatrix` and `stmatrix`: matrices of 8 rows of 16 bytes, one warp register per matrix.
//!
//! Lane `l` holds elements `2 (l % 4)` and `2 (l % 4) + 1` of row `l / 4`, the first in the low half. Transposed, it holds the
//! 16-bit elements in rows `2 (l % 4)` and `2 (l % 4) + 1` of column `l / 4`. (PTX ISA, fragment figures of "ldmatrix".)

use crate::isa::pure::Lanes;

/// Loads `count` matrices into registers. Matrix `i` consists of rows `8 i .. 8 i + 8`.
///
/// # Panics
/// When there are not 8 rows per matrix.
pub fn ldmatrix(count: usize, transposed: bool, rows: &[[u8; 16]]) -> Vec<Lanes> {
    assert_eq!(rows.len(), 8 * count, "a matrix has 8 rows");
    let register = |matrix: &[[u8; 16]]| {
        std::array::from_fn(|lane| {
            let half = |second| {
                let (row, column) = element_position(lane, second, transposed);
                u64::from(u16::from_le_bytes([matrix[row][2 * column], matrix[row][2 * column + 1]]))
            };
            half(0) | half(1) << 16
        })
    };
    rows.chunks_exact(8).map(register).collect()
}

/// Stores `count` matrices, one register each, to rows: the inverse of [`ldmatrix`].
///
/// # Panics
/// When there is not one register per matrix.
pub fn stmatrix(count: usize, transposed: bool, registers: &[Lanes]) -> Vec<[u8; 16]> {
    assert_eq!(registers.len(), count, "a matrix is a register");
    let mut rows = vec![[0; 16]; 8 * count];
    for (matrix, register) in rows.chunks_exact_mut(8).zip(registers) {
        for (lane, &bits) in register.iter().enumerate() {
            for second in 0..2 {
                let (row, column) = element_position(lane, second, transposed);
                let element = ((bits >> (16 * second)) as u16).to_le_bytes();
                matrix[row][2 * column..2 * column + 2].copy_from_slice(&element);
            }
        }
    }
    rows
}

/// The row and column of the first or second element of a lane.
fn element_position(lane: usize, second: usize, transposed: bool) -> (usize, usize) {
    let (major, minor) = (lane / 4, 2 * (lane % 4) + second);
    if transposed { (minor, major) } else { (major, minor) }
}
