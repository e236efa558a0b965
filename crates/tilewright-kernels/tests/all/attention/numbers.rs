//! Noise, and conversion between f64 and the bytes of a dtype.

use half::{bf16, f16};
use tilewright::{Dtype, E4m3, E5m2};

/// Deterministic noise in -1..1.
pub(crate) fn noise(seed: u64, at: usize) -> f64 {
    let mut state = (at as u64).wrapping_add(seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((state ^ (state >> 31)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

/// Rounds to a dtype.
pub(crate) fn bytes(dtype: Dtype, x: f64) -> Vec<u8> {
    match dtype {
        Dtype::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        Dtype::E4m3 => vec![E4m3::from_f32(x as f32).to_bits()],
        Dtype::E5m2 if x.is_infinite() => vec![if x > 0.0 { 0x7c } else { 0xfc }],
        Dtype::E5m2 => vec![E5m2::from_f32(x as f32).to_bits()],
        Dtype::I8 => vec![(x * 100.0).round().clamp(-128.0, 127.0) as i8 as u8],
        Dtype::F32 => (x as f32).to_le_bytes().to_vec(),
    }
}

/// Decodes one element.
pub(crate) fn number(dtype: Dtype, bytes: &[u8]) -> f64 {
    let pair = || [bytes[0], bytes[1]];
    match dtype {
        Dtype::F16 => f16::from_le_bytes(pair()).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes(pair()).to_f64(),
        Dtype::E4m3 => f64::from(f32::from(E4m3::from_bits(bytes[0]))),
        Dtype::E5m2 => f64::from(f32::from(E5m2::from_bits(bytes[0]))),
        Dtype::I8 => f64::from(bytes[0] as i8),
        Dtype::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    }
}
