//! Copies of rows, and packing of bits against the engine.

use super::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise};
use half::{bf16, f16};
use tilewright::attention::{BitOrder, segment_packbits};
use tilewright_kernels::{
    bits::{PackbitsParams, packbits},
    rows::{CopyRowsParams, copy},
    tile::Strided,
};
use tilewright_ptx::Memory;

/// Rows 4, 0, 4 of six go to rows 0, 1, 2, or 3, 1, 0.
fn run<A: Real, B: Real>(width: usize, to: Option<[i32; 3]>, seed: u64) {
    let (stride, mut memory) = (width + 8, Memory::new());
    let (table, before) = (noise::<A>(6 * stride, seed), noise::<B>(4 * stride, seed + 1));
    let of = |address| Strided { address, strides: [stride as u64, 0] };
    let call = CopyRowsParams {
        dtypes: (A::DTYPE, B::DTYPE),
        shape: [3, width as u32],
        table: of(memory.alloc_from(&table)),
        from: memory.alloc_from(&[4, 0, 4]),
        out: of(memory.alloc_from(&before)),
        to: to.map_or(0, |to| memory.alloc_from(&to)),
    };
    let kernel = copy("copy", call.config()).expect("a valid kernel");
    let (grid, args) = call.launch();
    simulate(&format!("{call:?}"), &kernel, (grid, &args), seed, &mut memory);
    let mut expected: Vec<f64> = before.iter().map(|x| x.wide()).collect();
    for (from, to) in [4, 0, 4].into_iter().zip(to.unwrap_or([0, 1, 2])) {
        for d in 0..width {
            expected[to as usize * stride + d] = table[from * stride + d].wide();
        }
    }
    let found: Vec<B> = memory.read(call.out.address, 4 * stride).expect("a result");
    for (i, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        assert_near(&format!("{call:?}: element {i}"), found, expected, (0.0, 0.0));
    }
}

#[test]
fn rows_of_all_widths() {
    // with 100 threads per row a CTA has two rows and a rest; with 276 a row has two CTAs
    for width in [8, 64, 3200, 1, 1101] {
        for to in [None, Some([3, 1, 0])] {
            run::<bf16, bf16>(width, to, 0);
            run::<bf16, f32>(width, to, 1);
            run::<f32, f16>(width, to, 2);
        }
    }
}

#[test]
fn many_seeds() {
    (0..SEEDS).for_each(|seed| run::<f16, f16>(600, Some([2, 3, 0]), seed));
}

#[test]
fn segments_have_bytes_of_their_own() {
    let flags: Vec<bool> = (0..2200).map(|i| i * i % 7 < 3).collect();
    for indptr in [
        vec![0_i32, 2200],
        vec![0, 0, 1, 9, 25, 25, 27, 31, 34, 39, 45, 52, 1400, 2200],
        vec![0, 8, 16, 2200],
    ] {
        for order in [BitOrder::Little, BitOrder::Big] {
            let (expected, bounds) = segment_packbits(&flags, &indptr, order).expect("sound bounds");
            let bounds: Vec<i32> = bounds.iter().map(|&at| at as i32).collect();
            let longest = bounds.windows(2).map(|pair| pair[1] - pair[0]).max().expect("a segment");
            let mut memory = Memory::new();
            // any nonzero byte is set
            let bytes: Vec<u8> = flags.iter().map(|&flag| if flag { 200 } else { 0 }).collect();
            let call = PackbitsParams {
                order,
                flags: memory.alloc_bytes(&bytes),
                indptr: memory.alloc_from(&indptr),
                out: memory.alloc(expected.len()),
                out_indptr: memory.alloc_from(&bounds),
                segments: indptr.len() as u32 - 1,
                longest: longest as u32,
            };
            let kernel = packbits(&call.name(), order).expect("a valid kernel");
            let (grid, args) = call.launch();
            simulate("bits", &kernel, (grid, &args), 0, &mut memory);
            let mut found = vec![0; expected.len()];
            memory.copy_to(call.out, &mut found).expect("all bytes are written");
            assert_eq!(found, expected, "{indptr:?} {order:?}");
        }
    }
}
