//! Products of 1 to 8 rows with packed weights, and widening of packed weights for products of more rows.
//!
//! Lane = output feature. Sums stay in registers over [`DEPTH`] inputs in ascending order, one chain of multiply-adds per sum,
//! and are then added to the result: the order of [`super::matmul`], so the bits do not depend on the number of rows.

use super::{
    Bf16Panel, F16Panel, F32Panel, Int4Panel, Int8Panel, PanelFormat, Simd, Task, matmul::DEPTH,
    panel_formats::with_format,
};
use crate::{
    Dtype,
    gemm::{GROUP, PANEL_FEATURES, PackedMatrix, TILE_FEATURES, TILE_PANELS, WeightFormat},
};
use half::bf16;
use std::ops::Range;

/// Rows of a tile, at most.
pub(crate) const TILE_ROWS: usize = 8;
/// Up to this many inputs, the `gemm-f32` crate adds rounded products to the result.
const MAX_UNFUSED: usize = 2;

/// Results of a tile, `[TILE_ROWS, TILE_FEATURES]`.
#[repr(align(64))]
pub(crate) struct TileSums(pub(crate) [[f32; TILE_FEATURES]; TILE_ROWS]);

/// `sums += x · weightᵀ` for at most [`TILE_ROWS`] rows and the features of a tile.
pub(crate) struct TileTask<'a> {
    /// The rows, `[in_features]` each.
    pub(crate) x: &'a [&'a [f32]],
    pub(crate) weight: TileRef<'a>,
    /// The tile that this thread multiplies next, for prefetching.
    pub(crate) following: TileRef<'a>,
    pub(crate) sums: &'a mut TileSums,
}

/// One tile of a matrix.
#[derive(Clone, Copy)]
pub(crate) struct TileRef<'a> {
    pub(crate) matrix: &'a PackedMatrix,
    pub(crate) index: usize,
}

/// Widens inputs `inputs` of `panels` to f32: `to[(input - inputs.start) * stride + feature]`.
pub(crate) struct WidenPanelsTask<'a> {
    pub(crate) weight: &'a PackedMatrix,
    pub(crate) panels: Range<usize>,
    /// Begins at a multiple of [`GROUP`].
    pub(crate) inputs: Range<usize>,
    pub(crate) to: &'a mut [f32],
    pub(crate) stride: usize,
}

/// One panel of a matrix.
#[derive(Clone, Copy)]
struct PanelRef<'a> {
    tile: &'a [u8],
    /// Its number in the tile.
    number: usize,
}

impl<'a> PanelRef<'a> {
    fn new(weight: &'a PackedMatrix, index: usize) -> Self {
        Self { tile: weight.tile(index / TILE_PANELS), number: index % TILE_PANELS }
    }

    /// Register `vector` of the scales in block `block`.
    #[inline(always)]
    fn scale<S: Simd, F: PanelFormat>(self, simd: S, block: usize, vector: usize) -> S::V {
        if !F::HAS_SCALES {
            return simd.splat(1.0);
        }
        let scales = &self.tile[block * F::BLOCK_BYTES..][..F::SCALE_BYTES];
        let first = self.number * PANEL_FEATURES + vector * S::LANES;
        // SAFETY: `scales` has the elements of all registers of a tile.
        unsafe { simd.load_bf16(scales.as_ptr().cast::<bf16>().add(first)) }
    }

    #[inline(always)]
    fn weights<F: PanelFormat>(self, block: usize) -> *const u8 {
        let block = &self.tile[block * F::BLOCK_BYTES..][..F::BLOCK_BYTES];
        block[F::SCALE_BYTES + self.number * F::ADJACENT_PAIRS * F::PAIR_BYTES..].as_ptr()
    }
}

/// Exact, because scales and integers have few bits.
#[inline(always)]
fn scaled<S: Simd, F: PanelFormat>(simd: S, pair: [S::V; 2], scale: S::V) -> [S::V; 2] {
    if F::HAS_SCALES { [simd.mul(pair[0], scale), simd.mul(pair[1], scale)] } else { pair }
}

impl Task for TileTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let matrix = self.weight.matrix;
        assert!(self.x.len() <= TILE_ROWS, "at most a tile");
        assert!(self.x.iter().all(|row| row.len() == matrix.shape()[1]), "whole rows");
        if const { !S::FUSES } {
            unreachable!("sets without FMA multiply widened panels");
        } else {
            with_format!(matrix, F => multiply_tile::<S, F>(simd, self));
        }
    }
}

/// Blocks of rows and panels such that sums and weights fit into the registers: 16 lanes imply 32 registers.
#[inline(always)]
fn multiply_tile<S: Simd, F: PanelFormat>(simd: S, mut tile: TileTask<'_>) {
    let inputs = tile.weight.matrix.shape()[1];
    for first in (0..inputs).step_by(DEPTH) {
        let inputs = first..inputs.min(first + DEPTH);
        if inputs.len() <= MAX_UNFUSED {
            return add_unfused(&mut tile, inputs);
        }
        let mut row = 0;
        while row < tile.x.len() {
            let (inputs, rest) = (inputs.clone(), tile.x.len() - row);
            let block = &mut tile;
            // constant conditions: the compiler drops the forms of other sets
            row += if const { S::LANES == 16 } {
                match rest {
                    1 => multiply_blocks::<S, F, 1, 4>(simd, block, row, inputs),
                    2 => multiply_blocks::<S, F, 2, 4>(simd, block, row, inputs),
                    3 => multiply_blocks::<S, F, 3, 4>(simd, block, row, inputs),
                    4 => multiply_blocks::<S, F, 4, 4>(simd, block, row, inputs),
                    5 => multiply_blocks::<S, F, 5, 2>(simd, block, row, inputs),
                    6 => multiply_blocks::<S, F, 6, 2>(simd, block, row, inputs),
                    7 => multiply_blocks::<S, F, 7, 2>(simd, block, row, inputs),
                    _ => multiply_blocks::<S, F, 8, 2>(simd, block, row, inputs),
                }
            } else {
                match rest {
                    1 => multiply_blocks::<S, F, 1, 4>(simd, block, row, inputs),
                    2 => multiply_blocks::<S, F, 2, 4>(simd, block, row, inputs),
                    3 => multiply_blocks::<S, F, 3, 2>(simd, block, row, inputs),
                    _ => multiply_blocks::<S, F, 4, 2>(simd, block, row, inputs),
                }
            };
        }
    }
}

/// Adds the products of the last few inputs to the results, each rounded.
#[inline(never)]
fn add_unfused(tile: &mut TileTask<'_>, inputs: Range<usize>) {
    let TileRef { matrix, index } = tile.weight;
    let start = index * TILE_FEATURES;
    let features = start..matrix.shape()[0].min(start + TILE_FEATURES);
    for (feature, input) in features.flat_map(|feature| inputs.clone().map(move |input| (feature, input))) {
        let weight = matrix.get(feature, input);
        for (sums, x) in tile.sums.0.iter_mut().zip(tile.x) {
            sums[feature - start] += x[input] * weight;
        }
    }
}

/// Multiplies `ROWS` rows with all panels, `REGISTERS` registers of features at a time. Returns `ROWS`.
#[inline(always)]
fn multiply_blocks<S: Simd, F: PanelFormat, const ROWS: usize, const REGISTERS: usize>(
    simd: S,
    tile: &mut TileTask<'_>,
    row: usize,
    inputs: Range<usize>,
) -> usize {
    let vectors = PANEL_FEATURES / S::LANES;
    let (blocks, next) = (tile.weight.matrix.tile(tile.weight.index), tile.following);
    let next = next.matrix.tile(next.index);
    for first in (0..TILE_PANELS * vectors).step_by(REGISTERS) {
        let block = RegisterBlock::<ROWS, REGISTERS> {
            x: std::array::from_fn(|r| tile.x[row + r]),
            panels: std::array::from_fn(|v| PanelRef { tile: blocks, number: (first + v) / vectors }),
            following: next,
            vectors: std::array::from_fn(|v| (first + v) % vectors),
        };
        let sums = block.multiply::<S, F>(simd, inputs.clone());
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                let results = &mut tile.sums.0[row + r][(first + v) * S::LANES..][..S::LANES];
                // SAFETY: `results` has `LANES` elements.
                unsafe {
                    let result = simd.add(simd.load(results.as_ptr()), sum);
                    simd.store(results.as_mut_ptr(), result);
                }
            }
        }
    }
    ROWS
}

/// Rows and registers of features whose sums are in registers.
struct RegisterBlock<'a, const ROWS: usize, const REGISTERS: usize> {
    x: [&'a [f32]; ROWS],
    /// The panel of each register, and its number there.
    panels: [PanelRef<'a>; REGISTERS],
    /// The tile that is multiplied next, whose matrix has the same shape and format.
    following: &'a [u8],
    vectors: [usize; REGISTERS],
}

impl<const ROWS: usize, const REGISTERS: usize> RegisterBlock<'_, ROWS, REGISTERS> {
    /// Loops instead of closures: the compiler does not always inline a closure into the instruction set of its caller.
    #[inline(always)]
    fn multiply<S: Simd, F: PanelFormat>(&self, simd: S, inputs: Range<usize>) -> [[S::V; REGISTERS]; ROWS] {
        let mut sums = [[simd.splat(0.0); REGISTERS]; ROWS];
        for first in inputs.clone().step_by(GROUP) {
            let group = first..inputs.end.min(first + GROUP);
            let mut scales = [simd.splat(1.0); REGISTERS];
            let mut panels = [std::ptr::null(); REGISTERS];
            for v in 0..REGISTERS {
                scales[v] = self.panels[v].scale::<S, F>(simd, first / GROUP, self.vectors[v]);
                panels[v] = self.panels[v].weights::<F>(first / GROUP);
            }
            let ahead = self.prefetched_block::<F>(first / GROUP + F::BLOCKS_AHEAD);
            if F::HAS_SCALES {
                simd.prefetch_all(ahead.cast(), F::SCALE_BYTES);
            }
            let mut x = [std::ptr::null(); ROWS];
            for (x, row) in x.iter_mut().zip(self.x) {
                *x = row[group.clone()].as_ptr();
            }
            for pair in 0..group.len() / 2 {
                let pair_ahead = ahead.wrapping_add(F::SCALE_BYTES + pair * F::TILE_PAIR_BYTES);
                simd.prefetch_all(pair_ahead.cast(), F::TILE_PAIR_BYTES);
                // SAFETY: the pair is inside the group, in all rows and registers.
                unsafe {
                    let [even, odd] = self.load_pair::<S, F>(simd, &panels, pair, &scales);
                    add_products(simd, &mut sums, &x, 2 * pair, &even);
                    add_products(simd, &mut sums, &x, 2 * pair + 1, &odd);
                }
            }
            if group.len() % 2 == 1 {
                let last = group.len() - 1;
                // SAFETY: the input is inside the group, and blocks are padded to whole groups.
                unsafe {
                    let [weights, _] = self.load_pair::<S, F>(simd, &panels, last / 2, &scales);
                    add_products(simd, &mut sums, &x, last, &weights);
                }
            }
        }
        sums
    }

    /// Block `block`, counted on into the following tile; not always in bounds.
    #[inline(always)]
    fn prefetched_block<F: PanelFormat>(&self, block: usize) -> *const u8 {
        let tile = self.panels[0].tile;
        match (block * F::BLOCK_BYTES).checked_sub(tile.len()) {
            Some(byte) => self.following.as_ptr().wrapping_add(byte),
            None => tile.as_ptr().wrapping_add(block * F::BLOCK_BYTES),
        }
    }

    /// The weights of pair number `pair` of a block, per input and register.
    ///
    /// # Safety
    /// A block has the pair.
    #[inline(always)]
    unsafe fn load_pair<S: Simd, F: PanelFormat>(
        &self,
        simd: S,
        panels: &[*const u8; REGISTERS],
        pair: usize,
        scales: &[S::V; REGISTERS],
    ) -> [[S::V; REGISTERS]; 2] {
        let mut weights = [[simd.splat(0.0); REGISTERS]; 2];
        for v in 0..REGISTERS {
            // SAFETY: the caller passes a pair of a block, and `vectors` are registers of a panel.
            let loaded = unsafe { F::load(simd, panels[v], pair, self.vectors[v]) };
            [weights[0][v], weights[1][v]] = scaled::<S, F>(simd, loaded, scales[v]);
        }
        weights
    }
}

/// `sums[r][v] += x[r][input] · weights[v]`
///
/// # Safety
/// Each of `x` is readable at `input`.
#[inline(always)]
unsafe fn add_products<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    simd: S,
    sums: &mut [[S::V; REGISTERS]; ROWS],
    x: &[*const f32; ROWS],
    input: usize,
    weights: &[S::V; REGISTERS],
) {
    for r in 0..ROWS {
        // SAFETY: the caller guarantees that each row of `x` is readable at `input`.
        let x = simd.splat(unsafe { *x[r].add(input) });
        for v in 0..REGISTERS {
            sums[r][v] = simd.mul_add(x, weights[v], sums[r][v]);
        }
    }
}

impl Task for WidenPanelsTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let needed = self.inputs.len().next_multiple_of(2) * self.stride;
        assert!(
            self.panels.len() * PANEL_FEATURES <= self.stride && needed <= self.to.len(),
            "a whole block"
        );
        assert!(self.inputs.start.is_multiple_of(GROUP), "whole groups");
        with_format!(self.weight, F => widen_panels::<S, F>(simd, self));
    }
}

#[inline(always)]
fn widen_panels<S: Simd, F: PanelFormat>(simd: S, task: WidenPanelsTask<'_>) {
    for (column, index) in task.panels.enumerate() {
        let panel = PanelRef::new(task.weight, index);
        for vector in 0..PANEL_FEATURES / S::LANES {
            let column = column * PANEL_FEATURES + vector * S::LANES;
            for first in task.inputs.clone().step_by(GROUP) {
                let scale = panel.scale::<S, F>(simd, first / GROUP, vector);
                let inputs = first..task.inputs.end.min(first + GROUP);
                let weights = panel.weights::<F>(first / GROUP);
                for input in inputs.step_by(2) {
                    let to = &mut task.to[(input - task.inputs.start) * task.stride + column..];
                    // SAFETY: the pair is in bounds; `to` has the rows of both inputs, as `run` has checked.
                    unsafe {
                        let loaded = F::load(simd, weights, (input - first) / 2, vector);
                        let [even, odd] = scaled::<S, F>(simd, loaded, scale);
                        simd.store(to.as_mut_ptr(), even);
                        simd.store(to[task.stride..].as_mut_ptr(), odd);
                    }
                }
            }
        }
    }
}
