//! Log-probabilities and ranks of the chosen token and the most probable tokens.

use super::{
    SamplingParams, Scores,
    draw::check_params,
    filter::{check_matrix, check_per_row},
};
use crate::{Backend, Operator, Result, TensorRef, TensorVisitor, View, dispatch};

/// The logprobs requested for one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Choice {
    /// The token that was chosen.
    pub token: u32,
    /// The number of most probable tokens to list; at most `vocab`.
    pub top_n: u32,
}

/// A token with its natural-log probability and its rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// The natural logarithm of its probability; -inf for 0.
    pub logprob: f32,
    /// 1 for the most probable; ties by ascending token.
    pub rank: u32,
}

/// The logprobs of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// The chosen token.
    pub chosen: TokenLogprob,
    /// The `top_n` most probable tokens, by rank, including the chosen one if its rank is at most `top_n`.
    pub top: Vec<TokenLogprob>,
}

/// Log-probabilities under the softmax of each row of `logits`: of its chosen token and its `top_n` most probable tokens.
///
/// `logits`: `[rows, vocab]` f32, f16 or bf16 with stride 1 along the last axis; `choices`, `out`: `[rows]`. With `params`
/// (`[rows]`), the distribution is the one from which [`super::sample`] draws, after temperature and filters (vLLM's
/// `processed_logprobs`). Without, it is that of the unmodified logits (vLLM's `raw_logprobs`); call this before editing
/// them.
///
/// Unlike in vLLM, ties have distinct ranks: rank `r` is entry `r` of the list. A row with NaN or +inf, or of -inf only, has
/// an error in `out`.
///
/// # Errors
/// When there is not one element per row, a token is not below `vocab`, a `top_n` is above it, a parameter is out of
/// range, or the last axis is not dense.
pub fn logprobs<B: Backend + ?Sized>(
    backend: &B,
    logits: View<'_>,
    params: Option<&[SamplingParams]>,
    choices: &[Choice],
    out: &mut [Result<Logprobs>],
) -> Result<()> {
    let unmodified = vec![SamplingParams::default(); if params.is_none() { choices.len() } else { 0 }];
    LogprobQuery { logits, params: params.unwrap_or(&unmodified), choices, out }.run(backend)
}

/// The arguments of [`logprobs`].
#[derive(Debug)]
pub struct LogprobQuery<'a> {
    /// `[rows, vocab]`
    pub logits: View<'a>,
    /// `[rows]`; the default is that of the unmodified logits.
    pub params: &'a [SamplingParams],
    /// `[rows]`
    pub choices: &'a [Choice],
    /// `[rows]`
    pub out: &'a mut [Result<Logprobs>],
}

impl<'a> Operator<'a> for LogprobQuery<'a> {
    fn name(&self) -> &'static str {
        "sampling.logprobs"
    }

    fn check(&self) -> Result<()> {
        let (operator, Self { logits, params, choices, out }) = (self.name(), self);
        let rows = check_matrix(operator, "logits", logits)?;
        let vocab = logits.shape()[1];
        check_per_row(operator, "choices", rows, choices, |Choice { token, top_n }| {
            if token as usize >= vocab {
                Some(format!("token {token} is not below vocab = {vocab}"))
            } else {
                (top_n as usize > vocab).then(|| format!("top_n = {top_n} is above vocab = {vocab}"))
            }
        })?;
        crate::ensure!(out.len() == rows, operator, "out has {} elements, expected rows = {rows}", out.len());
        check_params(operator, rows, &Scores::Logits(*logits), params)
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        visit("logits", TensorRef::Input(&mut self.logits))
    }

    dispatch!(logprobs);
}
