//! `mma` and `wgmma` against dot products over K, element by element.

use super::{
    ALL, BF16, F16, F32, Matrix, Random,
    conversions::e4m3_as_f16,
    fragments::{bits, pack_a, pack_b, position_c},
};
use tilewright_ptx::{
    Elements,
    isa::pure::Lanes,
    sim::matrix::{Row, mma, rows_of, wgmma},
};

fn random_matrix(rows: usize, columns: usize, random: &mut Random) -> Matrix {
    let mut row = || (0..columns).map(|_| random.below(7) as i8 - 3).collect();
    (0..rows).map(|_| row()).collect()
}

fn one_hot(rows: usize, columns: usize, at: (usize, usize)) -> Matrix {
    let mut matrix = vec![vec![0; columns]; rows];
    matrix[at.0][at.1] = 1;
    matrix
}

/// The register bits of a sum.
fn sum_bits(sum: i32) -> u64 {
    u64::from((sum as f32).to_bits())
}

/// The dot product over K, of integers so small that no order rounds.
fn dot(a: &Matrix, b: &Matrix, row: usize, column: usize) -> i32 {
    a[row].iter().zip(b).map(|(&a, line)| i32::from(a) * i32::from(line[column])).sum()
}

fn check_mma(elements: Elements, a: &Matrix, b: &Matrix, c: &[[i32; 8]; 16]) {
    let registers = std::array::from_fn(|i| {
        std::array::from_fn(|lane| {
            let (row, column) = position_c(lane, i);
            sum_bits(c[row][column])
        })
    });
    let d = mma(elements, &pack_a(elements, a), &pack_b(elements, b), &registers);
    for (lane, i) in (0..32).flat_map(|lane| (0..4).map(move |i| (lane, i))) {
        let (row, column) = position_c(lane, i);
        let want = sum_bits(c[row][column] + dot(a, b, row, column));
        assert_eq!(d[i][lane], want, "{elements:?}: D[{row}][{column}]");
    }
}

#[test]
fn mma_multiplies_random_fragments() {
    let mut random = Random(1);
    for elements in ALL {
        for _ in 0..50 {
            let a = random_matrix(16, elements.depth(), &mut random);
            let b = random_matrix(elements.depth(), 8, &mut random);
            let c = std::array::from_fn(|_| std::array::from_fn(|_| random.below(1000) as i32 - 500));
            check_mma(elements, &a, &b, &c);
        }
    }
}

/// Each element of A with each column of B, all other elements 0.
#[test]
fn mma_multiplies_each_pair_of_elements() {
    for elements in ALL {
        for k in 0..elements.depth() {
            for (row, column) in (0..16).flat_map(|row| (0..8).map(move |column| (row, column))) {
                let a = one_hot(16, elements.depth(), (row, k));
                let b = one_hot(elements.depth(), 8, (k, column));
                check_mma(elements, &a, &b, &[[0; 8]; 16]);
            }
        }
    }
}

/// Sums round after each product in K order.
#[test]
fn sums_round_in_order() {
    for elements in ALL {
        let (a, b) = (vec![vec![1; elements.depth()]; 16], vec![vec![1; 8]; elements.depth()]);
        // each 1 is half an ulp of 2^24, a tie to even; a wider accumulator would change the sum
        let large = [[(2.0_f32.powi(24)).to_bits().into(); 32]; 4];
        assert_eq!(
            mma(elements, &pack_a(elements, &a), &pack_b(elements, &b), &large),
            large,
            "{elements:?}"
        );
    }
}

/// All values of a format times 1, with all other elements 0.
#[test]
fn every_element_has_its_value() {
    let check = |elements: Elements, bits: u64, want: Option<u64>| {
        let mut a = [[0; 32]; 4];
        a[0][0] = bits;
        let one = pack_b(elements, &one_hot(elements.depth(), 8, (0, 0)));
        let got = mma(elements, &a, &one, &[[0; 32]; 4])[0][0];
        // -0 and the 0 of C are 0
        let agrees = want.map_or(F32.is_nan(got), |want| got == if want == 1 << 31 { 0 } else { want });
        assert!(agrees, "{elements:?} {bits:#x} is {got:#x}, not {want:x?}");
    };
    for bits in 0..1 << 16 {
        check(Elements::F16, bits, F32.encode(&F16.decode(bits)));
        check(Elements::Bf16, bits, F32.encode(&BF16.decode(bits)));
    }
    for byte in 0..1 << 8 {
        check(Elements::E4m3, byte, e4m3_as_f16(byte).and_then(|half| F32.encode(&F16.decode(half))));
    }
}

fn rows(elements: Elements, matrix: &Matrix) -> Vec<Row> {
    let row = |line: &Vec<i8>| {
        let bytes = line.iter().flat_map(|&value| {
            let bits = bits(elements, value).to_le_bytes();
            bits.into_iter().take(elements.bytes())
        });
        bytes.collect::<Vec<u8>>().try_into().unwrap()
    };
    matrix.iter().map(row).collect()
}

fn check_wgmma(elements: Elements, n: usize, accumulate: bool, random: &mut Random) {
    let depth = elements.depth();
    let a = random_matrix(64, depth, random);
    let columns = random_matrix(n, depth, random);
    // without accumulation the old value is arbitrary, even NaN
    let before = |random: &mut Random| if accumulate { random.below(100) as i32 } else { -1 };
    let old: Vec<Vec<i32>> = (0..64).map(|_| (0..n).map(|_| before(random)).collect()).collect();
    // the manual's figure of D: a lane has two adjacent elements of a row, two of row + 8, then the same at column + 8
    let place = |row: usize, column: usize| {
        let lane = 4 * (row % 8) + column % 8 / 2;
        (row / 16, column / 8 * 4 + row % 16 / 8 * 2 + column % 2, lane)
    };
    let mut d = vec![vec![[0; 32]; n / 2]; 4];
    for (row, line) in old.iter().enumerate() {
        for (column, &sum) in line.iter().enumerate() {
            let (warp, register, lane) = place(row, column);
            let bits = if accumulate { sum_bits(sum) } else { 0xffff_ffff };
            d[warp][register][lane] = bits;
        }
    }
    let [w0, w1, w2, w3] = &mut d[..] else { unreachable!("four warps") };
    wgmma(elements, &rows(elements, &a), &rows(elements, &columns), [w0, w1, w2, w3], accumulate);
    for (row, line) in old.iter().enumerate() {
        for (column, &sum) in line.iter().enumerate() {
            let (warp, register, lane) = place(row, column);
            let products = a[row].iter().zip(&columns[column]);
            let dot: i32 = products.map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
            let want = sum_bits(dot + if accumulate { sum } else { 0 });
            assert_eq!(d[warp][register][lane], want, "{elements:?} n {n}: D[{row}][{column}]");
        }
    }
}

#[test]
fn wgmma_multiplies_every_shape() {
    let mut random = Random(2);
    for elements in ALL {
        for n in (8..=256).step_by(8) {
            check_wgmma(elements, n, n % 16 == 0, &mut random);
            check_wgmma(elements, n, n % 16 != 0, &mut random);
        }
    }
}

/// A `wgmma` A operand in registers has the fragment layout of `mma`, 16 rows per warp.
#[test]
fn rows_of_inverts_pack_a() {
    let mut random = Random(3);
    for elements in ALL {
        let a = random_matrix(16, elements.depth(), &mut random);
        let registers: [Lanes; 4] = pack_a(elements, &a);
        assert_eq!(rows_of(&registers).to_vec(), rows(elements, &a), "{elements:?}");
    }
}
