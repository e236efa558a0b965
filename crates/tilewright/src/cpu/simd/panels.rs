//! Products of 1 to 8 rows with packed weights, and widening of packed weights for products of more rows.
//!
//! Lane = output feature. Sums stay in registers over [`DEPTH`] inputs in ascending order, one chain of multiply-adds per sum,
//! and are then added to the result: the order of [`super::matmul`], so the bits do not depend on the number of rows.

use super::{Simd, Task, matmul::DEPTH};
use crate::{
    Dtype,
    gemm::{GROUP, PANEL_FEATURES, PackedMatrix, WeightFormat},
};
use half::{bf16, f16};
use std::ops::Range;

/// Rows of a tile, at most.
pub(crate) const TILE_ROWS: usize = 8;
/// Panels of a tile: as many memory streams.
pub(crate) const TILE_PANELS: usize = 4;
pub(crate) const TILE_FEATURES: usize = TILE_PANELS * PANEL_FEATURES;
/// Up to this many inputs, the `gemm` crate adds rounded products to the result.
const MAX_UNFUSED: usize = 2;
/// Bytes that a panel is prefetched ahead, beyond the hardware's prefetch at the start of a page.
const PREFETCH: usize = 1024;

/// Results of a tile, `[TILE_ROWS, TILE_FEATURES]`.
#[repr(align(64))]
pub(crate) struct TileSums(pub(crate) [[f32; TILE_FEATURES]; TILE_ROWS]);

/// `sums += x · weightᵀ` for at most [`TILE_ROWS`] rows and [`TILE_PANELS`] panels.
pub(crate) struct TileTask<'a> {
    /// The rows, `[in_features]` each.
    pub(crate) x: &'a [&'a [f32]],
    pub(crate) weight: &'a PackedMatrix,
    pub(crate) panels: Range<usize>,
    pub(crate) sums: &'a mut TileSums,
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

/// The elements of a panel.
trait PanelFormat {
    /// Bytes of the 16 weights of two inputs.
    const PAIR_BYTES: usize;
    const HAS_SCALES: bool;

    /// Register `vector` of both inputs of a pair, without scales.
    ///
    /// # Safety
    /// `PAIR_BYTES` are readable at `pair`, and `vector < PANEL_FEATURES / LANES`.
    unsafe fn load<S: Simd>(simd: S, pair: *const u8, vector: usize) -> [S::V; 2];
}

struct F32Panel;
struct F16Panel;
struct Bf16Panel;
struct Int8Panel;
struct Int4Panel;

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

/// One panel of a matrix.
#[derive(Clone, Copy)]
struct PanelRef<'a> {
    weights: &'a [u8],
    scales: &'a [bf16],
}

impl<'a> PanelRef<'a> {
    fn new(weight: &'a PackedMatrix, index: usize) -> Self {
        let (bytes, scales) = (weight.panel_bytes(), weight.panel_scales());
        Self {
            weights: &weight.weights()[index * bytes..][..bytes],
            scales: &weight.scales()[index * scales..][..scales],
        }
    }

    /// Register `vector` of the scales of the group of `input`.
    #[inline(always)]
    fn scale<S: Simd, F: PanelFormat>(self, simd: S, input: usize, vector: usize) -> S::V {
        if !F::HAS_SCALES {
            return simd.splat(1.0);
        }
        let scales = &self.scales[input / GROUP * PANEL_FEATURES..][..PANEL_FEATURES];
        // SAFETY: `scales` has the elements of all registers of a panel.
        unsafe { simd.load_bf16(scales.as_ptr().add(vector * S::LANES)) }
    }

    /// The pair that begins at the even `input`.
    #[inline(always)]
    fn pair<F: PanelFormat>(self, input: usize) -> *const u8 {
        self.weights[input / 2 * F::PAIR_BYTES..][..F::PAIR_BYTES].as_ptr()
    }
}

/// Exact, because scales and integers have few bits.
#[inline(always)]
fn scaled<S: Simd, F: PanelFormat>(simd: S, pair: [S::V; 2], scale: S::V) -> [S::V; 2] {
    if F::HAS_SCALES { pair.map(|weights| simd.mul(weights, scale)) } else { pair }
}

impl Task for TileTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        assert!(self.x.len() <= TILE_ROWS && self.panels.len() <= TILE_PANELS, "at most a tile");
        assert!(self.x.iter().all(|row| row.len() == self.weight.shape()[1]), "whole rows");
        if const { !S::FUSES } {
            unreachable!("sets without FMA multiply widened panels");
        } else if !self.panels.is_empty() {
            with_format!(self.weight, F => multiply_tile::<S, F>(simd, self));
        }
    }
}

/// Blocks of rows and panels such that sums and weights fit into the registers: 16 lanes imply 32 registers.
#[inline(always)]
fn multiply_tile<S: Simd, F: PanelFormat>(simd: S, mut tile: TileTask<'_>) {
    let inputs = tile.weight.shape()[1];
    for first in (0..inputs).step_by(DEPTH) {
        let inputs = first..inputs.min(first + DEPTH);
        if inputs.len() <= MAX_UNFUSED {
            return add_unfused(&mut tile, inputs);
        }
        let mut row = 0;
        while row < tile.x.len() {
            let (at, rest) = ((row, inputs.clone()), tile.x.len() - row);
            let block = &mut tile;
            // constant conditions: the compiler drops the forms of other sets
            row += if const { S::LANES == 16 } {
                match rest {
                    1 => multiply_blocks::<S, F, 1, 4>(simd, block, at),
                    2 => multiply_blocks::<S, F, 2, 4>(simd, block, at),
                    3 => multiply_blocks::<S, F, 3, 4>(simd, block, at),
                    4 => multiply_blocks::<S, F, 4, 4>(simd, block, at),
                    5 => multiply_blocks::<S, F, 5, 2>(simd, block, at),
                    6 => multiply_blocks::<S, F, 6, 2>(simd, block, at),
                    7 => multiply_blocks::<S, F, 7, 2>(simd, block, at),
                    _ => multiply_blocks::<S, F, 8, 2>(simd, block, at),
                }
            } else {
                match rest {
                    1 => multiply_blocks::<S, F, 1, 4>(simd, block, at),
                    2 => multiply_blocks::<S, F, 2, 4>(simd, block, at),
                    3 => multiply_blocks::<S, F, 3, 2>(simd, block, at),
                    _ => multiply_blocks::<S, F, 4, 2>(simd, block, at),
                }
            };
        }
    }
}

/// Adds the products of the last few inputs to the results, each rounded.
#[inline(never)]
fn add_unfused(tile: &mut TileTask<'_>, inputs: Range<usize>) {
    let start = tile.panels.start * PANEL_FEATURES;
    let features = start..tile.weight.shape()[0].min(tile.panels.end * PANEL_FEATURES);
    for (feature, input) in features.flat_map(|feature| inputs.clone().map(move |input| (feature, input))) {
        let weight = tile.weight.get(feature, input);
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
    (row, inputs): (usize, Range<usize>),
) -> usize {
    let vectors = PANEL_FEATURES / S::LANES;
    let num_vectors = tile.panels.len() * vectors;
    for first in (0..num_vectors).step_by(REGISTERS) {
        // registers beyond the last panel repeat its last one; their sums are not stored
        let vector = |v: usize| (first + v).min(num_vectors - 1);
        let block = RegisterBlock::<ROWS, REGISTERS> {
            x: std::array::from_fn(|r| tile.x[row + r]),
            panels: std::array::from_fn(|v| {
                PanelRef::new(tile.weight, tile.panels.start + vector(v) / vectors)
            }),
            vectors: std::array::from_fn(|v| vector(v) % vectors),
        };
        let sums = block.multiply::<S, F>(simd, inputs.clone());
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate().take(num_vectors - first) {
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
    vectors: [usize; REGISTERS],
}

impl<const ROWS: usize, const REGISTERS: usize> RegisterBlock<'_, ROWS, REGISTERS> {
    #[inline(always)]
    fn multiply<S: Simd, F: PanelFormat>(&self, simd: S, inputs: Range<usize>) -> [[S::V; REGISTERS]; ROWS] {
        let mut sums = [[simd.splat(0.0); REGISTERS]; ROWS];
        let mut first = inputs.start;
        while first < inputs.end {
            // without scales there is one group
            let end = inputs.end.min(first + if F::HAS_SCALES { GROUP } else { DEPTH });
            let scales: [S::V; REGISTERS] =
                std::array::from_fn(|v| self.panels[v].scale::<S, F>(simd, first, self.vectors[v]));
            let x: [&[f32]; ROWS] = std::array::from_fn(|r| &self.x[r][first..end]);
            let pairs: [*const u8; REGISTERS] = std::array::from_fn(|v| self.group::<F>(v, first..end));
            for pair in 0..(end - first) / 2 {
                // SAFETY: the pair is inside the group.
                let weights = unsafe { self.load_pair::<S, F>(simd, &pairs, pair, &scales) };
                for (input, weights) in weights.into_iter().enumerate() {
                    add_products(simd, &mut sums, &std::array::from_fn(|r| x[r][2 * pair + input]), &weights);
                }
            }
            if (end - first) % 2 == 1 {
                let last = end - first - 1;
                // SAFETY: panels are padded to whole pairs.
                let [weights, _] = unsafe { self.load_pair::<S, F>(simd, &pairs, last / 2, &scales) };
                add_products(simd, &mut sums, &std::array::from_fn(|r| x[r][last]), &weights);
            }
            first = end;
        }
        sums
    }

    /// The first of the pairs of `inputs` of register `v`, which are all in bounds.
    #[inline(always)]
    fn group<F: PanelFormat>(&self, v: usize, inputs: Range<usize>) -> *const u8 {
        let (first, end) = (inputs.start / 2, inputs.end.div_ceil(2));
        self.panels[v].weights[first * F::PAIR_BYTES..end * F::PAIR_BYTES].as_ptr()
    }

    /// The weights of a pair of inputs, per input and register.
    ///
    /// # Safety
    /// Each of `pairs` is readable for `pair + 1` pairs.
    #[inline(always)]
    unsafe fn load_pair<S: Simd, F: PanelFormat>(
        &self,
        simd: S,
        pairs: &[*const u8; REGISTERS],
        pair: usize,
        scales: &[S::V; REGISTERS],
    ) -> [[S::V; REGISTERS]; 2] {
        let mut weights = [[simd.splat(0.0); REGISTERS]; 2];
        for v in 0..REGISTERS {
            let at = pairs[v].wrapping_add(pair * F::PAIR_BYTES);
            simd.prefetch_all(at.wrapping_add(PREFETCH), F::PAIR_BYTES);
            // SAFETY: upheld by the caller.
            let loaded = unsafe { F::load(simd, at, self.vectors[v]) };
            let [even, odd] = scaled::<S, F>(simd, loaded, scales[v]);
            (weights[0][v], weights[1][v]) = (even, odd);
        }
        weights
    }
}

/// `sums[r][v] += x[r] · weights[v]`
#[inline(always)]
fn add_products<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    simd: S,
    sums: &mut [[S::V; REGISTERS]; ROWS],
    x: &[f32; ROWS],
    weights: &[S::V; REGISTERS],
) {
    for r in 0..ROWS {
        let x = simd.splat(x[r]);
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
                let scale = panel.scale::<S, F>(simd, first, vector);
                for input in (first..task.inputs.end.min(first + GROUP)).step_by(2) {
                    let to = &mut task.to[(input - task.inputs.start) * task.stride + column..];
                    // SAFETY: the pair is in bounds; `to` has the rows of both inputs, as `run` has checked.
                    unsafe {
                        let loaded = F::load(simd, panel.pair::<F>(input), vector);
                        let [even, odd] = scaled::<S, F>(simd, loaded, scale);
                        simd.store(to.as_mut_ptr(), even);
                        simd.store(to[task.stride..].as_mut_ptr(), odd);
                    }
                }
            }
        }
    }
}
