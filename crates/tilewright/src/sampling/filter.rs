//! Filters of distributions (softmax, top-k, top-p): renormalised probabilities, or logits with dropped tokens at -inf.
//!
//! `x` and `out` are `[rows, vocab]` of one dtype, f32, f16 or bf16. A row with NaN becomes NaN, so that sampling it fails.

use super::params::{temperature_problem, top_k_problem, top_p_problem};
use crate::{
    Backend, Error, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable, check_dtype,
    check_rows, check_shape, dispatch,
};

/// A filter with one parameter per row.
#[derive(Debug, Clone, Copy)]
pub enum Filter<'a> {
    /// See [`softmax`]: the temperatures.
    Softmax(&'a [f32]),
    /// See [`top_k_renorm_probs`].
    TopKRenorm(&'a [u32]),
    /// See [`top_p_renorm_probs`].
    TopPRenorm(&'a [f32]),
    /// See [`top_k_mask_logits`].
    TopKMask(&'a [u32]),
}

/// Softmax of `logits / temperature`.
///
/// `logits`, `out`: `[rows, vocab]` of one dtype; `temperature`: `[rows]`, finite and not negative. Temperature 0
/// puts all mass on the largest logit, the lowest token among equals. A row with NaN or +inf, or of -inf only,
/// becomes NaN.
///
/// # Errors
/// When shapes or dtypes disagree, a last axis is not dense, or a temperature is out of range.
pub fn softmax<B: Backend + ?Sized>(
    backend: &B,
    logits: View<'_>,
    temperature: &[f32],
    out: ViewMut<'_>,
) -> Result<()> {
    ScoreFilter { filter: Filter::Softmax(temperature), x: logits, out }.run(backend)
}

/// Keeps the probabilities of each row that are at least its `top_k`-th largest, ties included, divided by their
/// sum; the others become 0.
///
/// `probs`, `out`: `[rows, vocab]` of one dtype; `top_k`: `[rows]`, at least 1; at `vocab` and above all stay.
/// Probabilities need not sum to 1. A row with NaN, a negative number, infinity or only zeros becomes NaN.
///
/// # Errors
/// When shapes or dtypes disagree, a last axis is not dense, or a `top_k` is 0.
pub fn top_k_renorm_probs<B: Backend + ?Sized>(
    backend: &B,
    probs: View<'_>,
    top_k: &[u32],
    out: ViewMut<'_>,
) -> Result<()> {
    ScoreFilter { filter: Filter::TopKRenorm(top_k), x: probs, out }.run(backend)
}

/// Keeps the smallest set of the largest probabilities of each row whose sum reaches the share `top_p` of the
/// row's, ties at the threshold included, divided by their sum; the others become 0.
///
/// `probs`, `out`: `[rows, vocab]` of one dtype; `top_p`: `[rows]` in (0, 1]. Probabilities need not sum to 1. A
/// row with NaN, a negative number, infinity or only zeros becomes NaN.
///
/// # Errors
/// When shapes or dtypes disagree, a last axis is not dense, or a `top_p` is out of range.
pub fn top_p_renorm_probs<B: Backend + ?Sized>(
    backend: &B,
    probs: View<'_>,
    top_p: &[f32],
    out: ViewMut<'_>,
) -> Result<()> {
    ScoreFilter { filter: Filter::TopPRenorm(top_p), x: probs, out }.run(backend)
}

/// Keeps the logits of each row that are at least its `top_k`-th largest, ties included; the others become -inf.
///
/// `logits`, `out`: `[rows, vocab]` of one dtype; `top_k`: `[rows]`, at least 1; at `vocab` and above all stay. A
/// row with NaN becomes NaN.
///
/// # Errors
/// When shapes or dtypes disagree, a last axis is not dense, or a `top_k` is 0.
pub fn top_k_mask_logits<B: Backend + ?Sized>(
    backend: &B,
    logits: View<'_>,
    top_k: &[u32],
    out: ViewMut<'_>,
) -> Result<()> {
    ScoreFilter { filter: Filter::TopKMask(top_k), x: logits, out }.run(backend)
}

/// The arguments of a filter.
#[derive(Debug)]
pub struct ScoreFilter<'a> {
    /// The filter and its parameters.
    pub filter: Filter<'a>,
    /// Probabilities, or logits for [`Filter::Softmax`] and [`Filter::TopKMask`]: `[rows, vocab]`.
    pub x: View<'a>,
    /// `[rows, vocab]`
    pub out: ViewMut<'a>,
}

impl ScoreFilter<'_> {
    /// The argument name of `x`.
    fn argument(&self) -> &'static str {
        match self.filter {
            Filter::Softmax(_) | Filter::TopKMask(_) => "logits",
            Filter::TopKRenorm(_) | Filter::TopPRenorm(_) => "probs",
        }
    }
}

impl<'a> Operator<'a> for ScoreFilter<'a> {
    fn name(&self) -> &'static str {
        match self.filter {
            Filter::Softmax(_) => "sampling.softmax",
            Filter::TopKRenorm(_) => "sampling.top_k_renorm_probs",
            Filter::TopPRenorm(_) => "sampling.top_p_renorm_probs",
            Filter::TopKMask(_) => "sampling.top_k_mask_logits",
        }
    }

    fn check(&self) -> Result<()> {
        let operator = self.name();
        let rows = check_pair(operator, self.argument(), &self.x, &self.out)?;
        match self.filter {
            Filter::Softmax(temperature) => {
                check_per_row(operator, "temperature", rows, temperature, temperature_problem)
            }
            Filter::TopKRenorm(k) | Filter::TopKMask(k) => {
                check_per_row(operator, "top_k", rows, k, top_k_problem)
            }
            Filter::TopPRenorm(p) => check_per_row(operator, "top_p", rows, p, top_p_problem),
        }
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit(self.argument(), TensorRef::Input(&mut self.x))?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(filter);
}

/// Checks the tensors of a filter and returns the number of rows.
pub(super) fn check_pair(
    operator: &'static str,
    argument: &str,
    x: &View<'_>,
    out: &ViewMut<'_>,
) -> Result<usize> {
    let rows = check_matrix(operator, argument, x)?;
    check_shape(operator, "out", out.shape(), x.shape(), "[rows, vocab]")?;
    check_dtype(operator, "out", out.dtype(), x.dtype())?;
    check_rows(operator, "out", (out.shape(), out.strides()))?;
    Ok(rows)
}

/// Rejects tensors other than non-empty `[rows, vocab]` with a dense last axis; returns the number of rows.
pub(super) fn check_matrix(operator: &'static str, argument: &str, x: &View<'_>) -> Result<usize> {
    crate::ensure!(
        x.shape().len() == 2 && x.shape()[1] > 0,
        operator,
        "{argument} has shape {:?}, expected [rows, vocab] with vocab > 0",
        x.shape()
    );
    check_computable(operator, argument, x.dtype())?;
    check_rows(operator, argument, (x.shape(), x.strides()))?;
    Ok(x.shape()[0])
}

/// Rejects parameters that are not one per row, or for which `problem` returns an error text.
pub(super) fn check_per_row<P: Copy>(
    operator: &'static str,
    argument: &str,
    rows: usize,
    values: &[P],
    problem: impl Fn(P) -> Option<String>,
) -> Result<()> {
    crate::ensure!(
        values.len() == rows,
        operator,
        "{argument} has {} elements, expected rows = {rows}",
        values.len()
    );
    let bad = values.iter().enumerate().find_map(|(row, &value)| Some((row, problem(value)?)));
    bad.map_or(Ok(()), |(row, problem)| Err(Error::new(operator, format!("request {row}: {problem}"))))
}
