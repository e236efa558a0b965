//! CPU RMSNorm: each row is widened to f32, normalized, and rounded once on output.

use crate::{
    Cpu, Element,
    norm::RmsNorm,
    rows::{rows_mut, widen, widen_row},
    tensor::with_computable,
};

/// Partial sums of squares, for vectorization and accuracy. A constant, because it affects the bits of the result.
const LANES: usize = 16;

pub(super) fn rmsnorm(cpu: &Cpu, operator: RmsNorm<'_>) {
    let RmsNorm { x, residual, weight, eps, out } = operator;
    let factors = weight.factors();
    with_computable!(out.dtype(), Out => {
        let rows = rows_mut::<Out>(out);
        let load = |row, out: &[Out], row_f32: &mut Vec<f32>| match x {
            Some(x) => widen_row(x, row, row_f32),
            None => widen(out, row_f32),
        };
        let Some(residual) = residual else {
            return cpu.each_row(rows, factors.len(), Vec::new, |row_f32, row, out| {
                load(row, out, row_f32);
                normalize(row_f32, &factors, eps, out);
            });
        };
        with_computable!(residual.dtype(), Residual => {
            let pairs = rows.into_iter().zip(rows_mut::<Residual>(residual)).collect();
            cpu.each_row(pairs, factors.len(), Vec::new, |row_f32, row, (out, residual)| {
                load(row, out, row_f32);
                for (sum, residual) in row_f32.iter_mut().zip(residual.iter_mut()) {
                    *sum += residual.to_f32();
                    *residual = Residual::from_f32(*sum);
                }
                normalize(row_f32, &factors, eps, out);
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
