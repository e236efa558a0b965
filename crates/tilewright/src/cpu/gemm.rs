//! CPU GEMM `out = x · weightᵀ + bias` with the `gemm-f32` crate.
//!
//! Weights keep the layout and dtype of the checkpoint. Each task packs a panel of [`PANEL`] features by [`DEPTH`] inputs as
//! f32 and multiplies its rows with it.

mod pack;
mod packed;

pub(super) use pack::pack;
pub(super) use packed::{gated_linear, packed_linear};

use super::{
    Cpu,
    simd::{BLOCK_ROWS, GemmParams, MULTIPLY_SCRATCH, PANEL, Panel, Shared, WeightRef},
};
use crate::{
    DataMut, Dtype, Rows, View, ViewMut,
    gemm::{LinearLayer, SegmentGemm},
    rows_mut, widen, with_computable,
};
use std::cell::RefCell;

/// Multiply-adds below which one thread finishes before another wakes up.
const MIN_PARALLEL_MACS: usize = 1 << 20;

thread_local! {
    /// A packed panel, reused so that only the first call of a thread allocates.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `len` elements of arbitrary contents.
fn with_scratch(len: usize, work: impl FnOnce(&mut [f32])) {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0.0);
        }
        work(&mut scratch[..len]);
    });
}

pub(super) fn linear(cpu: &Cpu, operator: LinearLayer<'_>) {
    let LinearLayer { x, weight, bias, out } = operator;
    let x_f32 = F32Rows::new(x);
    let x = x_f32.view();
    in_f32(cpu, out, |out| linear_f32(cpu, x, weight, bias, out));
}

/// One product per segment, in order.
pub(super) fn segment_gemm(cpu: &Cpu, operator: SegmentGemm<'_>) {
    let SegmentGemm { x, weights, indptr, ids, out } = operator;
    let x_f32 = F32Rows::new(x);
    let x = x_f32.view();
    in_f32(cpu, out, |mut out| {
        let (strides, features) = (out.strides().to_vec(), out.shape()[1]);
        for (segment, bounds) in indptr.windows(2).enumerate().filter(|(_, bounds)| bounds[0] < bounds[1]) {
            let (start, rows) = (bounds[0] as usize, bounds[0].abs_diff(bounds[1]) as usize);
            let weight = ids.map_or(segment, |ids| ids[segment] as usize);
            let x = View::strided(x.data().skip(start * x.strides()[0]), &[rows, x.shape()[1]], x.strides());
            let data = weights.data().skip(weight * weights.strides()[0]);
            let weight = View::strided(data, &weights.shape()[1..], &weights.strides()[1..]);
            let rest =
                out.as_slice::<f32>().and_then(|all| all.get_mut(start * strides[0]..)).unwrap_or_default();
            let out = ViewMut::strided(rest, &[rows, features], &strides);
            let checked = "the operator was checked";
            linear_f32(cpu, x.expect(checked), weight.expect(checked), None, out.expect(checked));
        }
    });
}

/// Calls `compute` with `out`, or with f32 elements that are rounded to `out` afterwards.
fn in_f32(cpu: &Cpu, out: ViewMut<'_>, compute: impl FnOnce(ViewMut<'_>)) {
    if out.dtype() == Dtype::F32 {
        return compute(out);
    }
    let (shape, features) = (out.shape().to_vec(), out.shape()[1]);
    let mut sums = vec![0.0; shape[0] * features];
    compute(ViewMut::new(&mut sums, &shape).expect("a sum for each element"));
    with_computable!(out.dtype(), T => {
        cpu.each_row(rows_mut::<T>(out), features, || (), |(), row, out| {
            let sums = &sums[row * features..][..features];
            out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = crate::Element::from_f32(sum));
        });
    });
}

/// A matrix in f32, converted if it has 16 bits.
struct F32Rows<'a> {
    stored: View<'a>,
    converted: Vec<f32>,
}

impl<'a> F32Rows<'a> {
    fn new(stored: View<'a>) -> Self {
        let converted = if stored.dtype() == Dtype::F32 { Vec::new() } else { widen_all(stored) };
        Self { stored, converted }
    }

    fn view(&self) -> View<'_> {
        match self.stored.dtype() {
            Dtype::F32 => self.stored,
            _ => View::new(&self.converted, self.stored.shape()).expect("a row for each row"),
        }
    }
}

/// Converts a matrix to contiguous f32, exactly.
fn widen_all(x: View<'_>) -> Vec<f32> {
    let mut all = Vec::with_capacity(x.shape().iter().product());
    let mut row = Vec::new();
    with_computable!(x.dtype(), T => {
        let rows = Rows::<T>::new(x);
        for at in 0..x.shape()[0] {
            widen(rows.get(at), &mut row);
            all.extend_from_slice(&row);
        }
    });
    all
}

fn linear_f32(cpu: &Cpu, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, out: ViewMut<'_>) {
    let (rows, features) = (out.shape()[0], out.shape()[1]);
    let out_stride = out.strides()[0];
    let (Some(x_slice), DataMut::F32(out)) = (x.as_slice::<f32>(), out.into_data()) else { return };
    if rows == 0 || features == 0 {
        return;
    }
    let out = Shared::new(out);
    let gemm = GemmParams {
        isa: cpu.isa,
        x: (x_slice, x.strides()[0]),
        weight: WeightRef::Rows(weight),
        bias,
        out: &out,
        out_stride,
        out_start: (0, 0),
    };
    let blocks = Blocks { rows, features };
    let threads = if rows * features * x.shape()[1] < MIN_PARALLEL_MACS { 1 } else { cpu.threads() };
    cpu.for_each(blocks.len(), std::iter::repeat_n((), threads), |task, ()| {
        with_scratch(MULTIPLY_SCRATCH, |scratch| gemm.multiply(&blocks.get(task), scratch));
    });
}

/// The blocks of an output, one per task.
#[derive(Clone, Copy)]
struct Blocks {
    rows: usize,
    features: usize,
}

impl Blocks {
    fn len(self) -> usize {
        self.features.div_ceil(PANEL) * self.rows.div_ceil(BLOCK_ROWS)
    }

    fn get(self, task: usize) -> Panel {
        let panels = self.features.div_ceil(PANEL);
        let (row, feature) = (task / panels * BLOCK_ROWS, task % panels * PANEL);
        Panel {
            rows: row..self.rows.min(row + BLOCK_ROWS),
            features: feature..self.features.min(feature + PANEL),
        }
    }
}
