//! Blocks of the output of products with packed weights, with bias and gated activation as epilogue.
//!
//! A tile of few rows keeps its sums in registers ([`panels`](super::panels)); a block of many rows uses the `gemm` crate
//! ([`matmul`](super::matmul)). Both give the same bits.

use super::{
    Isa,
    matmul::{DEPTH, GemmParams, PANEL, Panel, WeightRef},
    panels::{TILE_FEATURES, TILE_PANELS, TILE_ROWS, TileSums, TileTask},
    shared::Shared,
};
use crate::{
    ViewMut,
    activation::Activation,
    cpu::activation::activate,
    gemm::{PANEL_FEATURES, PackedWeight},
    tensor::DataMut,
};

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
    /// At most [`TILE_ROWS`] rows as slices, for tiles.
    pub(crate) rows: Vec<&'a [f32]>,
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

    /// The number of tiles.
    pub(crate) fn num_tiles(&self) -> usize {
        self.weight.matrix.num_panels().div_ceil(TILE_PANELS)
    }

    /// Computes features of all rows of `input`. Tiles of concurrent calls must differ.
    pub(crate) fn multiply_tile(&self, input: &ProductInput<'_>, tile: usize) {
        let panels = tile * TILE_PANELS..self.weight.matrix.num_panels().min((tile + 1) * TILE_PANELS);
        let (start, x) = (panels.start * PANEL_FEATURES, &*input.rows);
        let len = (self.num_features() - start).min(TILE_FEATURES);
        let multiply = |weight: &PackedWeight<'_>| {
            let mut sums = TileSums([[0.0; TILE_FEATURES]; TILE_ROWS]);
            if let Some(bias) = weight.bias {
                let bias = std::array::from_fn(|i| if i < len { bias.at(&[start + i]) } else { 0.0 });
                sums.0[..x.len()].fill(bias);
            }
            let task = TileTask { x, weight: weight.matrix, panels: panels.clone(), sums: &mut sums };
            input.isa.dispatch(task);
            sums
        };
        let sums = multiply(&self.weight);
        let gates = self.gate.as_ref().map(|(gate, activation)| (multiply(gate), *activation));
        for (row, sums) in sums.0[..x.len()].iter().enumerate() {
            // SAFETY: tiles differ, so only this call accesses these elements.
            let out = unsafe { self.out.part(row * self.out_stride + start, len) };
            match &gates {
                None => out.copy_from_slice(&sums[..len]),
                Some((gates, activation)) => activate(*activation, &gates.0[row][..len], &sums[..len], out),
            }
        }
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

/// The destination of a block of the `gemm` crate.
struct BlockOutput<'s, 'a> {
    elements: &'s Shared<'a, f32>,
    stride: usize,
    /// Row and feature of the first element.
    start: (usize, usize),
}
