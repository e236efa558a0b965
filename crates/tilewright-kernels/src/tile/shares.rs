//! How tokens are dealt to threads: each has the same number of threads, and nobody waits for anybody.
//!
//! A CTA has as many whole tokens as leave the fewest of its threads idle; a token of more than [`MOST`] threads has several CTAs,
//! in the grid's second dimension. So a thread finds its token by 32-bit arithmetic with constants.

use tilewright_ptx::build::{Builder, Value};

/// Threads of a CTA: from `LEAST` on, unless more tokens would leave more of them idle, up to `MOST`.
const LEAST: u32 = 128;
const MOST: u32 = 256;

/// Tokens of so many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    threads: u32,
    tokens: u32,
}

impl Shares {
    /// `threads` threads for each token.
    pub fn new(threads: u32) -> Self {
        let threads = threads.max(1);
        let idle = |tokens: u32| {
            let all = (tokens * threads).next_multiple_of(32).max(LEAST);
            (all - tokens * threads) * 1000 / all
        };
        let tokens = (1..=MOST / threads).min_by_key(|&tokens| idle(tokens)).unwrap_or(1);
        Self { threads, tokens }
    }

    /// Threads of a CTA.
    pub fn cta_threads(self) -> u32 {
        (self.tokens * self.threads).min(MOST).next_multiple_of(32)
    }

    /// The first two dimensions of the grid for `tokens` tokens.
    pub fn ctas(self, tokens: u32) -> [u32; 2] {
        [tokens.div_ceil(self.tokens), self.threads.div_ceil(MOST)]
    }

    /// The token of this thread, its place among those of the token, and whether there is such a token of `tokens`, and such a
    /// place.
    #[track_caller]
    pub fn place<'k>(
        self,
        k: &'k Builder,
        tokens: Value<'k, u32>,
    ) -> (Value<'k, u32>, Value<'k, u32>, Value<'k, bool>) {
        let (token, thread) = match self.tokens {
            1 => (k.cta(), k.cta_y() * MOST + k.thread()),
            count => (k.cta() * count + k.thread() / self.threads, k.thread() % self.threads),
        };
        let inside = match self.tokens {
            1 => thread.lt(self.threads),
            count => k.thread().lt(count * self.threads),
        };
        (token.named("token"), thread.named("thread_of_token"), inside & token.lt(tokens))
    }
}
