//! Panel GEMM `out = x · weightᵀ + bias`: packs a panel of weights as f32, then calls the `gemm-f32` crate.
//!
//! Invariant: a row is bit-identical for every number of rows. The crate sums ascending inputs in one chain of multiply-adds
//! per element, but uses other orders for a single row and, depending on the shape, for depths above 512. So a single row is
//! duplicated, and depth is split at [`DEPTH`].

use super::{Isa, Simd, Task, gather, panels::WidenPanelsTask, shared::Shared, tile::Matrix};
use crate::{
    View,
    gemm::{PANEL_FEATURES, PackedMatrix},
};
use gemm_common::Parallelism;
use std::ops::Range;

/// Features per panel.
pub(crate) const PANEL: usize = 128;
/// Inputs per panel.
pub(crate) const DEPTH: usize = 512;

/// Parameters of one product, shared by all panels.
pub(crate) struct GemmParams<'a> {
    pub(crate) isa: Isa,
    /// `[rows, in_features]` with its row stride.
    pub(crate) x: (&'a [f32], usize),
    /// `[out_features, in_features]`
    pub(crate) weight: WeightRef<'a>,
    /// `[out_features]`, contiguous.
    pub(crate) bias: Option<View<'a>>,
    pub(crate) out: &'a Shared<'a, f32>,
    pub(crate) out_stride: usize,
    /// Row and feature of the first element of `out`.
    pub(crate) out_start: (usize, usize),
}

/// A weight matrix.
#[derive(Clone, Copy)]
pub(crate) enum WeightRef<'a> {
    /// Row-major, contiguous.
    Rows(View<'a>),
    Packed(&'a PackedMatrix),
}

impl WeightRef<'_> {
    fn in_features(self) -> usize {
        match self {
            Self::Rows(weight) => weight.shape()[1],
            Self::Packed(weight) => weight.shape()[1],
        }
    }
}

/// A block of the output.
pub(crate) struct Panel {
    pub(crate) rows: Range<usize>,
    pub(crate) features: Range<usize>,
}

/// Packs `weight[features, inputs]` into `to`: widened, transposed to `[DEPTH, PANEL]`.
struct PackPanelTask<'a> {
    weight: View<'a>,
    features: Range<usize>,
    inputs: Range<usize>,
    to: &'a mut [f32],
}

impl Task for PackPanelTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let stride = self.weight.strides()[0];
        let mut offsets = [0; PANEL];
        let offsets = &mut offsets[..self.features.len()];
        for (offset, feature) in offsets.iter_mut().zip(self.features) {
            *offset = feature * stride + self.inputs.start;
        }
        assert!(self.inputs.len() <= DEPTH && self.to.len() == PANEL * DEPTH, "a whole panel of scratch");
        let to = Matrix { ptr: self.to.as_mut_ptr(), stride: PANEL };
        // SAFETY: `to` has DEPTH rows of PANEL elements, a multiple of every register size.
        unsafe { gather::transpose_rows(simd, self.weight.data(), offsets, self.inputs.len(), to) };
    }
}

impl GemmParams<'_> {
    /// Computes one block of the output. Panels of concurrent calls must not overlap.
    pub(crate) fn multiply(&self, panel: &Panel, scratch: &mut [f32]) {
        let (weights, two_rows) = scratch.split_at_mut(PANEL * DEPTH);
        let in_features = self.weight.in_features();
        self.initialize_with_bias(panel);
        for first in (0..in_features).step_by(DEPTH) {
            let inputs = first..in_features.min(first + DEPTH);
            self.load_weights(&panel.features, &inputs, weights);
            if panel.rows.len() == 1 {
                self.accumulate_single(panel, inputs, weights, two_rows);
            } else {
                let start = self.out_index(panel.rows.start, panel.features.start);
                let len = (panel.rows.len() - 1) * self.out_stride + panel.features.len();
                // SAFETY: the range contains elements of other panels, but `gemm` accesses only this panel's through the
                // pointer, and panels do not overlap.
                let out = unsafe { self.out.pointer(start, len) };
                self.accumulate(panel, &inputs, weights, (out, self.out_stride));
            }
        }
    }

    /// Widens a block of weights into `to`, transposed to `[DEPTH, PANEL]`.
    fn load_weights(&self, features: &Range<usize>, inputs: &Range<usize>, to: &mut [f32]) {
        let (features, inputs) = (features.clone(), inputs.clone());
        match self.weight {
            WeightRef::Rows(weight) => self.isa.dispatch(PackPanelTask { weight, features, inputs, to }),
            WeightRef::Packed(weight) => {
                let panels = features.start / PANEL_FEATURES..features.end.div_ceil(PANEL_FEATURES);
                self.isa.dispatch(WidenPanelsTask { weight, panels, inputs, to, stride: PANEL });
            }
        }
    }

    fn out_index(&self, row: usize, feature: usize) -> usize {
        (row - self.out_start.0) * self.out_stride + feature - self.out_start.1
    }

    fn initialize_with_bias(&self, panel: &Panel) {
        for row in panel.rows.clone() {
            let start = self.out_index(row, panel.features.start);
            // SAFETY: panels do not overlap, so only this call accesses these elements.
            let out = unsafe { self.out.part(start, panel.features.len()) };
            for (out, feature) in out.iter_mut().zip(panel.features.clone()) {
                *out = self.bias.map_or(0.0, |bias| bias.at(&[feature]));
            }
        }
    }

    /// Multiplies a single row as two equal ones.
    fn accumulate_single(&self, panel: &Panel, inputs: Range<usize>, weights: &[f32], two_rows: &mut [f32]) {
        let start = self.out_index(panel.rows.start, panel.features.start);
        // SAFETY: panels do not overlap, so only this call accesses these elements.
        let out = unsafe { self.out.part(start, panel.features.len()) };
        two_rows[..out.len()].copy_from_slice(out);
        two_rows[PANEL..PANEL + out.len()].copy_from_slice(out);
        assert!(two_rows.len() >= 2 * PANEL, "room for two rows");
        self.accumulate(panel, &inputs, weights, (two_rows.as_mut_ptr(), PANEL));
        out.copy_from_slice(&two_rows[..out.len()]);
    }

    /// `out[row, feature] += Σ x[row, input] · weights[input, feature]`. A single row of `x` is read twice.
    fn accumulate(&self, panel: &Panel, inputs: &Range<usize>, weights: &[f32], out: (*mut f32, usize)) {
        let (x, x_stride) = self.x;
        let rows = panel.rows.len();
        let x = &x[panel.rows.start * x_stride + inputs.start..];
        assert!(x.len() >= (rows - 1) * x_stride + inputs.len(), "x has all rows");
        assert!(weights.len() >= PANEL * DEPTH && panel.features.len() <= PANEL, "a whole panel of weights");
        let row_step = if rows == 1 { 0 } else { x_stride };
        let shape = [rows.max(2), inputs.len(), panel.features.len()];
        // SAFETY: `x` has `rows` rows of `inputs.len()` elements and `weights` is [DEPTH, PANEL], as checked above. Callers
        // pass the panel's rows as `out`, or two rows of PANEL elements for a single row.
        unsafe { multiply_add(shape, (x.as_ptr(), row_step), (weights.as_ptr(), PANEL), out, true) };
    }
}

/// `out = a · b` for row-major squares of `size` on the calling thread, to measure the peak rate of the `gemm-f32` crate.
pub(crate) fn multiply_squares(size: usize, a: &[f32], b: &[f32], out: &mut [f32]) {
    assert!([a.len(), b.len(), out.len()] == [size * size; 3], "three squares");
    let (a, b, out) = ((a.as_ptr(), size), (b.as_ptr(), size), (out.as_mut_ptr(), size));
    // SAFETY: all three have `size * size` elements as checked above; `out` is borrowed mutably.
    unsafe { multiply_add([size; 3], a, b, out, false) };
}

/// `out = a · b`, or `out += a · b`, of row-major matrices with their row strides: `[m, k] · [k, n]` for `[m, k, n]`.
///
/// # Safety
///
/// The pointers are valid for these shapes, and `out` overlaps neither input.
unsafe fn multiply_add(
    [m, k, n]: [usize; 3],
    a: (*const f32, usize),
    b: (*const f32, usize),
    out: (*mut f32, usize),
    adds: bool,
) {
    let multiply = gemm_f32::gemm::f32::get_gemm_fn();
    // SAFETY: the caller guarantees valid pointers. The function takes column-major matrices, so it computes outᵀ = bᵀ · aᵀ.
    unsafe {
        multiply(
            n,
            m,
            k,
            out.0,
            out.1 as isize,
            1,
            adds,
            b.0,
            b.1 as isize,
            1,
            a.0,
            a.1 as isize,
            1,
            if adds { 1.0 } else { 0.0 },
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
