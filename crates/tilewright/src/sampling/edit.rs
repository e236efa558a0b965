//! In-place edits of logits: grammar bitmask, logit bias, and the penalties of `penalties.rs`.
//!
//! `logits` is `[rows, vocab]` of any dtype with stride 1 along the last axis. Rows are edited independently.

use super::{History, Penalties, filter::check_matrix};
use crate::{Backend, Error, Indices, Operator, Result, TensorRef, TensorVisitor, ViewMut, dispatch};

/// An edit with its arguments for all rows.
#[derive(Debug, Clone, Copy)]
pub enum LogitsEdit<'a> {
    /// See [`apply_token_bitmask`].
    Bitmask(TokenBitmask<'a>),
    /// See [`super::apply_penalties`].
    Penalties(&'a [Penalties], History<'a>),
    /// See [`apply_logit_bias`].
    Bias(&'a [&'a [Bias]]),
}

/// The tokens that a grammar allows, in the layout of xgrammar.
#[derive(Debug, Clone, Copy)]
pub struct TokenBitmask<'a> {
    /// `[rows, ceil(vocab / 32)]`, row-major: token `t` is allowed if bit `t % 32` (from the least significant) of
    /// word `t / 32` is 1. Bits beyond the vocabulary are ignored.
    pub words: Indices<'a>,
    /// The masked rows, each with its own row of `words`; `None` for all. A row listed twice is masked once.
    pub rows: Option<&'a [u32]>,
}

/// A bias for one token's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bias {
    /// The token.
    pub token: u32,
    /// Added to its logit. Finite, or -inf, which excludes the token regardless of its logit.
    pub bias: f32,
}

/// Sets the logits of tokens that `bitmask` does not allow to -inf, even where they are NaN.
///
/// A row without allowed tokens is reported when it is sampled: `every logit is -inf`.
///
/// # Errors
/// When the last axis is not dense, the bitmask does not have `rows x ceil(vocab / 32)` words, or a row is out of range.
#[doc(alias = "apply_token_bitmask_inplace")]
pub fn apply_token_bitmask<B: Backend + ?Sized>(
    backend: &B,
    logits: ViewMut<'_>,
    bitmask: TokenBitmask<'_>,
) -> Result<()> {
    LogitsEditing { edit: LogitsEdit::Bitmask(bitmask), logits }.run(backend)
}

/// Adds `bias[row]`, a list of tokens and numbers, to the logits of each row (OpenAI's `logit_bias`).
///
/// Sums are computed in f32; a token listed twice receives both biases. A bias of -inf suppresses a token, as an engine does
/// with end tokens before `min_tokens`.
///
/// # Errors
/// When there is not one list per row, a token is not below `vocab`, a bias is NaN or +inf, or the last axis is not
/// dense; then nothing is changed.
pub fn apply_logit_bias<B: Backend + ?Sized>(
    backend: &B,
    logits: ViewMut<'_>,
    bias: &[&[Bias]],
) -> Result<()> {
    LogitsEditing { edit: LogitsEdit::Bias(bias), logits }.run(backend)
}

/// The arguments of an edit.
#[derive(Debug)]
pub struct LogitsEditing<'a> {
    /// The edit.
    pub edit: LogitsEdit<'a>,
    /// `[rows, vocab]`
    pub logits: ViewMut<'a>,
}

impl<'a> Operator<'a> for LogitsEditing<'a> {
    fn name(&self) -> &'static str {
        match self.edit {
            LogitsEdit::Bitmask(_) => "sampling.apply_token_bitmask",
            LogitsEdit::Penalties(..) => "sampling.apply_penalties",
            LogitsEdit::Bias(_) => "sampling.apply_logit_bias",
        }
    }

    fn check(&self) -> Result<()> {
        let rows = check_matrix(self.name(), "logits", &self.logits.as_view())?;
        let problem = self.edit.problem(rows, self.logits.shape()[1]);
        problem.map_or(Ok(()), |problem| Err(Error::new(self.name(), problem)))
    }

    fn views(&mut self, visit: &mut TensorVisitor<'_, 'a>) -> Result<()> {
        if let LogitsEdit::Bitmask(bitmask) = &mut self.edit {
            visit("bitmask", TensorRef::Indices(&mut bitmask.words))?;
        }
        visit("logits", TensorRef::Output(&mut self.logits))
    }

    dispatch!(edit_logits);
}

impl LogitsEdit<'_> {
    /// The first invalid argument, as an error text.
    pub(super) fn problem(&self, rows: usize, vocab: usize) -> Option<String> {
        match self {
            Self::Bitmask(bitmask) => bitmask.problem(rows, vocab),
            Self::Penalties(penalties, history) => super::penalties::problem(penalties, history, rows, vocab),
            Self::Bias(bias) => bias_problem(bias, rows, vocab),
        }
    }
}

impl TokenBitmask<'_> {
    pub(crate) fn words_per_row(vocab: usize) -> usize {
        vocab.div_ceil(32)
    }

    fn problem(&self, rows: usize, vocab: usize) -> Option<String> {
        let words = Self::words_per_row(vocab);
        if self.words.len() != rows * words {
            return Some(format!(
                "bitmask has {} words, expected rows x ceil(vocab / 32) = {rows} x {words}",
                self.words.len()
            ));
        }
        let outside = self.rows?.iter().enumerate().find(|&(_, &row)| row as usize >= rows);
        outside.map(|(i, row)| format!("rows[{i}] = {row} is not below rows = {rows}"))
    }
}

fn bias_problem(bias: &[&[Bias]], rows: usize, vocab: usize) -> Option<String> {
    if bias.len() != rows {
        return Some(format!("bias has {} lists, expected rows = {rows}", bias.len()));
    }
    let problem = |entry: &Bias| {
        let Bias { token, bias } = entry;
        if *token as usize >= vocab {
            Some(format!("token {token} is not below vocab = {vocab}"))
        } else if bias.is_nan() || *bias == f32::INFINITY {
            Some(format!("bias {bias} of token {token} is not finite or -inf"))
        } else {
            None
        }
    };
    let mut problems = bias.iter().enumerate();
    problems.find_map(|(row, list)| Some(format!("request {row}: {}", list.iter().find_map(problem)?)))
}
