//! Products with int4 weights by bf16 dot products (`vdpbf16ps`), for any number of rows.
//!
//! ```text
//! sums[r][f] += Σ over groups g: scale[g][f] · Σ over inputs i of g: bf16(x[r][i]) · integer[f][i]
//! ```
//!
//! Integers are exact in bf16, inputs are rounded. Groups and pairs are added in ascending order, so a row has the same bits in
//! products of all numbers of rows. A dot product has half the instructions of two multiply-adds with widened integers, which
//! would make decoding compute-bound.

use super::{
    Bf16Mma, Int4Tile,
    vdpbf16::{Avx512Bf16, dot},
};
use crate::{
    cpu::simd::{Int4Panel, PanelFormat, TILE_ROWS, TileRef},
    gemm::{GROUP, INT4_INPUTS, PANEL_FEATURES, TILE_FEATURES, TILE_PANELS},
};
use half::bf16;
use std::arch::x86_64::*;

/// Rows whose sums are in registers.
const ROWS: usize = 4;
/// Bytes of the words of a panel for [`INT4_INPUTS`] inputs, a cache line.
const LINE: usize = PANEL_FEATURES * size_of::<u32>();
const BLOCK_BYTES: usize = Int4Panel::BLOCK_BYTES;

impl Int4Tile<'_> {
    pub(super) fn multiply(self, _: Avx512Bf16) {
        let num_rows = self.x.len() / self.stride;
        assert!(num_rows <= TILE_ROWS, "at most a tile");
        assert!(self.weight.matrix.shape()[1] <= self.stride, "whole rows");
        let tile = [self.weight, self.following].map(|TileRef { matrix, index }| matrix.tile(index));
        let rows = self.x.chunks(ROWS * self.stride).zip(self.sums.0.chunks_mut(ROWS));
        for (x, sums) in rows {
            // SAFETY: the argument proves the instructions.
            unsafe {
                match x.len() / self.stride {
                    1 => multiply::<1>(x, &tile, sums),
                    2 => multiply::<2>(x, &tile, sums),
                    3 => multiply::<3>(x, &tile, sums),
                    _ => multiply::<4>(x, &tile, sums),
                }
            }
        }
    }
}

/// # Safety
/// The machine has AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn multiply<const ROWS: usize>(
    x: &[bf16],
    [tile, following]: &[&[u8]; 2],
    sums: &mut [[f32; TILE_FEATURES]],
) {
    let stride = x.len() / ROWS;
    let (blocks, _) = tile.as_chunks::<BLOCK_BYTES>();
    for (index, block) in blocks.iter().enumerate() {
        let ahead = match (index + Int4Panel::BLOCKS_AHEAD).checked_sub(blocks.len()) {
            Some(ahead) => following.as_ptr().wrapping_add(ahead * BLOCK_BYTES),
            None => block.as_ptr().wrapping_add(Int4Panel::BLOCKS_AHEAD * BLOCK_BYTES),
        };
        let x = x[index * GROUP..(ROWS - 1) * stride + (index + 1) * GROUP].as_ptr();
        // SAFETY: the inputs are in bounds of all rows, which are padded to groups.
        let products = unsafe { multiply_block::<ROWS>(x, stride, block, ahead) };
        for v in 0..TILE_PANELS {
            let scales =
                &block[v * PANEL_FEATURES * size_of::<bf16>()..][..PANEL_FEATURES * size_of::<bf16>()];
            // SAFETY: both have 16 elements.
            unsafe {
                let scales = _mm512_cvtepu16_epi32(_mm256_loadu_si256(scales.as_ptr().cast()));
                let scales = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(scales));
                for r in 0..ROWS {
                    let sums = sums[r][v * PANEL_FEATURES..][..PANEL_FEATURES].as_mut_ptr();
                    _mm512_storeu_ps(sums, _mm512_fmadd_ps(products[r][v], scales, _mm512_loadu_ps(sums)));
                }
            }
        }
    }
}

/// The products of a block of weights, without scales. Prefetches the block at `ahead`, which is not always in bounds.
///
/// # Safety
/// The machine has AVX-512 with BF16; `x` is readable for the inputs of a group in each of `ROWS` rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn multiply_block<const ROWS: usize>(
    x: *const bf16,
    stride: usize,
    block: &[u8; BLOCK_BYTES],
    ahead: *const u8,
) -> [[__m512; TILE_PANELS]; ROWS] {
    // SAFETY: the table has 64 bytes.
    let integers = unsafe { _mm512_loadu_si512(INTEGERS.as_ptr().cast()) };
    let mut products = [[_mm512_setzero_ps(); TILE_PANELS]; ROWS];
    for line in (0..Int4Panel::SCALE_BYTES).step_by(LINE) {
        // a hint, which is no access
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line).cast());
    }
    for line in 0..GROUP / INT4_INPUTS {
        let mut words = [_mm512_setzero_si512(); TILE_PANELS];
        for (v, words) in words.iter_mut().enumerate() {
            let first = Int4Panel::SCALE_BYTES + (line * TILE_PANELS + v) * LINE;
            // SAFETY: a slice of 64 bytes.
            *words = unsafe { _mm512_loadu_si512(block[first..first + LINE].as_ptr().cast()) };
        }
        for pair in 0..INT4_INPUTS / 2 {
            let first = Int4Panel::SCALE_BYTES + (line * TILE_PANELS + pair) * LINE;
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(first).cast());
            let mut weights = [_mm512_setzero_ps(); TILE_PANELS];
            for (weights, words) in weights.iter_mut().zip(&mut words) {
                // the lookup uses the low bits of both halves of a word
                *weights = _mm512_castsi512_ps(_mm512_permutexvar_epi16(*words, integers));
                *words = _mm512_srli_epi32::<4>(*words);
            }
            let inputs = line * INT4_INPUTS + 2 * pair;
            for (r, products) in products.iter_mut().enumerate() {
                // SAFETY: the caller guarantees a group's inputs in each of `ROWS` rows, and `inputs + 1 < GROUP`.
                let x = unsafe { x.add(r * stride + inputs).cast::<i32>().read_unaligned() };
                for (product, weights) in products.iter_mut().zip(weights) {
                    *product = dot(*product, _mm512_set1_epi32(x), weights);
                }
            }
        }
    }
    products
}

/// The integers of nibbles as bf16, twice, because the permutation reads five bits.
static INTEGERS: [u16; 32] = {
    let mut integers = [0; 32];
    let mut at = 0;
    while at < 32 {
        // small integers have no lower bits
        integers[at] = (((at % 16) as f32 - 8.0).to_bits() >> 16) as u16;
        at += 1;
    }
    integers
};

impl Bf16Mma {
    /// Rounds a row to bf16, padded with zeros to whole groups of inputs.
    pub(crate) fn round_row(self, row: &[f32], to: &mut [bf16]) {
        assert!(to.len() == row.len().next_multiple_of(GROUP), "whole groups");
        let (whole, rest) = row.split_at(row.len() / 16 * 16);
        // SAFETY: `whole` is readable in registers of 16 elements, and `to` is writable in pairs of them.
        unsafe { self.avx512().round(whole.as_ptr(), whole.len(), to.as_mut_ptr()) };
        to[whole.len()..].fill(bf16::ZERO);
        to[whole.len()..].iter_mut().zip(rest).for_each(|(to, x)| *to = bf16::from_f32(*x));
    }

    /// Computes a tile of a product with int4 weights.
    pub(crate) fn multiply_int4(self, tile: Int4Tile<'_>) {
        tile.multiply(self.avx512());
    }
}
