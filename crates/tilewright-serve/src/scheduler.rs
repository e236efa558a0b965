//! Continuous batching: which requests run in a step, and which of their tokens.
//!
//! ```text
//! each step, within a budget of tokens:
//!     running requests, the oldest first:  their next chunk (one token when decoding)
//!         no page left?  preempt the newest: its pages go back, it waits at the front
//!     waiting requests, the oldest first:  admitted while all their pages could be had
//! ```
//!
//! The oldest request can always have every page that [`Scheduler::submit`] let it ask for, so some request always
//! advances.

use crate::{
    pages::PageId,
    pool::{Forked, Holding, Pool},
    request::{Fork, Request},
};
use std::{collections::VecDeque, ops::Range};
use tilewright::{Result, ensure};

/// The bounds of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Tokens of one step.
    pub(crate) max_step_tokens: usize,
    /// Requests of one step.
    pub(crate) max_requests: usize,
}

/// A request's share of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Index into [`Scheduler::running`].
    pub(crate) request: usize,
    /// Which of its tokens are computed.
    pub(crate) tokens: Range<usize>,
}

/// What was reused and given up so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Tally {
    /// Tokens whose KV was found in the tree when a request was admitted, or taken over from another at a fork.
    pub(crate) reused_tokens: usize,
    /// Pages that requests read instead of filling them.
    pub(crate) reused_pages: usize,
    /// The most pages in use at once.
    pub(crate) peak_pages: usize,
    /// Requests that had to give their pages back.
    pub(crate) preemptions: usize,
}

/// The queue, the running requests and their pages.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) running: Vec<Request>,
    waiting: VecDeque<Request>,
    pool: Pool,
    limits: Limits,
    pub(crate) tally: Tally,
}

impl Scheduler {
    pub(crate) fn new(pool: Pool, limits: Limits) -> Self {
        Self { running: Vec::new(), waiting: VecDeque::new(), pool, limits, tally: Tally::default() }
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn submit(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Chooses the chunks of a step; their pages are there when it returns.
    pub(crate) fn schedule(&mut self) -> Result<Vec<Chunk>> {
        let mut chunks = Vec::new();
        let mut budget = self.limits.max_step_tokens;
        let preemptions = self.tally.preemptions;
        let mut at = 0;
        while at < self.running.len() && budget > 0 {
            let request = &self.running[at];
            let tokens = request.computed..request.computed + request.missing().min(budget);
            if self.make_room(at, tokens.end)? {
                budget -= tokens.len();
                chunks.push(Chunk { request: at, tokens });
                at += 1;
            }
        }
        // pages that were just taken from a request are not for another that comes later
        while budget > 0 && self.tally.preemptions == preemptions && self.admit()? {
            let request = self.running.len() - 1;
            let start = self.running[request].computed;
            let tokens = start..start + self.running[request].missing().min(budget);
            if !self.make_room(request, tokens.end)? {
                break;
            }
            budget -= tokens.len();
            chunks.push(Chunk { request, tokens });
        }
        self.tally.peak_pages = self.tally.peak_pages.max(self.pool.used());
        Ok(chunks)
    }

    /// Pages for the first `tokens` tokens of `running[at]`, if need be from newer requests; `false` when it had
    /// to be preempted itself.
    fn make_room(&mut self, at: usize, tokens: usize) -> Result<bool> {
        while !self.pool.grow(&mut self.running[at].holding, tokens)? {
            self.preempt_newest()?;
            if at == self.running.len() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn preempt_newest(&mut self) -> Result<()> {
        let Some(mut request) = self.running.pop() else { return Ok(()) };
        let holding = std::mem::take(&mut request.holding);
        self.pool.release(holding, &request.tokens[..request.computed])?;
        request.computed = 0;
        self.waiting.push_front(request);
        self.tally.preemptions += 1;
        Ok(())
    }

    /// Moves the first waiting request to the running ones, with what the tree has of it, if all its pages could
    /// be had now.
    fn admit(&mut self) -> Result<bool> {
        if self.running.len() >= self.limits.max_requests {
            return Ok(false);
        }
        let Some(mut request) = self.waiting.pop_front() else { return Ok(false) };
        // at least one token must be computed, to have logits
        let known = &request.tokens[..request.tokens.len() - 1];
        let holding = self.pool.start(known)?;
        let needed = self.pool.pages_for(request.tokens.len() + 1) - holding.pages.len();
        if needed > self.pool.available() && !self.running.is_empty() {
            self.pool.release(holding, &[])?;
            self.waiting.push_front(request);
            return Ok(false);
        }
        request.computed = self.reuse(&holding, request.tokens.len());
        request.holding = holding;
        self.running.push(request);
        Ok(true)
    }

    /// Counts what a holding that was just started spares, and returns it in tokens.
    fn reuse(&mut self, holding: &Holding, tokens: usize) -> usize {
        let computed = self.pool.tokens_in(holding.shared()).min(tokens);
        self.tally.reused_tokens += computed;
        self.tally.reused_pages += holding.shared();
        computed
    }

    /// Notes that a chunk was computed; a computed prompt becomes readable for others.
    pub(crate) fn advance(&mut self, chunk: &Chunk) -> Result<()> {
        let request = &mut self.running[chunk.request];
        request.computed = chunk.tokens.end;
        if request.missing() == 0 {
            self.pool.publish(&mut request.holding, &request.tokens)?;
        }
        Ok(())
    }

    /// Starts the forks of `running[at]`, whose prompt was just computed: each takes over its pages and goes on
    /// from the same logits. Returns the pages to copy. Forks that find no place wait as requests of their own.
    pub(crate) fn start_forks(&mut self, at: usize) -> Result<Vec<(PageId, PageId)>> {
        let forks = std::mem::take(&mut self.running[at].forks);
        let mut copies = Vec::new();
        for Fork { id, options } in forks {
            let leader = &self.running[at];
            let mut fork = Request::new(id, leader.tokens.clone(), options);
            let room = self.running.len() < self.limits.max_requests;
            match if room { self.pool.fork(&leader.holding)? } else { None } {
                Some(Forked { holding, copies: pages }) => {
                    copies.extend(pages);
                    fork.computed = fork.tokens.len();
                    self.tally.reused_tokens += fork.computed;
                    self.tally.reused_pages += holding.shared();
                    fork.holding = holding;
                    self.running.push(fork);
                }
                None => self.waiting.push_back(fork),
            }
        }
        self.tally.peak_pages = self.tally.peak_pages.max(self.pool.used());
        Ok(copies)
    }

    /// Takes `running[at]` out; its whole pages stay in the tree until they are evicted.
    pub(crate) fn finish(&mut self, at: usize) -> Result<Request> {
        let mut request = self.running.remove(at);
        let holding = std::mem::take(&mut request.holding);
        self.pool.release(holding, &request.tokens[..request.computed])?;
        Ok(request)
    }

    /// Checks that every page has one owner, and that what counts as computed is in pages.
    pub(crate) fn check_integrity(&self) -> Result<()> {
        for request in self.running.iter().chain(&self.waiting) {
            let (id, computed, tokens) = (request.id, request.computed, request.tokens.len());
            let room = self.pool.tokens_in(request.holding.pages.len());
            ensure!(
                computed <= room.min(tokens),
                "scheduler.check_integrity",
                "{id}: computed = {computed} of {tokens} tokens, its pages have room for {room}"
            );
        }
        self.pool.check_integrity(self.running.iter().map(|request| &request.holding))
    }
}
