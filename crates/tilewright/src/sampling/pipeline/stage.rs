//! One stage of a pipeline: its name and the check of its arguments.

use super::{
    super::{
        Bias, History, LogitsEdit, Penalties, Stream, TokenBitmask, TopKTies,
        params::{min_p_problem, temperature_problem, top_k_problem, top_p_problem},
    },
    RowParam,
};

#[derive(Debug, Clone, Copy)]
pub(super) enum Stage<'a> {
    Bitmask(TokenBitmask<'a>),
    Penalties(RowParam<'a, Penalties>, History<'a>),
    LogitBias(&'a [&'a [Bias]]),
    Temperature(RowParam<'a, f32>),
    Softmax,
    TopK(RowParam<'a, u32>, TopKTies),
    TopP(RowParam<'a, f32>),
    MinP(RowParam<'a, f32>),
    Sample(&'a [Stream]),
}

impl Stage<'_> {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Bitmask(_) => "bitmask",
            Self::Penalties(..) => "penalties",
            Self::LogitBias(_) => "logit_bias",
            Self::Temperature(_) => "temperature",
            Self::Softmax => "softmax",
            Self::TopK(..) => "top_k",
            Self::TopP(_) => "top_p",
            Self::MinP(_) => "min_p",
            Self::Sample(_) => "sample",
        }
    }

    /// Whether it edits logits in place.
    pub(super) fn edits(&self) -> bool {
        matches!(self, Self::Bitmask(_) | Self::Penalties(..) | Self::LogitBias(_))
    }

    /// The first invalid argument, as an error text.
    pub(super) fn problem(&self, rows: usize, vocab: usize) -> Option<String> {
        match self {
            Self::Bitmask(_) | Self::LogitBias(_) => {
                self.edit(rows, |edit| edit.problem(rows, vocab)).flatten()
            }
            Self::Penalties(penalties, _) => penalties
                .problem(rows, |_| None)
                .or_else(|| self.edit(rows, |edit| edit.problem(rows, vocab)).flatten()),
            Self::Temperature(values) => values.problem(rows, temperature_problem),
            Self::Softmax => None,
            Self::TopK(values, _) => values.problem(rows, top_k_problem),
            Self::TopP(values) => values.problem(rows, top_p_problem),
            Self::MinP(values) => values.problem(rows, min_p_problem),
            Self::Sample(streams) => RowParam::Rows(streams).problem(rows, |_| None),
        }
    }

    /// Calls `with` with the edit, if the stage is one.
    pub(super) fn edit<T>(&self, rows: usize, with: impl FnOnce(LogitsEdit<'_>) -> T) -> Option<T> {
        match *self {
            Self::Bitmask(bitmask) => Some(with(LogitsEdit::Bitmask(bitmask))),
            Self::LogitBias(bias) => Some(with(LogitsEdit::Bias(bias))),
            Self::Penalties(param, history) => {
                let penalties: Vec<_> = (0..rows).map(|row| param.of(row)).collect();
                Some(with(LogitsEdit::Penalties(&penalties, history)))
            }
            _ => None,
        }
    }
}
