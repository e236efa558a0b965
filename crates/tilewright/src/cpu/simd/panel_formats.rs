//! The elements of packed panels, and how a register of them is loaded as f32.

use super::Simd;
use crate::Dtype;
use crate::gemm::{GROUP, INT4_INPUTS, PANEL_FEATURES, TILE_FEATURES, TILE_PANELS, WeightFormat};
use half::{bf16, f16};

/// Bytes of weights that are prefetched ahead. A tile is too short for the prefetchers of the hardware, so this goes on in the tile
/// that is multiplied next.
const PREFETCH: usize = 4096;

/// The elements of a panel.
pub(super) trait PanelFormat {
    const FORMAT: WeightFormat;
    /// Pairs of a panel that are adjacent.
    const ADJACENT_PAIRS: usize = 1;
    const HAS_SCALES: bool = Self::FORMAT.is_quantized();
    /// Bytes of two inputs of a panel.
    const PAIR_BYTES: usize = Self::FORMAT.pair_bytes();
    /// Bytes of two inputs of a tile.
    const TILE_PAIR_BYTES: usize = TILE_PANELS * Self::PAIR_BYTES;
    /// Bytes of the scales of a block.
    const SCALE_BYTES: usize = Self::FORMAT.scale_bytes();
    const BLOCK_BYTES: usize = Self::FORMAT.block_bytes();
    const BLOCKS_AHEAD: usize = PREFETCH / (GROUP / 2 * Self::TILE_PAIR_BYTES);

    /// Register `vector` of both inputs of pair number `pair`, without scales, of the panel that begins at `panel`.
    ///
    /// # Safety
    /// The pair is inside a block, and `vector < PANEL_FEATURES / LANES`.
    unsafe fn load<S: Simd>(simd: S, panel: *const u8, pair: usize, vector: usize) -> [S::V; 2];
}

pub(super) struct F32Panel;
pub(super) struct F16Panel;
pub(super) struct Bf16Panel;
pub(super) struct Int8Panel;
pub(super) struct Int4Panel;

macro_rules! panel_formats {
    ($($Name:ident, $format:expr, ($simd:ident, $at:ident, $first:ident, $second:ident) => $load:expr);+ $(;)?) => {$(
        impl PanelFormat for $Name {
            const FORMAT: WeightFormat = $format;
            #[inline(always)]
            unsafe fn load<S: Simd>($simd: S, panel: *const u8, pair: usize, vector: usize) -> [S::V; 2] {
                let ($at, $first) = (panel.wrapping_add(pair * Self::TILE_PAIR_BYTES), vector * S::LANES);
                let $second = $first + PANEL_FEATURES;
                // SAFETY: the caller passes a pair of a block and `vector < PANEL_FEATURES / LANES`.
                unsafe { $load }
            }
        }
    )+};
}
panel_formats!(
    F32Panel, WeightFormat::Float(Dtype::F32), (simd, at, first, second) =>
        [simd.load(at.cast::<f32>().add(first)), simd.load(at.cast::<f32>().add(second))];
    F16Panel, WeightFormat::Float(Dtype::F16), (simd, at, first, second) =>
        [simd.load_f16(at.cast::<f16>().add(first)), simd.load_f16(at.cast::<f16>().add(second))];
    Bf16Panel, WeightFormat::Float(Dtype::Bf16), (simd, at, first, second) =>
        [simd.load_bf16(at.cast::<bf16>().add(first)), simd.load_bf16(at.cast::<bf16>().add(second))];
    Int8Panel, WeightFormat::Int8, (simd, at, first, second) =>
        [simd.load_i8(at.cast::<i8>().add(first)), simd.load_i8(at.cast::<i8>().add(second))];
);

impl PanelFormat for Int4Panel {
    const FORMAT: WeightFormat = WeightFormat::Int4;
    const ADJACENT_PAIRS: usize = INT4_INPUTS / 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, panel: *const u8, pair: usize, vector: usize) -> [S::V; 2] {
        let (word, pair) = (pair / Self::ADJACENT_PAIRS, pair % Self::ADJACENT_PAIRS);
        let words = panel.cast::<u32>().wrapping_add(word * TILE_FEATURES + vector * S::LANES);
        // SAFETY: a block has whole words.
        unsafe { simd.load_nibbles(words, 4 * pair) }
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
