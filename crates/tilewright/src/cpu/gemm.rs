//! `out = x · weightᵀ + bias` on the CPU, through the `gemm` crate.
//!
//! Weights stay as the checkpoint stores them. Each task widens one panel of them, [`PANEL`] features of
//! [`DEPTH`] inputs at a time, into f32 laid out for the library, and multiplies all its rows with it.

use super::{
    Cpu,
    simd::{
        matmul::{DEPTH, PANEL, Panel, Product},
        shared::Shared,
    },
};
use crate::{
    Dtype, View, ViewMut,
    rows::{Rows, rows_mut, widen},
    tensor::DataMut,
    with_dtype,
};
use std::cell::RefCell;

/// Rows of one task: enough that widening the weights is cheap beside multiplying with them.
const ROWS: usize = 256;

/// Multiply-adds below which one thread is done before another has woken up.
const SMALL: usize = 1 << 20;

thread_local! {
    /// A widened panel; kept, so that only a thread's first call allocates.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn linear(cpu: &Cpu, x: View<'_>, weight: View<'_>, bias: Option<View<'_>>, out: ViewMut<'_>) {
    if x.dtype() == Dtype::F32 {
        return linear_f32(cpu, x, weight, bias, out);
    }
    let wide = widened(x);
    let x = View::new(&wide, x.shape()).expect("a row for each row");
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

/// The elements of a matrix, exactly, row by row.
fn widened(x: View<'_>) -> Vec<f32> {
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
    let product = Product {
        isa: cpu.isa,
        x: (x_slice, x.strides()[0]),
        weight,
        bias,
        out: Shared::new(out),
        out_stride,
    };
    let panels = features.div_ceil(PANEL);
    let tasks = panels * rows.div_ceil(ROWS);
    let threads = if rows * features * x.shape()[1] < SMALL { 1 } else { cpu.threads() };
    cpu.for_each(tasks, std::iter::repeat_n((), threads), |task, ()| {
        let (first_row, first_feature) = (task / panels * ROWS, task % panels * PANEL);
        let panel = Panel {
            rows: first_row..rows.min(first_row + ROWS),
            features: first_feature..features.min(first_feature + PANEL),
        };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(PANEL * DEPTH + 2 * PANEL, 0.0);
            product.multiply(&panel, scratch);
        });
    });
}
