//! Exact widening of every 8-bit pattern to 16 bits.

use super::case::number;
use tilewright::Dtype;
use tilewright_kernels::tile::halves::halves;
use tilewright_ptx::{Arg, Builder, Launch, Memory};

#[test]
fn every_pattern_is_exact() {
    // at each of the four positions in a word
    let patterns: Vec<u8> =
        (0..4).flat_map(|first| (0..=255_u8).map(move |at| at.wrapping_add(first))).collect();
    for from in [Dtype::E4m3, Dtype::E5m2, Dtype::I8] {
        for (to, arch) in [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|to| [80, 89].map(|arch| (to, arch)))
        {
            let kernel = Builder::kernel("halves", 256, |k| {
                let (bytes, out) = (k.global::<u32>("bytes"), k.global::<u32>("out"));
                let words = halves(from, to, arch, bytes.at(k.thread()).load());
                out.at(k.thread() << 1).store_vector(words);
            })
            .expect("it is sound");
            let mut memory = Memory::new();
            let (bytes, out) = (memory.alloc_bytes(&patterns), memory.alloc(2 * patterns.len()));
            let args = [Arg::U64(bytes), Arg::U64(out)];
            Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }
                .run(&mut memory)
                .expect("it runs");
            let found = memory.read::<u16>(out, patterns.len()).expect("it is written");
            for (&bits, found) in patterns.iter().zip(found) {
                let (found, wanted) = (number(to, &found.to_le_bytes()), number(from, &[bits]));
                let same = found == wanted && found.is_sign_negative() == wanted.is_sign_negative();
                assert!(
                    same || found.is_nan() && wanted.is_nan(),
                    "{from} {bits:#x} is {found} in {to} on sm_{arch}"
                );
            }
        }
    }
}
