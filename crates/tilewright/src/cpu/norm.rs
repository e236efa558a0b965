//! CPU norms: each row is widened to f32, normalized, and rounded once on output.

use crate::{
    Cpu, Element, View,
    norm::{LayerNorm, RmsNorm, widened},
    rows_mut, widen, widen_row, with_computable, with_dtype,
};

/// Partial sums of a row, for vectorization and accuracy. A constant, because it affects the bits of the result.
const LANES: usize = 16;

pub(super) fn rmsnorm(cpu: &Cpu, operator: RmsNorm<'_>) {
    let RmsNorm { x, residual, weight, eps, scale, out } = operator;
    let norm = RowNorm { factors: weight.factors(), bias: None, eps, scale: reciprocal(scale) };
    with_dtype!(out.dtype(), Out => {
        let rows = rows_mut::<Out>(out);
        let load = |row, out: &[Out], row_f32: &mut Vec<f32>| match x {
            Some(x) => widen_row(x, row, row_f32),
            None => widen(out, row_f32),
        };
        let Some(residual) = residual else {
            return cpu.each_row(rows, norm.factors.len(), Vec::new, |row_f32, row, out| {
                load(row, out, row_f32);
                norm.normalize(row_f32, out);
            });
        };
        with_computable!(residual.dtype(), Residual => {
            let pairs = rows.into_iter().zip(rows_mut::<Residual>(residual)).collect();
            cpu.each_row(pairs, norm.factors.len(), Vec::new, |row_f32, row, (out, residual)| {
                load(row, out, row_f32);
                for (sum, residual) in row_f32.iter_mut().zip(residual.iter_mut()) {
                    *sum += residual.to_f32();
                    *residual = Residual::from_f32(*sum);
                }
                norm.normalize(row_f32, out);
            });
        });
    });
}

pub(super) fn layer_norm(cpu: &Cpu, operator: LayerNorm<'_>) {
    let LayerNorm { x, weight, bias, eps, scale, out } = operator;
    let norm =
        RowNorm { factors: weight.factors(), bias: Some(widened(bias)), eps, scale: reciprocal(scale) };
    with_dtype!(out.dtype(), Out => {
        cpu.each_row(rows_mut::<Out>(out), norm.factors.len(), Vec::new, |row_f32, row, out| {
            widen_row(x, row, row_f32);
            let mean = sum(row_f32, |x| x) / row_f32.len() as f32;
            row_f32.iter_mut().for_each(|x| *x -= mean);
            norm.normalize(row_f32, out);
        });
    });
}

/// The factor that divides by a scale; 1 without one.
fn reciprocal(scale: Option<View<'_>>) -> f32 {
    scale.and_then(|scale| scale.as_slice::<f32>()).map_or(1.0, |scale| 1.0 / scale[0])
}

/// The numbers of a norm, which all rows share.
struct RowNorm {
    factors: Vec<f32>,
    bias: Option<Vec<f32>>,
    eps: f32,
    /// Multiplies the norm.
    scale: f32,
}

impl RowNorm {
    fn normalize<T: Element>(&self, row: &[f32], out: &mut [T]) {
        let mean = sum(row, |x| x * x) / row.len() as f32;
        let rms = 1.0 / (mean + self.eps).sqrt();
        let scaled = row.iter().zip(&self.factors).map(|(x, factor)| x * rms * factor);
        match &self.bias {
            None => out.iter_mut().zip(scaled).for_each(|(out, y)| *out = T::from_f32(y * self.scale)),
            Some(bias) => {
                for ((out, y), bias) in out.iter_mut().zip(scaled).zip(bias) {
                    *out = T::from_f32((y + bias) * self.scale);
                }
            }
        }
    }
}

/// The sum of `term` of each element.
fn sum(row: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += term(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += term(*x);
    }
    lanes.iter().sum()
}
