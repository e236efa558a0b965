//! Token sampling with parameters and tokens in tensors, and the distribution that it draws from.
//!
//! A GPU reads the parameters and writes the tokens in stream order: the host copies nothing and waits for nothing, so a CUDA graph
//! can record the call. The arithmetic is that of [`sample`](super::sample): equal parameters draw equal tokens.

use super::{
    Scores, TensorParams,
    draw::check_distribution,
    filter::{check_matrix, check_pair},
};
use crate::{
    Dtype, Error, Indices, IndicesMut, Operator, Result, TensorRef, TensorVisitor, View, ViewMut,
    check_dtype, check_rows, check_shape, dispatch,
};

/// Draws a token per element of `tokens`, as [`sample`](super::sample) and
/// [`sampling_from_probs`](super::sampling_from_probs) do.
///
/// A row that cannot be sampled gives token 0 and, in `valid`, 0. Without `valid`, the token 0 of such a row cannot be told from a
/// drawn one.
#[derive(Debug)]
pub struct TensorSampling<'a> {
    /// `[rows, vocab]`
    pub scores: Scores<'a>,
    /// `[tokens]`: the row of each token; `None`: token `i` is drawn from row `i`. A number on a device that is not that of a row
    /// counts as a row that cannot be sampled.
    pub rows: Option<Indices<'a>>,
    /// The parameters of the tokens.
    pub params: TensorParams<'a>,
    /// `[tokens]`
    pub tokens: IndicesMut<'a>,
    /// `[tokens]` i8: 1 for a token that was drawn, otherwise 0.
    pub valid: Option<ViewMut<'a>>,
}

impl<'a> Operator<'a> for TensorSampling<'a> {
    fn name(&self) -> &'static str {
        self.scores.operator()
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { scores, rows, params, tokens, valid }) = (self.name(), self);
        let num_rows = check_matrix(operator, scores.argument(), &scores.view())?;
        let vocab = scores.view().shape()[1];
        crate::ensure!(vocab <= i32::MAX as usize, operator, "vocab = {vocab} does not fit in an i32");
        let tokens = tokens.as_indices().len();
        let (expected, len) = rows.map_or(("rows", num_rows), |rows| ("the row numbers", rows.len()));
        crate::ensure!(tokens == len, operator, "tokens has {tokens} elements, expected {expected} = {len}");
        crate::ensure!(num_rows > 0 || tokens == 0, operator, "{} has no rows", scores.argument());
        let host_rows = rows.and_then(|rows| rows.host()).unwrap_or_default();
        let outside = |row: i32| usize::try_from(row).map_or(true, |row| row >= num_rows);
        if let Some(at) = host_rows.iter().position(|&row| outside(row)) {
            let text = format!("rows[{at}] = {} is not in 0..{num_rows}", host_rows[at]);
            return Err(Error::new(operator, text));
        }
        params.check(operator, scores, tokens)?;
        let Some(valid) = valid else { return Ok(()) };
        check_dtype(operator, "valid", valid.dtype(), Dtype::I8)?;
        check_shape(operator, "valid", valid.shape(), &[tokens], "[tokens]")?;
        check_rows(operator, "valid", (valid.shape(), valid.strides()))
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit(self.scores.argument(), TensorRef::Input(self.scores.view_mut()))?;
        if let Some(rows) = &mut self.rows {
            visit("rows", TensorRef::Indices(rows))?;
        }
        self.params.visit(visit)?;
        visit("tokens", TensorRef::IndicesOut(&mut self.tokens))?;
        self.valid.as_mut().map_or(Ok(()), |valid| visit("valid", TensorRef::Output(valid)))
    }

    dispatch!(sample_tensors);
}

/// Writes the distribution that [`TensorSampling`] draws from, as [`distribution`](super::distribution) does; seed and offset are
/// ignored. A row that cannot be sampled becomes NaN.
#[derive(Debug)]
pub struct TensorDistribution<'a> {
    /// `[rows, vocab]`
    pub scores: Scores<'a>,
    /// The parameters of the rows.
    pub params: TensorParams<'a>,
    /// `[rows, vocab]`
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for TensorDistribution<'a> {
    fn name(&self) -> &'static str {
        "sampling.distribution"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { scores, params, out }) = (self.name(), self);
        let rows = check_distribution(operator, scores, out)?;
        params.check(operator, scores, rows)
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit(self.scores.argument(), TensorRef::Input(self.scores.view_mut()))?;
        self.params.visit(visit)?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(distribution_tensors);
}

/// Keeps the largest logits of each row, as [`top_k_mask_logits`](super::top_k_mask_logits) does, with counts in a tensor.
#[derive(Debug)]
pub struct TensorTopKMask<'a> {
    /// `[rows, vocab]`
    pub logits: View<'a>,
    /// `[rows]`: at least 1; on a device, a count below 1 keeps all logits.
    pub top_k: Indices<'a>,
    /// `[rows, vocab]` of the dtype of `logits`.
    pub out: ViewMut<'a>,
}

impl<'a> Operator<'a> for TensorTopKMask<'a> {
    fn name(&self) -> &'static str {
        "sampling.top_k_mask_logits"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { logits, top_k, out }) = (self.name(), self);
        let rows = check_pair(operator, "logits", logits, out)?;
        crate::ensure!(
            top_k.len() == rows,
            operator,
            "top_k has {} elements, expected rows = {rows}",
            top_k.len()
        );
        let mut counts = top_k.host().unwrap_or_default().iter().enumerate();
        counts.find(|(_, count)| **count < 1).map_or(Ok(()), |(row, count)| {
            Err(Error::new(operator, format!("request {row}: top_k = {count} is not at least 1")))
        })
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("logits", TensorRef::Input(&mut self.logits))?;
        visit("top_k", TensorRef::Indices(&mut self.top_k))?;
        visit("out", TensorRef::Output(&mut self.out))
    }

    dispatch!(top_k_mask_tensors);
}
