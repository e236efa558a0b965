//! Exact widening of every 8-bit pattern to 16 bits.

use super::numbers::number;
use tilewright::Dtype;
use tilewright_kernels::tile::halves::halves;
use tilewright_ptx::{
    build::Builder,
    sim::{Arg, Launch, Memory},
};

#[test]
fn every_pattern_is_exact() {
    for from in [Dtype::E4m3, Dtype::E5m2, Dtype::I8] {
        for (to, arch) in [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|to| [80, 89].map(|arch| (to, arch)))
        {
            let kernel = Builder::kernel("halves", 64, |k| {
                let (bytes, out) = (k.global::<u32>("bytes"), k.global::<u32>("out"));
                let words = halves((from, to), arch, bytes.at(k.thread()).load());
                out.at(k.thread() << 1).store_vector(words);
            })
            .expect("it is sound");
            let mut memory = Memory::new();
            let bytes = memory.alloc_bytes(&(0..=255).collect::<Vec<u8>>());
            let out = memory.alloc(512);
            let args = [Arg::U64(bytes), Arg::U64(out)];
            Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }
                .run(&mut memory)
                .expect("it runs");
            for (bits, found) in (0..=255_u8).zip(memory.read::<u16>(out, 256).expect("it is written")) {
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
