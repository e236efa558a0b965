//! Matrix descriptors against the manual's CuTe layouts and its figures of swizzled atoms.
//! (PTX ISA, `wgmma`: "Canonical Layouts", "Matrix Descriptor Format".)

use tilewright_ptx::{Major, Swizzle, sim::matrix::Descriptor};

/// The position of each 16-byte unit in each row of the swizzle pattern, from the figure. A row is one span long.
pub(crate) const PATTERN_128: [[u32; 8]; 8] = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 0, 3, 2, 5, 4, 7, 6],
    [2, 3, 0, 1, 6, 7, 4, 5],
    [3, 2, 1, 0, 7, 6, 5, 4],
    [4, 5, 6, 7, 0, 1, 2, 3],
    [5, 4, 7, 6, 1, 0, 3, 2],
    [6, 7, 4, 5, 2, 3, 0, 1],
    [7, 6, 5, 4, 3, 2, 1, 0],
];

pub(crate) fn by_figure(swizzle: Swizzle, address: u32) -> u32 {
    let (line, within) = (address / 128, address % 128);
    match swizzle {
        Swizzle::None => address,
        Swizzle::B128 => {
            line * 128 + PATTERN_128[(line % 8) as usize][(within / 16) as usize] * 16 + address % 16
        }
    }
}

/// A mode of a CuTe layout: sizes, innermost first, and strides in elements.
type Mode = [(usize, usize)];

/// The offset of an index in a mode: mixed-radix digits times strides; the last size is unbounded.
fn offset(mode: &Mode, mut index: usize) -> usize {
    let mut sum = 0;
    for (at, &(size, stride)) in mode.iter().enumerate() {
        let digit = if at + 1 == mode.len() { index } else { index % size };
        sum += digit * stride;
        index /= size;
    }
    sum
}

/// A layout of the manual: row and K modes in elements, and the descriptor's fields in bytes.
struct LayoutCase {
    major: Major,
    swizzle: Swizzle,
    bytes: usize,
    lbo: u32,
    sbo: u32,
    rows: Vec<(usize, usize)>,
    depth: Vec<(usize, usize)>,
}

/// Encodes a descriptor by the manual's table.
fn encode(start: u32, lbo: u32, sbo: u32, swizzle: Swizzle) -> u64 {
    let mode = match swizzle {
        Swizzle::None => 0,
        Swizzle::B128 => 1,
    };
    let field = |value: u32| u64::from((value & 0x3_ffff) >> 4);
    field(start) + field(lbo) * (1 << 16) + field(sbo) * (1 << 32) + mode * (1 << 62)
}

fn check(case: &LayoutCase, start: u32, num_rows: usize) {
    let bits = encode(start, case.lbo, case.sbo, case.swizzle);
    let descriptor = Descriptor::decode(bits).unwrap();
    for (row, k) in (0..num_rows).flat_map(|row| (0..32 / case.bytes).map(move |k| (row, k))) {
        let elements = offset(&case.rows, row) + offset(&case.depth, k);
        let want = by_figure(case.swizzle, start + (elements * case.bytes) as u32);
        let got = descriptor.address(case.major, row, k, case.bytes);
        assert_eq!(got, want, "{:?} {:?} row {row} k {k}", case.major, case.swizzle);
    }
}

/// The manual's worked examples without a swizzle. (tf32 is not an element type here, but 4-byte elements are covered.)
#[test]
fn the_manuals_examples() {
    let case = |major, bytes: usize, (lbo, sbo): (u32, u32), rows: &Mode, depth: &Mode| {
        let [lbo, sbo] = [lbo, sbo].map(|elements| elements * bytes as u32);
        let (rows, depth) = (rows.to_vec(), depth.to_vec());
        LayoutCase { major, swizzle: Swizzle::None, bytes, lbo, sbo, rows, depth }
    };
    let of_k = case(Major::K, 4, (64, 32), &[(8, 4), (2, 32)], &[(4, 1), (4, 64)]);
    let of_mn = case(Major::Mn, 2, (128, 64), &[(8, 1), (1, 8), (2, 64)], &[(8, 8), (2, 128)]);
    for case in [of_k, of_mn] {
        check(&case, 0x2000, 16);
    }
}

/// The table of canonical layouts for every element width, with strides other than those of dense tiles.
#[test]
fn canonical_layouts() {
    for (bytes, (lbo, sbo)) in [(2, (4096, 1024)), (1, (4096, 2048)), (2, (1024, 8192)), (2, (16, 3072))] {
        let t = 16 / bytes;
        let (leading, stride) = (lbo as usize / bytes, sbo as usize / bytes);
        for (swizzle, pieces) in [(Swizzle::None, 1), (Swizzle::B128, 8)] {
            let rows = vec![(8, pieces * t), (99, stride)];
            let depth = vec![(t, 1), (99, if swizzle == Swizzle::None { leading } else { t })];
            check(&LayoutCase { major: Major::K, swizzle, bytes, lbo, sbo, rows, depth }, 0x400, 256);
            if bytes == 2 {
                let (outer, deep) = if pieces == 1 { (stride, leading) } else { (leading, stride) };
                let rows = vec![(t, 1), (pieces, t), (99, outer)];
                let depth = vec![(8, pieces * t), (99, deep)];
                check(&LayoutCase { major: Major::Mn, swizzle, bytes, lbo, sbo, rows, depth }, 0x400, 256);
            }
        }
    }
}

/// K steps in a tile with 128-byte rows: the start address advances by 32 bytes inside the pattern.
#[test]
fn k_steps_inside_a_swizzle_pattern() {
    for step in 0..4 {
        let descriptor = Descriptor::decode(encode(0x800 + 32 * step, 16, 1024, Swizzle::B128)).unwrap();
        for (row, k) in (0..64).flat_map(|row| (0..16).map(move |k| (row, k))) {
            let piece = PATTERN_128[(row % 8) as usize][(2 * step + k / 8) as usize];
            let want = 0x800 + row * 128 + piece * 16 + k % 8 * 2;
            assert_eq!(descriptor.address(Major::K, row as usize, k as usize, 2), want, "row {row} k {k}");
        }
    }
}

/// Gathered rows equal the bytes at their elements' addresses.
#[test]
fn gather_matches_element_addresses() {
    let memory: Vec<u8> = (0..1_u32 << 18).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let read = |at: u32| -> Result<[u8; 16], String> {
        assert_eq!(at % 16, 0);
        Ok(memory[at as usize..at as usize + 16].try_into().unwrap())
    };
    for swizzle in [Swizzle::None, Swizzle::B128] {
        let descriptor = Descriptor::decode(encode(0x1c00, 0x2000, 0x600, swizzle)).unwrap();
        for (major, bytes) in [(Major::K, 1), (Major::K, 2), (Major::Mn, 2)] {
            let rows = descriptor.gather(major, 64, read).unwrap();
            for (row, at) in (0..64).flat_map(|row| (0..32).map(move |at| (row, at))) {
                let address = descriptor.address(major, row, at / bytes, bytes) as usize + at % bytes;
                assert_eq!(rows[row][at], memory[address], "{major:?} {swizzle:?} row {row} byte {at}");
            }
        }
    }
    let descriptor = Descriptor::decode(encode(0, 0, 1024, Swizzle::B128)).unwrap();
    let refuse = |at: u32| if at < 2048 { Ok([0; 16]) } else { Err(at) };
    assert_eq!(descriptor.gather(Major::K, 64, refuse), Err(2048));
}

#[test]
fn fields_and_errors() {
    let descriptor = Descriptor::decode(encode(0x3_fff0, 0x120, 0x3_0010, Swizzle::B128)).unwrap();
    assert_eq!(descriptor, Descriptor { start: 0x3_fff0, lbo: 0x120, sbo: 0x3_0010, swizzle: Swizzle::B128 });
    let error = |bits: u64| Descriptor::decode(bits).unwrap_err();
    assert_eq!(error(1 << 14 | 0x40), "matrix descriptor 0x0000000000004040: bits 0x4000 belong to no field");
    assert_eq!(
        error(3 << 49),
        "matrix descriptor 0x0006000000000000: base offset 3 is not simulated; let the swizzle's pattern begin at a \
         multiple of 1024 bytes"
    );
    let of_64 = "matrix descriptor 0x8000000000000000: swizzle mode 2 is not simulated, expected 0 or 1";
    assert_eq!(error(2 << 62), of_64);
    for at in [14, 15, 30, 31, 46, 47, 48, 52, 61] {
        assert!(error(1 << at).contains("belong to no field"), "bit {at}");
    }
}
