//! Token sampling, one token per row.
//!
//! Temperature, softmax, filters, then inverse transform: with `u` uniform in [0, 1), the token is the first in
//! vocabulary order at which the cumulative probability of the kept tokens exceeds `u`. One random number decides
//! a token; there is no rejection loop.

use super::{
    SamplingParams,
    filter::{check_matrix, check_per_row},
};
use crate::{
    Backend, Operator, Result, TensorRef, TensorVisitor, View, ViewMut, check_computable, check_rows,
    check_shape, dispatch,
};

/// A token, or the row's error: NaN, +inf, a negative probability, or no token with positive probability.
pub type Sampled = Result<u32>;

/// The scores to sample from, `[rows, vocab]`.
#[derive(Debug, Clone, Copy)]
pub enum Scores<'a> {
    /// Natural-log scores; -inf excludes a token.
    Logits(View<'a>),
    /// Probabilities, or any weights: they need not sum to 1.
    Probs(View<'a>),
}

impl<'a> Scores<'a> {
    /// The tensor.
    pub fn view(&self) -> View<'a> {
        let (Self::Logits(view) | Self::Probs(view)) = *self;
        view
    }

    /// The tensor.
    pub(super) fn view_mut(&mut self) -> &mut View<'a> {
        let (Self::Logits(view) | Self::Probs(view)) = self;
        view
    }

    /// The operator name of a draw.
    pub(super) fn operator(&self) -> &'static str {
        match self {
            Self::Logits(_) => "sampling.sample",
            Self::Probs(_) => "sampling.sampling_from_probs",
        }
    }

    /// Why a temperature does not fit the kind of scores.
    pub(super) fn temperature_problem(&self, temperature: f32) -> Option<String> {
        let fits = matches!(self, Self::Logits(_)) || temperature == 1.0;
        (!fits)
            .then(|| format!("temperature = {temperature} applies to logits, expected 1 for probabilities"))
    }

    /// The argument name in error texts.
    pub(super) fn argument(&self) -> &'static str {
        match self {
            Self::Logits(_) => "logits",
            Self::Probs(_) => "probs",
        }
    }
}

/// Draws a token per row of `logits`: temperature, softmax, top-k, top-p, min-p, draw.
///
/// `logits`: `[rows, vocab]` f32, f16 or bf16 with stride 1 along the last axis; `params`, `out`: `[rows]`. Everything
/// is computed in f32, sums in f64; probabilities that are equal in f32 are ties. `out[row]` is the token, or an error
/// that names row and reason; other rows are unaffected. A row's token depends on its logits and parameters only.
///
/// # Errors
/// When shapes disagree, the last axis is not dense, or a parameter is out of range, as in
/// `sampling.sample: request 2: top_p = 1.5 is not in (0, 1]`; then nothing is drawn.
#[doc(alias = "sampling_from_logits")]
pub fn sample<B: Backend + ?Sized>(
    backend: &B,
    logits: View<'_>,
    params: &[SamplingParams],
    out: &mut [Sampled],
) -> Result<()> {
    TokenSampling { scores: Scores::Logits(logits), params, out }.run(backend)
}

/// Draws a token per row of `probs`: top-k, top-p, min-p, draw. Without filters it draws from `probs` as they are.
///
/// As [`sample`], but the temperature must be 1, because it applies to logits.
///
/// # Errors
/// As for [`sample`], and when a temperature is not 1.
#[doc(alias("top_k_sampling_from_probs", "top_p_sampling_from_probs", "min_p_sampling_from_probs"))]
pub fn sampling_from_probs<B: Backend + ?Sized>(
    backend: &B,
    probs: View<'_>,
    params: &[SamplingParams],
    out: &mut [Sampled],
) -> Result<()> {
    TokenSampling { scores: Scores::Probs(probs), params, out }.run(backend)
}

/// The arguments of [`sample`] and [`sampling_from_probs`].
#[derive(Debug)]
pub struct TokenSampling<'a> {
    /// `[rows, vocab]`
    pub scores: Scores<'a>,
    /// `[rows]`
    pub params: &'a [SamplingParams],
    /// `[rows]`
    pub out: &'a mut [Sampled],
}

impl<'a> Operator<'a> for TokenSampling<'a> {
    fn name(&self) -> &'static str {
        self.scores.operator()
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { scores, params, out }) = (self.name(), self);
        let rows = check_matrix(operator, scores.argument(), &scores.view())?;
        check_params(operator, rows, scores, params)?;
        crate::ensure!(out.len() == rows, operator, "out has {} elements, expected rows = {rows}", out.len());
        Ok(())
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit(self.scores.argument(), TensorRef::Input(self.scores.view_mut()))
    }

    dispatch!(sample);
}

/// Writes the distribution from which [`sample`] or [`sampling_from_probs`] draws: each row sums to 1; dropped tokens
/// are 0.
///
/// `scores`, `out`: `[rows, vocab]`, each f32, f16 or bf16; `params`: `[rows]`, whose seed and offset are ignored. A
/// row that cannot be sampled becomes NaN.
///
/// # Errors
/// As for [`sample`] and [`sampling_from_probs`], and when `out` has another shape.
pub fn distribution<B: Backend + ?Sized>(
    backend: &B,
    scores: Scores<'_>,
    params: &[SamplingParams],
    out: ViewMut<'_>,
) -> Result<()> {
    SamplingDistribution { scores, params, out }.run(backend)
}

/// The arguments of [`distribution`].
#[derive(Debug)]
pub struct SamplingDistribution<'a> {
    /// `[rows, vocab]`
    pub scores: Scores<'a>,
    /// `[rows]`
    pub params: &'a [SamplingParams],
    /// `[rows, vocab]`
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for SamplingDistribution<'a> {
    fn name(&self) -> &'static str {
        "sampling.distribution"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { scores, params, out }) = (self.name(), self);
        let rows = check_distribution(operator, scores, out)?;
        check_params(operator, rows, scores, params)
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit(self.scores.argument(), TensorRef::Input(self.scores.view_mut()))?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(distribution);
}

/// Checks the tensors of a distribution and returns the number of rows.
pub(super) fn check_distribution(
    operator: &'static str,
    scores: &Scores<'_>,
    out: &ViewMut<'_>,
) -> Result<usize> {
    let rows = check_matrix(operator, scores.argument(), &scores.view())?;
    check_shape(operator, "out", out.shape(), scores.view().shape(), "[rows, vocab]")?;
    check_computable(operator, "out", out.dtype())?;
    check_rows(operator, "out", (out.shape(), out.strides()))?;
    Ok(rows)
}

/// Rejects parameters that are out of range or not one per row, and temperatures for probabilities.
pub(super) fn check_params(
    operator: &'static str,
    rows: usize,
    scores: &Scores<'_>,
    params: &[SamplingParams],
) -> Result<()> {
    check_per_row(operator, "params", rows, params, |row| {
        row.problem().or_else(|| scores.temperature_problem(row.temperature))
    })
}
