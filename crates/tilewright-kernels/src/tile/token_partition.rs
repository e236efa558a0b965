//! Partition of tokens among threads: every token has the same number of threads, without synchronization.
//!
//! A CTA holds as many full tokens as fit. A token of more than [`TokenPartition::THREADS`] threads spans several
//! CTAs in the second grid dimension. Threads per token are a launch parameter: a thread computes its token in 32-bit
//! arithmetic.

use tilewright_ptx::{Builder, Value};

/// Partition with a fixed number of threads per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenPartition {
    threads: u32,
}

impl TokenPartition {
    /// Threads per CTA.
    pub(crate) const THREADS: u32 = 256;

    /// Assigns `threads` threads to each token.
    pub(crate) fn new(threads: u32) -> Self {
        Self { threads: threads.max(1) }
    }

    /// First two grid dimensions for `tokens` tokens.
    pub(crate) fn ctas(self, tokens: u32) -> [u32; 2] {
        let tokens_per_cta = (Self::THREADS / self.threads).max(1);
        [tokens.div_ceil(tokens_per_cta), self.threads.div_ceil(Self::THREADS)]
    }

    /// Token of this thread, its index among the `threads` of the token, and whether both are in range.
    #[track_caller]
    pub(crate) fn locate<'k>(
        k: &'k Builder,
        tokens: Value<'k, u32>,
        threads: Value<'k, u32>,
    ) -> (Value<'k, u32>, Value<'k, u32>, Value<'k, bool>) {
        let tokens_per_cta = (k.constant(Self::THREADS) / threads).max(1);
        let shares_cta = tokens_per_cta.gt(1);
        let in_cta = shares_cta.select(k.thread() / threads, k.constant(0));
        let token = (k.cta() * tokens_per_cta + in_cta).named("token");
        let thread = (k.cta_y() * Self::THREADS + k.thread() - in_cta * threads).named("thread_of_token");
        (token, thread, in_cta.lt(tokens_per_cta) & thread.lt(threads) & token.lt(tokens))
    }
}
