//! What the tests of kernels for Hopper begin with.

use half::bf16;
use tilewright_cuda::Stream;

/// The GPU, if there is one and it is a Hopper; otherwise says why the test is skipped.
pub(crate) fn device() -> Option<Stream> {
    match Stream::open(0) {
        Ok(device) if device.context().limits().arch == 90 => Some(device),
        Ok(device) => {
            println!(
                "skipped: {} is sm_{}, the kernel is for sm_90a",
                device.context().limits().name,
                device.context().limits().arch
            );
            None
        }
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

/// Uniform in -1..1, from a linear congruential generator.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    std::iter::repeat_with(next).take(len).collect()
}
