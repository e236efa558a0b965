//! Blocks of the output of products with packed weights, with bias and gated activation as epilogue.
//!
//! A tile of few rows keeps its sums in registers ([`panels`](super::panels)); a block of many rows uses the `gemm-f32` crate
//! ([`matmul`](super::matmul)). Both give the same bits. int4 weights are multiplied by [`Int4Tile`] where the machine has bf16 dot
//! products.

use super::{
    Bf16Mma, GemmParams, Int4Tile, Isa, PANEL, Panel, Shared, TILE_ROWS, TileRef, TileSums, TileTask,
    WeightRef, matmul::DEPTH,
};
use crate::{
    DataMut, ViewMut,
    activation::Activation,
    cpu::activation::activate,
    gemm::{GROUP, PackedWeight, TILE_FEATURES, WeightFormat},
};
use half::bf16;
use std::ops::Range;

/// Rows per block: enough to amortize widening the weights.
pub(crate) const BLOCK_ROWS: usize = 256;
/// Scratch of [`GemmParams::multiply`].
pub(crate) const MULTIPLY_SCRATCH: usize = PANEL * DEPTH + 2 * PANEL;
/// Scratch of [`Product::multiply_block`].
pub(crate) const BLOCK_SCRATCH: usize = MULTIPLY_SCRATCH + 2 * BLOCK_ROWS * PANEL;

/// The rows of the input, f32, and the instructions that multiply them.
pub(crate) struct ProductInput<'a> {
    pub(crate) isa: Isa,
    pub(crate) x: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) num_rows: usize,
    /// At most [`TILE_ROWS`] rows as slices, for tiles.
    pub(crate) rows: Vec<&'a [f32]>,
    /// For int4 weights.
    pub(crate) rounded: Option<RoundedRows>,
}

/// Rows of the input in bf16.
pub(crate) struct RoundedRows {
    mma: Bf16Mma,
    x: Vec<bf16>,
    stride: usize,
}

impl RoundedRows {
    pub(crate) fn new<'r>(
        mma: Bf16Mma,
        rows: impl ExactSizeIterator<Item = &'r [f32]>,
        inputs: usize,
    ) -> Self {
        let stride = inputs.next_multiple_of(GROUP);
        let mut x = vec![bf16::ZERO; rows.len() * stride];
        rows.zip(x.chunks_mut(stride)).for_each(|(row, to)| mma.round_row(row, to));
        Self { mma, x, stride }
    }
}

/// `out = x · weightᵀ + bias`, multiplied by the activation of another such product if there is a gate.
pub(crate) struct Product<'a> {
    weight: PackedWeight<'a>,
    gate: Option<(PackedWeight<'a>, Activation)>,
    out: Shared<'a, f32>,
    out_stride: usize,
}

impl<'a> Product<'a> {
    /// `None` if `out` is not f32.
    pub(crate) fn new(
        weight: PackedWeight<'a>,
        gate: Option<(PackedWeight<'a>, Activation)>,
        out: ViewMut<'a>,
    ) -> Option<Self> {
        let out_stride = out.strides()[0];
        let DataMut::F32(out) = out.into_data() else { return None };
        Some(Self { weight, gate, out: Shared::new(out), out_stride })
    }
}

impl Product<'_> {
    pub(crate) fn num_features(&self) -> usize {
        self.weight.matrix.shape()[0]
    }

    /// Whether it is computed in tiles for any number of rows: see [`Int4Tile`].
    pub(crate) fn is_int4(&self) -> bool {
        let gate = self.gate.as_ref().map_or(WeightFormat::Int4, |(gate, _)| gate.matrix.format());
        [self.weight.matrix.format(), gate] == [WeightFormat::Int4; 2]
    }

    /// The number of tiles for `num_rows` rows.
    pub(crate) fn num_tiles(&self, num_rows: usize) -> usize {
        self.weight.matrix.num_tiles() * num_rows.div_ceil(TILE_ROWS)
    }

    /// Computes features of up to [`TILE_ROWS`] rows of `input`. Tiles of concurrent calls must differ.
    pub(crate) fn multiply_tile(&self, input: &ProductInput<'_>, tile: usize) {
        let blocks = input.num_rows.div_ceil(TILE_ROWS);
        let (index, block) = (tile / blocks, tile % blocks);
        let rows = block * TILE_ROWS..input.num_rows.min((block + 1) * TILE_ROWS);
        let start = index * TILE_FEATURES;
        let len = (self.num_features() - start).min(TILE_FEATURES);
        // the gate is multiplied after its factor
        let matrix = self.weight.matrix;
        let next = TileRef { matrix, index: (index + 1).min(matrix.num_tiles() - 1) };
        let gate = self.gate.as_ref().map(|(gate, activation)| (gate, *activation));
        let following = gate.map_or(next, |(gate, _)| TileRef { matrix: gate.matrix, index });
        let mut area = TileArea { rows: rows.clone(), index, following };
        let sums = self.tile_sums(input, &self.weight, &area);
        area.following = next;
        let gates = gate.map(|(gate, activation)| (self.tile_sums(input, gate, &area), activation));
        for (row, (at, sums)) in rows.zip(&sums.0).enumerate() {
            // SAFETY: tiles differ, so only this call accesses these elements.
            let out = unsafe { self.out.part(at * self.out_stride + start, len) };
            match &gates {
                None => out.copy_from_slice(&sums[..len]),
                Some((gates, activation)) => activate(*activation, &gates.0[row][..len], &sums[..len], out),
            }
        }
    }

    fn tile_sums(
        &self,
        input: &ProductInput<'_>,
        weight: &PackedWeight<'_>,
        area: &TileArea<'_>,
    ) -> TileSums {
        let TileArea { rows, index, following } = area.clone();
        let start = index * TILE_FEATURES;
        let len = (self.num_features() - start).min(TILE_FEATURES);
        let mut sums = TileSums([[0.0; TILE_FEATURES]; TILE_ROWS]);
        if let Some(bias) = weight.bias {
            let bias = std::array::from_fn(|i| if i < len { bias.at(&[start + i]) } else { 0.0 });
            sums.0[..rows.len()].fill(bias);
        }
        let weight = TileRef { matrix: weight.matrix, index };
        match &input.rounded {
            Some(RoundedRows { mma, x, stride }) if self.is_int4() => {
                let x = &x[rows.start * stride..rows.end * stride];
                mma.multiply_int4(Int4Tile { x, stride: *stride, weight, following, sums: &mut sums });
            }
            _ => {
                let x = &input.rows[rows];
                input.isa.dispatch(TileTask { x, weight, following, sums: &mut sums });
            }
        }
        sums
    }

    /// Computes a block of at most [`BLOCK_ROWS`] rows. Blocks of concurrent calls must not overlap.
    pub(crate) fn multiply_block(&self, input: &ProductInput<'_>, block: &Panel, scratch: &mut [f32]) {
        let (scratch, sums) = scratch.split_at_mut(MULTIPLY_SCRATCH);
        let multiply = |weight: &PackedWeight<'_>, out: BlockOutput<'_, '_>, scratch: &mut [f32]| {
            let gemm = GemmParams {
                isa: input.isa,
                x: (input.x, input.stride),
                weight: WeightRef::Packed(weight.matrix),
                bias: weight.bias,
                out: out.elements,
                out_stride: out.stride,
                out_start: out.start,
            };
            gemm.multiply(block, scratch);
        };
        let Some((gate, activation)) = &self.gate else {
            let out = BlockOutput { elements: &self.out, stride: self.out_stride, start: (0, 0) };
            return multiply(&self.weight, out, scratch);
        };
        let (gates, factors) = sums.split_at_mut(BLOCK_ROWS * PANEL);
        let start = (block.rows.start, block.features.start);
        for (weight, sums) in [(gate, &mut *gates), (&self.weight, &mut *factors)] {
            multiply(weight, BlockOutput { elements: &Shared::new(sums), stride: PANEL, start }, scratch);
        }
        let sums = gates.chunks_exact(PANEL).zip(factors.chunks_exact(PANEL));
        for (row, (gates, factors)) in block.rows.clone().zip(sums) {
            let len = block.features.len();
            // SAFETY: blocks do not overlap, so only this call accesses these elements.
            let out = unsafe { self.out.part(row * self.out_stride + block.features.start, len) };
            activate(*activation, &gates[..len], &factors[..len], out);
        }
    }
}

/// Rows and features of a tile of the output.
#[derive(Clone)]
struct TileArea<'a> {
    rows: Range<usize>,
    /// Of the tile of weights.
    index: usize,
    /// The tile of weights that this thread multiplies next, for prefetching.
    following: TileRef<'a>,
}

/// The destination of a block of the `gemm-f32` crate.
struct BlockOutput<'s, 'a> {
    elements: &'s Shared<'a, f32>,
    stride: usize,
    /// Row and feature of the first element.
    start: (usize, usize),
}
