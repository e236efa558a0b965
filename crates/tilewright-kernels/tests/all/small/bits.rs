//! Bit packing, against the engine.

use super::simulate::simulate;
use tilewright::attention::{BitOrder, segment_packbits};
use tilewright_kernels::bits::{PackbitsParams, packbits};
use tilewright_ptx::Memory;

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
