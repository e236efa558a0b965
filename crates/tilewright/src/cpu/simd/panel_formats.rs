//! The elements of packed panels, and how a register of them is loaded as f32.

use super::Simd;
use crate::gemm::{GROUP, INT4_INPUTS, PANEL_FEATURES};
use half::{bf16, f16};

/// Bytes of weights that are prefetched ahead. A panel is too short for the prefetchers of the hardware, so this goes on in the
/// panel that is multiplied next.
const PREFETCH: usize = 2048;

/// The elements of a panel.
pub(super) trait PanelFormat {
    /// Bytes per two inputs.
    const PAIR_BYTES: usize;
    const HAS_SCALES: bool;
    const GROUPS_AHEAD: usize = PREFETCH / (GROUP / 2 * Self::PAIR_BYTES);

    /// Register `vector` of both inputs of pair number `pair` of `group`, without scales.
    ///
    /// # Safety
    /// The pair is inside a panel, whose group begins at `group`, and `vector < PANEL_FEATURES / LANES`.
    unsafe fn load<S: Simd>(simd: S, group: *const u8, pair: usize, vector: usize) -> [S::V; 2];
}

pub(super) struct F32Panel;
pub(super) struct F16Panel;
pub(super) struct Bf16Panel;
pub(super) struct Int8Panel;
pub(super) struct Int4Panel;

macro_rules! panel_formats {
    ($($Name:ident, $bytes:expr, $scales:literal, ($simd:ident, $at:ident, $first:ident, $second:ident) => $load:expr);+ $(;)?) => {$(
        impl PanelFormat for $Name {
            const PAIR_BYTES: usize = $bytes;
            const HAS_SCALES: bool = $scales;
            #[inline(always)]
            unsafe fn load<S: Simd>($simd: S, group: *const u8, pair: usize, vector: usize) -> [S::V; 2] {
                let ($at, $first) = (group.wrapping_add(pair * $bytes), vector * S::LANES);
                let $second = $first + PANEL_FEATURES;
                // SAFETY: both registers are inside the pair, upheld by the caller.
                unsafe { $load }
            }
        }
    )+};
}
panel_formats!(
    F32Panel, 128, false, (simd, at, first, second) =>
        [simd.load(at.cast::<f32>().add(first)), simd.load(at.cast::<f32>().add(second))];
    F16Panel, 64, false, (simd, at, first, second) =>
        [simd.load_f16(at.cast::<f16>().add(first)), simd.load_f16(at.cast::<f16>().add(second))];
    Bf16Panel, 64, false, (simd, at, first, second) =>
        [simd.load_bf16(at.cast::<bf16>().add(first)), simd.load_bf16(at.cast::<bf16>().add(second))];
    Int8Panel, 32, true, (simd, at, first, second) =>
        [simd.load_i8(at.cast::<i8>().add(first)), simd.load_i8(at.cast::<i8>().add(second))];
);

impl PanelFormat for Int4Panel {
    const PAIR_BYTES: usize = PANEL_FEATURES;
    const HAS_SCALES: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, group: *const u8, pair: usize, vector: usize) -> [S::V; 2] {
        const PAIRS: usize = INT4_INPUTS / 2;
        let words = group.cast::<u32>().wrapping_add(pair / PAIRS * PANEL_FEATURES + vector * S::LANES);
        // SAFETY: a panel has whole words.
        unsafe { simd.load_nibbles(words, 4 * (pair % PAIRS)) }
    }
}

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
