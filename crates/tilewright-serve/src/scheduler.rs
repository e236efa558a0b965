//! Continuous batching with chunked prefill and preemption.
//!
//! ```text
//! each step, within a token budget:
//!     running requests, oldest first:  schedule the next chunk (one token when decoding)
//!         no page left?  preempt the newest: free its pages and put it at the front of the queue
//!     waiting requests, oldest first:  admit while all their pages are available
//! ```
//!
//! Progress: the pool can hold every submitted request alone, so the oldest request always advances.

use crate::{
    EngineOptions,
    pages::PageId,
    pool::{ForkPages, PagePool, RequestPages},
    request::{Fork, Request},
};
use std::{collections::VecDeque, ops::Range};
use tilewright::{Result, ensure};

/// The tokens of one request in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Index into [`Scheduler::running`].
    pub(crate) request: usize,
    /// Range of the request's tokens to compute.
    pub(crate) tokens: Range<usize>,
}

/// Counters of reuse and preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SchedulerStats {
    /// Tokens with KV from the tree at admission, or from the leader at a fork.
    pub(crate) reused_tokens: usize,
    /// Pages reused instead of filled.
    pub(crate) reused_pages: usize,
    /// Peak number of used pages.
    pub(crate) peak_pages: usize,
    /// Number of preemptions.
    pub(crate) preemptions: usize,
}

/// The queue, the running requests and their pages.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) running: Vec<Request>,
    waiting: VecDeque<Request>,
    pool: PagePool,
    options: EngineOptions,
    pub(crate) stats: SchedulerStats,
}

impl Scheduler {
    pub(crate) fn new(pool: PagePool, options: EngineOptions) -> Self {
        Self {
            running: Vec::new(),
            waiting: VecDeque::new(),
            pool,
            options,
            stats: SchedulerStats::default(),
        }
    }

    pub(crate) fn pool(&self) -> &PagePool {
        &self.pool
    }

    pub(crate) fn submit(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Chooses the chunks of a step and allocates their pages.
    pub(crate) fn schedule(&mut self) -> Result<Vec<Chunk>> {
        let mut chunks = Vec::new();
        let mut budget = self.options.max_step_tokens;
        let preemptions = self.stats.preemptions;
        let mut at = 0;
        while at < self.running.len() && budget > 0 {
            let request = &self.running[at];
            let tokens = request.computed..request.computed + request.uncomputed().min(budget);
            if self.reserve_pages(at, tokens.end)? {
                budget -= tokens.len();
                chunks.push(Chunk { request: at, tokens });
                at += 1;
            }
        }
        // no admission after a preemption: the freed pages are for older requests
        while budget > 0 && self.stats.preemptions == preemptions && self.admit()? {
            let request = self.running.len() - 1;
            let start = self.running[request].computed;
            let tokens = start..start + self.running[request].uncomputed().min(budget);
            if !self.reserve_pages(request, tokens.end)? {
                break;
            }
            budget -= tokens.len();
            chunks.push(Chunk { request, tokens });
        }
        self.stats.peak_pages = self.stats.peak_pages.max(self.pool.used());
        Ok(chunks)
    }

    /// Allocates pages for the first `tokens` tokens of `running[at]`, preempting newer requests if needed; `false`
    /// when `running[at]` itself was preempted.
    fn reserve_pages(&mut self, at: usize, tokens: usize) -> Result<bool> {
        while !self.pool.grow(&mut self.running[at].pages, tokens)? {
            self.preempt_newest()?;
            if at == self.running.len() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn preempt_newest(&mut self) -> Result<()> {
        let Some(mut request) = self.running.pop() else { return Ok(()) };
        let pages = std::mem::take(&mut request.pages);
        self.pool.release(pages, &request.tokens[..request.computed])?;
        request.computed = 0;
        self.waiting.push_front(request);
        self.stats.preemptions += 1;
        Ok(())
    }

    /// Moves the first waiting request to the running ones, with its cached prefix, if all its pages are
    /// available.
    fn admit(&mut self) -> Result<bool> {
        if self.running.len() >= self.options.max_requests {
            return Ok(false);
        }
        let Some(mut request) = self.waiting.pop_front() else { return Ok(false) };
        // at least one token must be computed to produce logits
        let reusable = &request.tokens[..request.tokens.len() - 1];
        let pages = self.pool.acquire(reusable)?;
        let needed = self.pool.pages_for(request.tokens.len() + 1) - pages.ids.len();
        if needed > self.pool.available() && !self.running.is_empty() {
            self.pool.release(pages, &[])?;
            self.waiting.push_front(request);
            return Ok(false);
        }
        request.computed = self.count_reuse(&pages, request.tokens.len());
        request.pages = pages;
        self.running.push(request);
        Ok(true)
    }

    /// Counts the reused prefix of an admitted request and returns its tokens.
    fn count_reuse(&mut self, pages: &RequestPages, tokens: usize) -> usize {
        let computed = self.pool.tokens_in(pages.shared()).min(tokens);
        self.stats.reused_tokens += computed;
        self.stats.reused_pages += pages.shared();
        computed
    }

    /// Marks a chunk as computed and publishes the pages of a fully computed request.
    pub(crate) fn advance(&mut self, chunk: &Chunk) -> Result<()> {
        let request = &mut self.running[chunk.request];
        request.computed = chunk.tokens.end;
        if request.uncomputed() == 0 {
            self.pool.publish(&mut request.pages, &request.tokens)?;
        }
        Ok(())
    }

    /// Starts the forks of `running[at]`, whose prompt was just computed: each shares its pages and samples from the
    /// same logits. Returns the pages to copy. Forks without capacity wait as separate requests.
    pub(crate) fn start_forks(&mut self, at: usize) -> Result<Vec<(PageId, PageId)>> {
        let forks = std::mem::take(&mut self.running[at].forks);
        let mut copies = Vec::new();
        for Fork { id, options } in forks {
            let leader = &self.running[at];
            let mut fork = Request::new(id, leader.tokens.clone(), options);
            let admissible = self.running.len() < self.options.max_requests;
            match if admissible { self.pool.fork(&leader.pages)? } else { None } {
                Some(ForkPages { pages, copies: page_copies }) => {
                    copies.extend(page_copies);
                    fork.computed = fork.tokens.len();
                    self.stats.reused_tokens += fork.computed;
                    self.stats.reused_pages += pages.shared();
                    fork.pages = pages;
                    self.running.push(fork);
                }
                None => self.waiting.push_back(fork),
            }
        }
        self.stats.peak_pages = self.stats.peak_pages.max(self.pool.used());
        Ok(copies)
    }

    /// Removes `running[at]`; its full pages stay in the tree until eviction.
    pub(crate) fn finish(&mut self, at: usize) -> Result<Request> {
        let mut request = self.running.remove(at);
        let pages = std::mem::take(&mut request.pages);
        self.pool.release(pages, &request.tokens[..request.computed])?;
        Ok(request)
    }

    /// Checks that every page has one owner, and that each request's pages hold its computed tokens.
    pub(crate) fn check_integrity(&self) -> Result<()> {
        for request in self.running.iter().chain(&self.waiting) {
            let (id, computed, tokens) = (request.id, request.computed, request.tokens.len());
            let capacity = self.pool.tokens_in(request.pages.ids.len());
            ensure!(
                computed <= capacity.min(tokens),
                "scheduler.check_integrity",
                "{id}: computed = {computed} of {tokens} tokens, its pages have room for {capacity}"
            );
        }
        self.pool.check_integrity(self.running.iter().map(|request| &request.pages))
    }
}
