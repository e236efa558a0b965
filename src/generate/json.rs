//! JSON output of `tilewright generate --json`: one object per continuation, one per line.

use super::print::{TextEnd, TextState};
use miette::{IntoDiagnostic, Result};
use serde::Serialize;
use std::time::Duration;

/// A continuation with its finish reason.
#[derive(Serialize)]
pub(super) struct TextRecord<'a> {
    /// Index of the prompt, from 0.
    index: usize,
    /// Index among the continuations of the prompt, from 0.
    continuation: usize,
    seed: u64,
    prompt: &'a str,
    /// Null if the prompt cannot be encoded.
    prompt_tokens: Option<usize>,
    /// The continuation, without the prompt.
    text: &'a str,
    /// The generated token ids.
    tokens: &'a [u32],
    /// `stop`, `length`, `context`, `pages`, `failed` or `interrupted`.
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    timings: Timings,
}

/// Seconds since the request was submitted.
#[derive(Serialize)]
struct Timings {
    /// Null without a token.
    first_token_seconds: Option<f64>,
    seconds: f64,
}

impl<'a> TextRecord<'a> {
    /// The record of `text`, which ended after `time`.
    pub(super) fn new(text: &'a TextState, end: &'a TextEnd, time: Duration) -> Self {
        Self {
            index: text.source.index,
            continuation: text.source.continuation,
            seed: text.source.seed,
            prompt: &text.source.prompt,
            prompt_tokens: text.source.prompt_tokens,
            text: &text.text,
            tokens: &text.tokens,
            finish_reason: end.name(),
            error: end.error(),
            timings: Timings {
                first_token_seconds: text.first_token.as_ref().map(Duration::as_secs_f64),
                seconds: time.as_secs_f64(),
            },
        }
    }

    pub(super) fn to_line(&self) -> Result<String> {
        Ok(serde_json::to_string(self).into_diagnostic()? + "\n")
    }
}
