//! CPU RMSNorm: each row is widened to f32, normalized, and rounded once on output.

use crate::{
    Cpu, Element, View, ViewMut,
    norm::NormWeight,
    rows::{Rows, rows_mut, widen},
    with_dtype,
};

/// Partial sums of squares, for vectorization and accuracy. A constant, because it affects the bits of the result.
const LANES: usize = 16;

pub(super) fn rmsnorm(cpu: &Cpu, x: View<'_>, weight: &NormWeight<'_>, eps: f32, out: ViewMut<'_>) {
    let factors = weight.factors();
    with_dtype!(x.dtype(), T => {
        let rows = Rows::<T>::new(x);
        with_dtype!(out.dtype(), Out => {
            cpu.each_row(rows_mut::<Out>(out), factors.len(), Vec::new, |row_f32, row, out| {
                widen(rows.get(row), row_f32);
                normalize(row_f32, &factors, eps, out);
            });
        });
    });
}

pub(super) fn rmsnorm_in_place(cpu: &Cpu, x: ViewMut<'_>, weight: &NormWeight<'_>, eps: f32) {
    let factors = weight.factors();
    with_dtype!(x.dtype(), T => {
        cpu.each_row(rows_mut::<T>(x), factors.len(), Vec::new, |row_f32, _, x| {
            widen(x, row_f32);
            normalize(row_f32, &factors, eps, x);
        });
    });
}

pub(super) fn fused_add_rmsnorm(
    cpu: &Cpu,
    x: ViewMut<'_>,
    residual: ViewMut<'_>,
    weight: &NormWeight<'_>,
    eps: f32,
) {
    let factors = weight.factors();
    with_dtype!(x.dtype(), T => {
        let pairs: Vec<_> = rows_mut::<T>(x).into_iter().zip(rows_mut::<T>(residual)).collect();
        cpu.each_row(pairs, factors.len(), Vec::new, |row_f32, _, (x, residual)| {
            widen(x, row_f32);
            for (sum, residual) in row_f32.iter_mut().zip(residual) {
                *sum += residual.to_f32();
                *residual = T::from_f32(*sum);
            }
            normalize(row_f32, &factors, eps, x);
        });
    });
}

pub(super) fn add_rmsnorm(
    cpu: &Cpu,
    x: View<'_>,
    residual: ViewMut<'_>,
    (weight, eps): (&NormWeight<'_>, f32),
    out: ViewMut<'_>,
) {
    let factors = weight.factors();
    with_dtype!(x.dtype(), T => {
        let rows = Rows::<T>::new(x);
        with_dtype!(out.dtype(), Out => {
            let pairs: Vec<_> = rows_mut::<f32>(residual).into_iter().zip(rows_mut::<Out>(out)).collect();
            cpu.each_row(pairs, factors.len(), || (), |(), row, (residual, out)| {
                let added = rows.get(row).iter();
                residual.iter_mut().zip(added).for_each(|(sum, x)| *sum += x.to_f32());
                normalize(residual, &factors, eps, out);
            });
        });
    });
}

fn normalize<T: Element>(row: &[f32], factors: &[f32], eps: f32, out: &mut [T]) {
    let mean = sum_of_squares(row) / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((out, x), factor) in out.iter_mut().zip(row).zip(factors) {
        *out = T::from_f32(x * scale * factor);
    }
}

fn sum_of_squares(row: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x * x;
    }
    lanes.iter().sum()
}
