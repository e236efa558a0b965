//! A request: its tokens, the number of tokens with KV in pages, and its sampling options.
//!
//! Invariant: `computed <= tokens.len()`. Uncomputed tokens are computed in chunks; a chunk of only the last token is a
//! decode step.

use crate::pool::RequestPages;
use std::fmt;
use tilewright::{
    Error, Result, ensure,
    sampling::{Bias, Penalties, SamplingParams},
};

/// The operator in errors about a submitted request.
pub(crate) const SUBMIT: &str = "engine.submit";

/// Identifies a request, unique within an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) usize);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// The options of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Maximum number of generated tokens, at least 1; the model's context may end a request earlier.
    pub max_tokens: usize,
    /// Sampling parameters; the engine sets `offset` to the number of generated tokens.
    pub sampling: SamplingParams,
    /// Tokens that end the request when sampled.
    pub stop: Vec<u32>,
    /// Changes of the logits before sampling.
    pub edits: RequestEdits,
}

/// Changes of a request's logits before each sample. The default changes nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestEdits {
    /// [`Penalties::repetition`] of tokens in prompt or continuation.
    pub repetition_penalty: f32,
    /// Tokens that are never sampled.
    pub suppress: Vec<u32>,
    /// Tokens that are not sampled first.
    pub begin_suppress: Vec<u32>,
}

impl Default for RequestEdits {
    fn default() -> Self {
        Self { repetition_penalty: 1.0, suppress: Vec::new(), begin_suppress: Vec::new() }
    }
}

impl RequestEdits {
    /// Checks every field for a vocabulary of `vocab` tokens.
    pub(crate) fn validate(&self, vocab: usize) -> Result<()> {
        let penalty = self.repetition_penalty;
        let positive = penalty.is_finite() && penalty > 0.0;
        ensure!(positive, SUBMIT, "repetition_penalty = {penalty} is not a finite number > 0");
        for (name, tokens) in [("suppress", &self.suppress), ("begin_suppress", &self.begin_suppress)] {
            let outside = tokens.iter().find(|&&token| token as usize >= vocab);
            let text =
                |token| Error::new(SUBMIT, format!("{name} has token {token}, which is not in 0..{vocab}"));
            outside.map_or(Ok(()), |token| Err(text(token)))?;
        }
        Ok(())
    }
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled.
    Stop,
    /// `max_tokens` was reached.
    Length,
    /// The model's context is full.
    Context,
    /// All pages of the pool are full, before the model's context.
    Pages,
    /// No token could be sampled from the logits, with the reason.
    Failed(String),
}

impl FinishReason {
    /// Its name in reports: `stop`, `length`, `context`, `pages` or `failed`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Context => "context",
            Self::Pages => "pages",
            Self::Failed(_) => "failed",
        }
    }
}

/// A change of a request in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A token was sampled.
    Token {
        /// The request.
        request: RequestId,
        /// The sampled token.
        token: u32,
    },
    /// The request ended; its pages are free or in the radix tree.
    Finished {
        /// The request.
        request: RequestId,
        /// The reason.
        reason: FinishReason,
    },
}

/// The maximum tokens of a request, prompt included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContextLimit {
    pub(crate) tokens: usize,
    /// Whether the pool holds fewer tokens than the model's context.
    pub(crate) by_pages: bool,
}

/// A request in the scheduler.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    /// The prompt, then the generated tokens.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Number of leading tokens with KV in pages.
    pub(crate) computed: usize,
    pub(crate) pages: RequestPages,
    pub(crate) options: GenerateOptions,
    /// Further continuations of the same prompt; they fork this request's pages once its prompt is computed.
    pub(crate) forks: Vec<Fork>,
}

/// A continuation that waits until another request has computed its prompt.
#[derive(Debug)]
pub(crate) struct Fork {
    pub(crate) id: RequestId,
    pub(crate) options: GenerateOptions,
}

impl Request {
    pub(crate) fn new(id: RequestId, prompt: Vec<u32>, options: GenerateOptions) -> Self {
        let prompt_len = prompt.len();
        Self {
            id,
            tokens: prompt,
            prompt_len,
            computed: 0,
            pages: RequestPages::default(),
            options,
            forks: Vec::new(),
        }
    }

    /// Number of tokens without KV.
    pub(crate) fn uncomputed(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Number of generated tokens.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// The sampling parameters of the next token.
    pub(crate) fn sampling(&self) -> SamplingParams {
        SamplingParams { offset: self.generated() as u64, ..self.options.sampling }
    }

    pub(crate) fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_len]
    }

    /// The generated tokens.
    pub(crate) fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Whether the next token's logits are edited.
    pub(crate) fn has_edits(&self) -> bool {
        self.options.edits != RequestEdits::default()
    }

    /// The penalties of the next token.
    pub(crate) fn penalties(&self) -> Penalties {
        Penalties { repetition: self.options.edits.repetition_penalty, ..Penalties::default() }
    }

    /// The tokens that the next sample excludes.
    pub(crate) fn excluded(&self) -> Vec<Bias> {
        let edits = &self.options.edits;
        let first: &[u32] = if self.generated() == 0 { &edits.begin_suppress } else { &[] };
        let tokens = edits.suppress.iter().chain(first);
        tokens.map(|&token| Bias { token, bias: f32::NEG_INFINITY }).collect()
    }

    /// Appends a sampled token; returns the reason if it ends the request.
    pub(crate) fn push(&mut self, token: u32, context: ContextLimit) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.options.stop.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.generated() >= self.options.max_tokens {
            Some(FinishReason::Length)
        } else if self.tokens.len() >= context.tokens {
            Some(if context.by_pages { FinishReason::Pages } else { FinishReason::Context })
        } else {
            None
        }
    }
}
