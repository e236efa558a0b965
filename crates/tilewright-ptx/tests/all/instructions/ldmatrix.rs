//! `ldmatrix` and `stmatrix` against the manual's figure: threads 0 to 3 hold row 0, two elements each, and so on.

use super::inputs::Random;
use tilewright_ptx::sim::matrix::{ldmatrix, stmatrix};

/// Rows of 16 bytes with distinct elements.
fn rows(count: usize) -> Vec<[u8; 16]> {
    let element = |row: usize, column: usize| ((row * 8 + column) as u16 * 251 + 7).to_le_bytes();
    let row = |row: usize| std::array::from_fn(|byte| element(row, byte / 2)[byte % 2]);
    (0..8 * count).map(row).collect()
}

fn element(rows: &[[u8; 16]], row: usize, column: usize) -> u64 {
    u64::from(rows[row][2 * column]) + 256 * u64::from(rows[row][2 * column + 1])
}

#[test]
fn each_thread_gets_its_elements() {
    for count in [1, 2, 4] {
        let rows = rows(count);
        let (plain, transposed) = (ldmatrix(count, false, &rows), ldmatrix(count, true, &rows));
        assert_eq!((plain.len(), transposed.len()), (count, count));
        let pairs = (0..8 * count).flat_map(|row| [(row, 0), (row, 2), (row, 4), (row, 6)]);
        for (thread, (row, pair)) in pairs.enumerate() {
            let (matrix, lane) = (thread / 32, thread % 32);
            let want = element(&rows, row, pair) + (element(&rows, row, pair + 1) << 16);
            assert_eq!(plain[matrix][lane], want, "matrix {matrix} thread {lane}");
            // transposed: rows and columns of each matrix are exchanged
            let (first, inner) = (8 * matrix, row % 8);
            let want = element(&rows, first + pair, inner) + (element(&rows, first + pair + 1, inner) << 16);
            assert_eq!(transposed[matrix][lane], want, "transposed matrix {matrix} thread {lane}");
        }
    }
}

#[test]
fn stmatrix_inverts_ldmatrix() {
    let mut random = Random(5);
    for (count, transposed) in [(1, false), (2, false), (4, false), (1, true), (2, true), (4, true)] {
        let registers: Vec<_> =
            (0..count).map(|_| std::array::from_fn(|_| random.next() & 0xffff_ffff)).collect();
        let rows = stmatrix(count, transposed, &registers);
        assert_eq!(rows.len(), 8 * count);
        assert_eq!(ldmatrix(count, transposed, &rows), registers, "{count} {transposed}");
    }
    let plain = rows(4);
    assert_eq!(stmatrix(4, false, &ldmatrix(4, false, &plain)), plain);
}
