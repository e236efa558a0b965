//! CPU GEMM `out = x · weightᵀ + bias` with the `gemm` crate.
//!
//! Weights keep the layout and dtype of the checkpoint. Each task packs a panel of [`PANEL`] features by [`DEPTH`] inputs as
//! f32 and multiplies its rows with it.

use super::{
    Cpu,
    simd::{
        matmul::{DEPTH, GemmParams, PANEL, Panel},
        shared::Shared,
    },
};
use crate::{
    Dtype, View, ViewMut,
    gemm::LinearLayer,
    rows::{Rows, rows_mut, widen},
    tensor::DataMut,
    with_dtype,
};
use std::cell::RefCell;

/// Rows per task: enough to amortize packing the weights.
const TASK_ROWS: usize = 256;

/// Multiply-adds below which one thread finishes before another wakes up.
const MIN_PARALLEL_MACS: usize = 1 << 20;

thread_local! {
    /// A packed panel, reused so that only the first call of a thread allocates.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn linear(cpu: &Cpu, operator: LinearLayer<'_>) {
    let LinearLayer { x, weight, bias, out } = operator;
    if x.dtype() == Dtype::F32 {
        return linear_f32(cpu, x, weight, bias, out);
    }
    let x_f32 = widen_all(x);
    let x = View::new(&x_f32, x.shape()).expect("a row for each row");
    if out.dtype() == Dtype::F32 {
        return linear_f32(cpu, x, weight, bias, out);
    }
    let (shape, features) = (out.shape().to_vec(), out.shape()[1]);
    let mut sums = vec![0.0; shape[0] * features];
    linear_f32(cpu, x, weight, bias, ViewMut::new(&mut sums, &shape).expect("a sum for each element"));
    with_dtype!(out.dtype(), T => {
        cpu.each_row(rows_mut::<T>(out), features, || (), |(), row, out| {
            let sums = &sums[row * features..][..features];
            out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = crate::Element::from_f32(sum));
        });
    });
}

/// Converts a matrix to contiguous f32, exactly.
fn widen_all(x: View<'_>) -> Vec<f32> {
    let mut all = Vec::with_capacity(x.shape().iter().product());
    let mut row = Vec::new();
    with_dtype!(x.dtype(), T => {
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
    let gemm = GemmParams {
        isa: cpu.isa,
        x: (x_slice, x.strides()[0]),
        weight,
        bias,
        out: Shared::new(out),
        out_stride,
    };
    let panels = features.div_ceil(PANEL);
    let tasks = panels * rows.div_ceil(TASK_ROWS);
    let threads = if rows * features * x.shape()[1] < MIN_PARALLEL_MACS { 1 } else { cpu.threads() };
    cpu.for_each(tasks, std::iter::repeat_n((), threads), |task, ()| {
        let (first_row, first_feature) = (task / panels * TASK_ROWS, task % panels * PANEL);
        let panel = Panel {
            rows: first_row..rows.min(first_row + TASK_ROWS),
            features: first_feature..features.min(first_feature + PANEL),
        };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(PANEL * DEPTH + 2 * PANEL, 0.0);
            gemm.multiply(&panel, scratch);
        });
    });
}
