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
    cpu::simd::{
        panel_formats::{Int4Panel, PanelFormat},
        panels::{TILE_FEATURES, TILE_PANELS, TILE_ROWS},
    },
    gemm::{GROUP, INT4_INPUTS, PANEL_FEATURES, PackedMatrix},
};
use half::bf16;
use std::{arch::x86_64::*, ops::Range};

/// Rows whose sums are in registers.
const ROWS: usize = 4;
/// Bytes of the words of a panel, a cache line.
const LINE: usize = PANEL_FEATURES * size_of::<u32>();
/// Bytes of a group of inputs.
const GROUP_BYTES: usize = GROUP / INT4_INPUTS * LINE;
/// Groups that are prefetched ahead, in the panel that is multiplied next after the last ones.
const GROUPS_AHEAD: usize = Int4Panel::GROUPS_AHEAD;

/// The panels of a tile as bytes and scales; the last one is repeated up to [`TILE_PANELS`].
type Panels<'a> = [(&'a [u8], &'a [bf16]); TILE_PANELS];

fn panels(weight: &PackedMatrix, range: Range<usize>) -> Panels<'_> {
    let (bytes, scales) = (weight.panel_bytes(), weight.panel_scales());
    std::array::from_fn(|v| {
        let panel = (range.start + v).min(range.end - 1);
        (&weight.weights()[panel * bytes..][..bytes], &weight.scales()[panel * scales..][..scales])
    })
}

impl Int4Tile<'_> {
    pub(super) fn multiply(self, _: Avx512Bf16) {
        let (weight, next) = self.following;
        let num_rows = self.x.len() / self.stride;
        assert!(num_rows <= TILE_ROWS && self.panels.len() <= TILE_PANELS, "at most a tile");
        assert!(self.weight.shape()[1] <= self.stride, "whole rows");
        let tile = [
            panels(self.weight, self.panels),
            panels(weight, next..weight.num_panels().min(next + TILE_PANELS)),
        ];
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
    [tile, following]: &[Panels<'_>; 2],
    sums: &mut [[f32; TILE_FEATURES]],
) {
    let stride = x.len() / ROWS;
    let groups = tile[0].0.len().div_ceil(GROUP_BYTES);
    for group in 0..groups {
        let (source, ahead) = match (group + GROUPS_AHEAD).checked_sub(groups) {
            Some(ahead) => (following, ahead),
            None => (tile, group + GROUPS_AHEAD),
        };
        let first = group * GROUP_BYTES;
        let bytes = (tile[0].0.len() - first).min(GROUP_BYTES);
        let mut lines = [std::ptr::null(); TILE_PANELS];
        let mut lines_ahead = [std::ptr::null(); TILE_PANELS];
        for v in 0..TILE_PANELS {
            lines[v] = tile[v].0[first..first + bytes].as_ptr();
            lines_ahead[v] = source[v].0.as_ptr().wrapping_add(ahead * GROUP_BYTES).cast();
            let scales: *const bf16 = source[v].1.as_ptr().wrapping_add(ahead * PANEL_FEATURES);
            // a hint, which is no access
            _mm_prefetch::<_MM_HINT_T1>(scales.cast());
        }
        let x = x[group * GROUP..(ROWS - 1) * stride + (group + 1) * GROUP].as_ptr();
        // SAFETY: the lines are in bounds of all panels, and of all rows, which are padded to groups.
        let products = unsafe { add_group::<ROWS>(x, stride, &lines, &lines_ahead, bytes / LINE) };
        for v in 0..TILE_PANELS {
            let scales = &tile[v].1[group * PANEL_FEATURES..][..PANEL_FEATURES];
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

/// The products of `num_lines` lines of weights, without scales. Prefetches as many from `ahead`.
///
/// # Safety
/// The machine has AVX-512 with BF16; `x` is readable for the inputs in each of `ROWS` rows, `lines` for the weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn add_group<const ROWS: usize>(
    x: *const bf16,
    stride: usize,
    lines: &[*const u8; TILE_PANELS],
    ahead: &[*const i8; TILE_PANELS],
    num_lines: usize,
) -> [[__m512; TILE_PANELS]; ROWS] {
    // SAFETY: the table has 64 bytes.
    let integers = unsafe { _mm512_loadu_si512(INTEGERS.as_ptr().cast()) };
    let mut products = [[_mm512_setzero_ps(); TILE_PANELS]; ROWS];
    for line in 0..num_lines {
        let mut words = [_mm512_setzero_si512(); TILE_PANELS];
        for v in 0..TILE_PANELS {
            _mm_prefetch::<_MM_HINT_T1>(ahead[v].wrapping_add(line * LINE));
            // SAFETY: upheld by the caller.
            words[v] = unsafe { _mm512_loadu_si512(lines[v].add(line * LINE).cast()) };
        }
        for pair in 0..INT4_INPUTS / 2 {
            let mut weights = [_mm512_setzero_ps(); TILE_PANELS];
            for (weights, words) in weights.iter_mut().zip(&mut words) {
                // the lookup uses the low bits of both halves of a word
                *weights = _mm512_castsi512_ps(_mm512_permutexvar_epi16(*words, integers));
                *words = _mm512_srli_epi32::<4>(*words);
            }
            let inputs = line * INT4_INPUTS + 2 * pair;
            for (r, products) in products.iter_mut().enumerate() {
                // SAFETY: upheld by the caller.
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
