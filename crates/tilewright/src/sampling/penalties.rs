//! Repetition, presence and frequency penalties.
//!
//! For a token that occurs `n` times in the output, in this order, as in vLLM (`apply_penalties`):
//!
//! ```text
//! in prompt or output    logit = logit / repetition if logit > 0, else logit * repetition
//! in the output          logit = logit - frequency * n - presence
//! ```
//!
//! The first line is Hugging Face's `RepetitionPenaltyLogitsProcessor` (Keskar et al., "CTRL", 2019), the second is
//! OpenAI's.

use super::{LogitsEdit, LogitsEditing};
use crate::{Backend, Operator, Result, ViewMut};

/// The penalties of one row. The default has no effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// Divides positive and multiplies other logits of tokens in prompt or output. Finite, above 0; 1 changes nothing.
    pub repetition: f32,
    /// Subtracted once for tokens of the output. Finite.
    pub presence: f32,
    /// Subtracted for each occurrence in the output. Finite.
    pub frequency: f32,
}

impl Default for Penalties {
    fn default() -> Self {
        Self { repetition: 1.0, presence: 0.0, frequency: 0.0 }
    }
}

/// The prompt and output tokens of each row's request.
#[derive(Debug, Clone, Copy)]
pub enum History<'a> {
    /// The tokens themselves, ragged: one list per row.
    Tokens {
        /// The tokens of each prompt.
        prompt: &'a [&'a [u32]],
        /// The tokens of each output.
        output: &'a [&'a [u32]],
    },
    /// Token counts, `[rows, vocab]` each, row-major.
    Counts {
        /// Whether a token occurs in the prompt.
        prompt: &'a [bool],
        /// The number of occurrences of a token in the output.
        output: &'a [u32],
    },
}

/// Applies each row's `penalties` for the tokens of its `history` to its logits, in place.
///
/// `logits`: `[rows, vocab]` of any dtype with stride 1 along the last axis; `penalties`: `[rows]`. Computed in f32 in
/// the order of the formulas above and rounded once; tokens that do not occur keep their bits. An excluded token
/// (-inf) stays excluded.
///
/// # Errors
/// When there is not one element per row, a penalty is out of range, a token is not below `vocab`, counts are not
/// `[rows, vocab]`, or the last axis is not dense; then nothing is changed.
#[doc(alias("repetition_penalty", "presence_penalty", "frequency_penalty"))]
pub fn apply_penalties<B: Backend + ?Sized>(
    backend: &B,
    logits: ViewMut<'_>,
    penalties: &[Penalties],
    history: History<'_>,
) -> Result<()> {
    LogitsEditing { edit: LogitsEdit::Penalties(penalties, history), logits }.run(backend)
}

pub(super) fn problem(
    penalties: &[Penalties],
    history: &History<'_>,
    rows: usize,
    vocab: usize,
) -> Option<String> {
    if penalties.len() != rows {
        return Some(format!("penalties has {} elements, expected rows = {rows}", penalties.len()));
    }
    let bad =
        penalties.iter().enumerate().find_map(|(row, p)| Some(format!("request {row}: {}", p.problem()?)));
    bad.or_else(|| match history {
        History::Tokens { prompt, output } => list_problem("prompt", prompt, rows, vocab)
            .or_else(|| list_problem("output", output, rows, vocab)),
        History::Counts { prompt, output } => count_problem("prompt", prompt.len(), rows, vocab)
            .or_else(|| count_problem("output", output.len(), rows, vocab)),
    })
}

impl Penalties {
    fn problem(&self) -> Option<String> {
        let Self { repetition, presence, frequency } = self;
        if !(repetition.is_finite() && *repetition > 0.0) {
            Some(format!("repetition = {repetition} is not a finite number > 0"))
        } else if !presence.is_finite() {
            Some(format!("presence = {presence} is not finite"))
        } else if !frequency.is_finite() {
            Some(format!("frequency = {frequency} is not finite"))
        } else {
            None
        }
    }
}

fn list_problem(argument: &str, lists: &[&[u32]], rows: usize, vocab: usize) -> Option<String> {
    if lists.len() != rows {
        return Some(format!("{argument} has {} lists, expected rows = {rows}", lists.len()));
    }
    lists.iter().enumerate().find_map(|(row, tokens)| {
        let (i, token) = tokens.iter().enumerate().find(|&(_, &token)| token as usize >= vocab)?;
        Some(format!("request {row}: {argument}[{i}] = {token} is not below vocab = {vocab}"))
    })
}

fn count_problem(argument: &str, len: usize, rows: usize, vocab: usize) -> Option<String> {
    (len != rows * vocab)
        .then(|| format!("{argument} has {len} elements, expected rows x vocab = {rows} x {vocab}"))
}
