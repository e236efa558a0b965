//! `mma` and `wgmma`: D = A · B + C with 16 rows per warp, any multiple of 8 columns, and 32 bytes of K.
//!
//! Fragments, with `g = lane / 4` and `t = lane % 4` (PTX ISA, "Matrix Fragments for mma.m16n8k16" and similar). Bytes of a row
//! are in K order, so one line of the table covers 16-bit and 8-bit elements:
//!
//! | register | row or column | K bytes, or columns |
//! |---|---|---|
//! | A `r` | row `g + 8 (r % 2)` | bytes `16 (r / 2) + 4 t ..`, 4 of them |
//! | B `r` | column `g` | bytes `16 r + 4 t ..`, 4 of them |
//! | C, D `r` | row `g + 8 (r / 2 % 2)` | column `8 (r / 4) + 2 t + r % 2` |
//!
//! Products of these formats are exact in f32, except for the largest and smallest of bf16. Those of 16 bits are added to C in K
//! order, with each sum rounded to nearest. This order is a choice: the hardware's order is unspecified.
//!
//! The products of 8-bit floats and C are truncated to multiples of 2^-13 of the largest one's power of two, and then added. This was
//! measured on an H100: beside 256, 2^-5 is kept and 2^-6 is lost, of either sign, in the same instruction or a later one.

use crate::isa::{matrix::Elements, pure::Lanes, semantics::e4m3_to_f32};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use std::sync::LazyLock;

/// A row of A or a column of B, with the K extent of one MMA.
pub type Row = [u8; 32];

/// The rows of A in four registers of a warp.
pub fn rows_of(registers: &[Lanes; 4]) -> [Row; 16] {
    let mut rows = [[0; 32]; 16];
    for (r, register) in registers.iter().enumerate() {
        for (lane, &bits) in register.iter().enumerate() {
            put(&mut rows[lane / 4 + 8 * (r % 2)], 16 * (r / 2) + 4 * (lane % 4), bits);
        }
    }
    rows
}

/// The columns of B in two registers of a warp.
pub fn columns_of(registers: &[Lanes; 2]) -> [Row; 8] {
    let mut columns = [[0; 32]; 8];
    for (r, register) in registers.iter().enumerate() {
        for (lane, &bits) in register.iter().enumerate() {
            put(&mut columns[lane / 4], 16 * r + 4 * (lane % 4), bits);
        }
    }
    columns
}

fn put(row: &mut Row, at: usize, bits: u64) {
    row[at..at + 4].copy_from_slice(&(bits as u32).to_le_bytes());
}

/// `mma.sync`: computes D from A, B and C.
pub fn mma(elements: Elements, a: &[Lanes; 4], b: &[Lanes; 2], c: &[Lanes; 4]) -> [Lanes; 4] {
    let mut d = *c;
    multiply(elements, &rows_of(a), &columns_of(b), &mut [&mut d]);
    d
}

/// `wgmma`: D = A · B, or D += A · B if `accumulate`, for 64 rows of A and a multiple of 8 columns of B. `accumulators` is D,
/// with half as many registers per warp as columns. Warp `w` holds rows `16 w .. 16 w + 16`. [`rows_of`] converts registers of
/// A to rows.
///
/// # Panics
/// When the number of rows, columns or registers is wrong.
pub fn wgmma(elements: Elements, a: &[Row], b: &[Row], accumulators: [&mut [Lanes]; 4], accumulate: bool) {
    assert_eq!(a.len(), 64, "rows of A");
    assert!(accumulators.iter().all(|registers| 2 * registers.len() == b.len()), "registers of D");
    let mut accumulators = accumulators;
    if !accumulate {
        accumulators.iter_mut().for_each(|registers| registers.fill([0; 32]));
    }
    multiply(elements, a, b, &mut accumulators);
}

/// Adds A · B to the accumulators of the warps, 16 rows of A each.
fn multiply(elements: Elements, a: &[Row], b: &[Row], sums: &mut [&mut [Lanes]]) {
    assert_eq!(b.len() % 8, 0, "columns come in eights");
    let add_row = if elements.bytes() == 1 { add_narrow_row } else { add_row };
    add_products(&floats(elements, a), &floats(elements, b), elements.depth(), sums, add_row);
}

/// Converts the elements of rows to f32.
fn floats(elements: Elements, rows: &[Row]) -> Vec<f32> {
    match elements {
        Elements::F16 => {
            let halves: Vec<f16> = widen(rows, |row| halves(row).map(f16::from_bits));
            let mut floats = vec![0.0; halves.len()];
            halves.convert_to_f32_slice(&mut floats);
            floats
        }
        Elements::Bf16 => widen(rows, |row| halves(row).map(|bits| bf16::from_bits(bits).to_f32())),
        Elements::E4m3 => {
            let table: &[f32; 256] = &E4M3;
            widen(rows, |row| row.map(|byte| table[usize::from(byte)]))
        }
    }
}

static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|byte| e4m3_to_f32(byte as u8)));

fn widen<T, const N: usize>(rows: &[Row], each: impl Fn(&Row) -> [T; N]) -> Vec<T> {
    let mut numbers = Vec::with_capacity(N * rows.len());
    rows.iter().for_each(|row| numbers.extend(each(row)));
    numbers
}

fn halves(row: &Row) -> [u16; 16] {
    std::array::from_fn(|at| u16::from_le_bytes([row[2 * at], row[2 * at + 1]]))
}

/// The order of eight columns in a line: the columns of one register's adjacent lanes, then those of the next register.
const COLUMN_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Adds the products row by row. All columns of a row form one slice, which the compiler vectorizes.
fn add_products(
    a: &[f32],
    b: &[f32],
    depth: usize,
    sums: &mut [&mut [Lanes]],
    add_row: impl Fn(&[f32], &[f32], &mut [f32]),
) {
    let num_columns = b.len() / depth;
    let mut lines = vec![0.0; b.len()];
    for (at, eight) in b.chunks_exact(8 * depth).enumerate() {
        for (to, column) in COLUMN_ORDER.iter().enumerate() {
            for (k, &element) in eight[column * depth..][..depth].iter().enumerate() {
                lines[k * num_columns + 8 * at + to] = element;
            }
        }
    }
    let mut line = vec![0.0; num_columns];
    for (rows, registers) in a.chunks_exact(16 * depth).zip(sums) {
        for (row, a) in rows.chunks_exact(depth).enumerate() {
            let (half, lanes) = (2 * (row / 8), 4 * (row % 8)..4 * (row % 8) + 4);
            for (eight, registers) in line.chunks_exact_mut(8).zip(registers.chunks_exact(4)) {
                let (even, odd) = (&registers[half][lanes.clone()], &registers[half + 1][lanes.clone()]);
                for (sum, &bits) in eight.iter_mut().zip(even.iter().chain(odd)) {
                    *sum = f32::from_bits(bits as u32);
                }
            }
            add_row(a, &lines, &mut line);
            for (eight, registers) in line.chunks_exact(8).zip(registers.chunks_exact_mut(4)) {
                for at in 0..4 {
                    registers[half][lanes.start + at] = u64::from(eight[at].to_bits());
                    registers[half + 1][lanes.start + at] = u64::from(eight[at + 4].to_bits());
                }
            }
        }
    }
}

/// Adds a row of A times all columns of B, four K steps at a time to reduce loads and stores of the sums.
fn add_row(a: &[f32], b: &[f32], sums: &mut [f32]) {
    for (a, lines) in a.chunks_exact(4).zip(b.chunks_exact(4 * sums.len())) {
        let (b01, b23) = lines.split_at(2 * sums.len());
        let ((b0, b1), (b2, b3)) = (b01.split_at(sums.len()), b23.split_at(sums.len()));
        for ((((sum, &b0), &b1), &b2), &b3) in sums.iter_mut().zip(b0).zip(b1).zip(b2).zip(b3) {
            *sum = *sum + a[0] * b0 + a[1] * b1 + a[2] * b2 + a[3] * b3;
        }
    }
}

/// Bits of an addend of 8-bit products below the power of two of the largest one.
const NARROW_BITS: i32 = 13;

/// The bits of infinity.
const INFINITY: u32 = f32::INFINITY.to_bits();

/// The smallest power of two above which floats have no fraction.
const INTEGERS: f32 = 8_388_608.0;

/// Adds a row of A times all columns of B with the accumulators of 8-bit products, eight columns at a time.
fn add_narrow_row(a: &[f32], b: &[f32], sums: &mut [f32]) {
    let columns = sums.len();
    for (eight, sums) in sums.chunks_exact_mut(8).enumerate() {
        // products and the sum so far
        let mut addends = [[0.0; 8]; 33];
        let (products, last) = addends.split_at_mut(a.len());
        for ((products, a), line) in products.iter_mut().zip(a).zip(b[8 * eight..].chunks(columns)) {
            for (product, b) in products.iter_mut().zip(line) {
                *product = a * b;
            }
        }
        last[0].copy_from_slice(sums);
        // without the sign, bits of floats are in the order of their magnitudes, and NaN is above infinity
        let mut largest = [0_i32; 8];
        for addends in &addends {
            for (largest, addend) in largest.iter_mut().zip(addends) {
                *largest = (*largest).max(addend.abs().to_bits() as i32);
            }
        }
        let (mut scale, mut other) = ([0.0; 8], [0.0; 8]);
        for at in 0..8 {
            (scale[at], other[at]) = narrow_scale(largest[at] as u32);
        }
        // the neutral element: a sum of negative zeros is one
        let mut totals = [-0.0; 8];
        for addends in &addends {
            for at in 0..8 {
                totals[at] += truncate(addends[at] * scale[at] * other[at]);
            }
        }
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum = match largest[at] as u32 {
                0..INFINITY => totals[at] / scale[at] / other[at],
                _ => addends.iter().map(|addends| addends[at]).sum(),
            };
        }
    }
}

/// Removes the fraction of a number below 2^22. Unlike `trunc`, the compiler vectorizes it without SSE4.1.
fn truncate(x: f32) -> f32 {
    let near = x.abs() + INTEGERS - INTEGERS;
    let below = if near > x.abs() { near - 1.0 } else { near };
    below.copysign(x)
}

/// Two powers of two whose product scales addends up to `largest` to integers. The product itself may be out of the range of f32.
fn narrow_scale(largest: u32) -> (f32, f32) {
    let exponent = f64::from(f32::from_bits(largest.clamp(1, INFINITY - 1))).to_bits() >> 52;
    let shift = 1023 + NARROW_BITS - exponent as i32;
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    (power(shift / 2), power(shift - shift / 2))
}
