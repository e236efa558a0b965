//! How tokens are dealt to threads: each has the same number of threads, and nobody waits for anybody.
//!
//! A CTA has as many whole tokens as fit; a token of more than [`Shares::THREADS`] threads has several CTAs, in the grid's second
//! dimension. How many threads a token has is known when a kernel is launched: a thread finds its token by 32-bit arithmetic.

use tilewright_ptx::build::{Builder, Value};

/// Tokens of so many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenPartition {
    threads: u32,
}

impl TokenPartition {
    /// Threads of a CTA.
    pub const THREADS: u32 = 256;

    /// `threads` threads for each token.
    pub fn new(threads: u32) -> Self {
        Self { threads: threads.max(1) }
    }

    /// The first two dimensions of the grid for `tokens` tokens.
    pub fn ctas(self, tokens: u32) -> [u32; 2] {
        let tokens_per_cta = (Self::THREADS / self.threads).max(1);
        [tokens.div_ceil(tokens_per_cta), self.threads.div_ceil(Self::THREADS)]
    }

    /// The token of this thread, its place among the `threads` of the token, and whether there is such a token of `tokens`, and
    /// such a place.
    #[track_caller]
    pub fn locate<'k>(
        k: &'k Builder,
        (tokens, threads): (Value<'k, u32>, Value<'k, u32>),
    ) -> (Value<'k, u32>, Value<'k, u32>, Value<'k, bool>) {
        let tokens_per_cta = (k.constant(Self::THREADS) / threads).max(1);
        let shares_cta = tokens_per_cta.gt(1);
        let in_cta = shares_cta.select(k.thread() / threads, k.constant(0));
        let token = (k.cta() * tokens_per_cta + in_cta).named("token");
        let thread = (k.cta_y() * Self::THREADS + k.thread() - in_cta * threads).named("thread_of_token");
        (token, thread, in_cta.lt(tokens_per_cta) & thread.lt(threads) & token.lt(tokens))
    }
}
