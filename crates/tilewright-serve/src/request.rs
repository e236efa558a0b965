//! A request: its tokens so far, how many of them have their KV in pages, and what it wants to be sampled with.
//!
//! Invariant: `computed <= tokens.len()`. What is missing is computed in chunks; when nothing but the last token
//! was missing, that is a decoding step, and no other case needs a name.

use crate::pool::Holding;
use std::fmt;
use tilewright::sampling::SamplingParams;

/// Names a request for as long as the engine lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) usize);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// What a request asks for beside its prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// The most tokens to generate, at least 1; the model's context may end a request earlier.
    pub max_tokens: usize,
    /// How tokens are drawn; its `offset` counts the request's own tokens and is set by the engine.
    pub sampling: SamplingParams,
    /// Tokens that end the request when they are drawn.
    pub stop: Vec<u32>,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// It drew one of its stop tokens.
    Stop,
    /// It reached `max_tokens`.
    MaxTokens,
    /// It filled the model's context.
    Context,
    /// No token could be drawn from its logits, for the reason given.
    Failed(String),
}

/// What happened to a request in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It drew a token.
    Token {
        /// Who.
        request: RequestId,
        /// What.
        token: u32,
    },
    /// It is done and its pages are free, or in the radix tree.
    Finished {
        /// Who.
        request: RequestId,
        /// Why.
        reason: FinishReason,
    },
}

/// A request in the scheduler.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    /// The prompt, then what was generated.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// How many of `tokens`, from the first, have their KV in pages.
    pub(crate) computed: usize,
    pub(crate) holding: Holding,
    pub(crate) options: GenerateOptions,
    /// Further continuations of the same prompt: they start from this request's pages when its prompt is computed.
    pub(crate) forks: Vec<Fork>,
}

/// A continuation that waits for its prompt to be computed by another request.
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
            holding: Holding::default(),
            options,
            forks: Vec::new(),
        }
    }

    /// How many tokens wait to be computed.
    pub(crate) fn missing(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// How many tokens it has drawn.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// The sampling parameters of its next token.
    pub(crate) fn sampling(&self) -> SamplingParams {
        SamplingParams { offset: self.generated() as u64, ..self.options.sampling }
    }

    /// Takes a drawn token, and says whether that was the last.
    pub(crate) fn push(&mut self, token: u32, context: usize) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.options.stop.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.generated() >= self.options.max_tokens {
            Some(FinishReason::MaxTokens)
        } else if self.tokens.len() >= context {
            Some(FinishReason::Context)
        } else {
            None
        }
    }
}
