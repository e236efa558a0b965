//! The elements of packed panels, and how a register of them is loaded as f32.

use super::Simd;
use crate::gemm::{GROUP, PANEL_FEATURES};
use half::{bf16, f16};

/// Bytes of weights that are prefetched ahead. A panel is too short for the prefetchers of the hardware, so this goes on in the
/// panel that is multiplied next.
const PREFETCH: usize = 2048;

/// The elements of a panel.
pub(super) trait PanelFormat {
    /// Bytes of the 16 weights of two inputs.
    const PAIR_BYTES: usize;
    const HAS_SCALES: bool;
    const GROUPS_AHEAD: usize = PREFETCH / (GROUP / 2 * Self::PAIR_BYTES);

    /// Register `vector` of both inputs of a pair, without scales.
    ///
    /// # Safety
    /// `PAIR_BYTES` are readable at `pair`, and `vector < PANEL_FEATURES / LANES`.
    unsafe fn load<S: Simd>(simd: S, pair: *const u8, vector: usize) -> [S::V; 2];
}

pub(super) struct F32Panel;
pub(super) struct F16Panel;
pub(super) struct Bf16Panel;
pub(super) struct Int8Panel;
pub(super) struct Int4Panel;

macro_rules! panel_formats {
    ($($Name:ident, $bytes:expr, $scales:literal, ($simd:ident, $pair:ident, $first:ident, $second:ident) => $load:expr);+ $(;)?) => {$(
        impl PanelFormat for $Name {
            const PAIR_BYTES: usize = $bytes;
            const HAS_SCALES: bool = $scales;
            #[inline(always)]
            unsafe fn load<S: Simd>($simd: S, $pair: *const u8, vector: usize) -> [S::V; 2] {
                let $first = vector * S::LANES;
                let $second = $first + PANEL_FEATURES;
                // SAFETY: both registers are inside the pair, upheld by the caller.
                unsafe { $load }
            }
        }
    )+};
}
panel_formats!(
    F32Panel, 128, false, (simd, pair, first, second) =>
        [simd.load(pair.cast::<f32>().add(first)), simd.load(pair.cast::<f32>().add(second))];
    F16Panel, 64, false, (simd, pair, first, second) =>
        [simd.load_f16(pair.cast::<f16>().add(first)), simd.load_f16(pair.cast::<f16>().add(second))];
    Bf16Panel, 64, false, (simd, pair, first, second) =>
        [simd.load_bf16(pair.cast::<bf16>().add(first)), simd.load_bf16(pair.cast::<bf16>().add(second))];
    Int8Panel, 32, true, (simd, pair, first, second) =>
        [simd.load_i8(pair.cast::<i8>().add(first)), simd.load_i8(pair.cast::<i8>().add(second))];
    Int4Panel, 16, true, (simd, pair, first, _second) => simd.load_nibbles(pair.add(first));
);

/// Calls a function generic over the format of a matrix.
macro_rules! with_format {
    ($weight:expr, $F:ident => $body:expr) => {
        match $weight.format() {
            WeightFormat::Float(Dtype::F32) => {
                type $F = F32Panel;
                $body
            }
            WeightFormat::Float(Dtype::F16) => {
                type $F = F16Panel;
                $body
            }
            WeightFormat::Float(_) => {
                type $F = Bf16Panel;
                $body
            }
            WeightFormat::Int8 => {
                type $F = Int8Panel;
                $body
            }
            WeightFormat::Int4 => {
                type $F = Int4Panel;
                $body
            }
        }
    };
}

pub(super) use with_format;
