//! Numbers for tests.

use half::bf16;

/// Uniform in -1..1, from a linear congruential generator.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    std::iter::repeat_with(next).take(len).collect()
}
