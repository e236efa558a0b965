//! A batch that changes from step to step, from a seed: arrivals, ends, growth and preemption.
//!
//! Invariant: each page is free or owned by one request.

use super::Shape;
use crate::generator::Generator;
use half::bf16;
use std::fmt;

/// The input of a step: new tokens of requests, and their page table.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) q: Vec<bf16>,
    pub(crate) k: Vec<bf16>,
    pub(crate) v: Vec<bf16>,
    pub(crate) batch_indices: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) indptr: Vec<i32>,
    pub(crate) indices: Vec<i32>,
    pub(crate) last_page_len: Vec<i32>,
}

#[derive(Debug)]
struct Request {
    len: usize,
    pages: Vec<i32>,
}

/// The running requests, and counts of events.
pub(crate) struct Traffic {
    shape: Shape,
    random: Generator,
    running: Vec<Request>,
    free: Vec<i32>,
    pub(crate) arrivals: usize,
    pub(crate) ends: usize,
    pub(crate) preemptions: usize,
    /// Tokens that started a new page.
    pub(crate) boundaries: usize,
}

impl Traffic {
    pub(crate) fn new(shape: Shape, seed: u64) -> Self {
        let free = (0..shape.num_pages as i32).rev().collect();
        let (arrivals, ends, preemptions, boundaries) = (0, 0, 0, 0);
        let (random, running) = (Generator::new(seed), Vec::new());
        Self { shape, random, running, free, arrivals, ends, preemptions, boundaries }
    }

    /// Changes the batch. Returns the prompts of new requests, and a step with one token per request.
    pub(crate) fn next(&mut self) -> (Vec<Step>, Step) {
        for at in (0..self.running.len()).rev() {
            let full = self.running[at].len + 1 >= self.shape.context;
            if full || self.running.len() > 1 && self.random.below(40) == 0 {
                let ended = self.running.swap_remove(at);
                self.free.extend(ended.pages);
                self.ends += 1;
            }
        }
        let mut prompts = Vec::new();
        let wanted = self.random.below(1 + self.shape.requests / 4).max(usize::from(self.running.is_empty()));
        for _ in 0..wanted.min(self.shape.requests - self.running.len()) {
            let len = 1 + self.random.below(self.shape.context / 3);
            if len.div_ceil(self.shape.page_size) > self.free.len() {
                break;
            }
            let pages = self.free.split_off(self.free.len() - len.div_ceil(self.shape.page_size));
            let request = Request { len, pages };
            prompts.push(self.step(&[&request], len));
            self.running.push(request);
            self.arrivals += 1;
        }
        self.grow();
        let running = std::mem::take(&mut self.running);
        let step = self.step(&running.iter().collect::<Vec<_>>(), 1);
        self.running = running;
        (prompts, step)
    }

    /// Appends one token to each request. A request that finds no free page preempts the newest one.
    fn grow(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].len.is_multiple_of(self.shape.page_size) {
                let page = match self.free.pop() {
                    Some(page) => page,
                    None => {
                        let newest = self.running.pop().expect("a request is running");
                        self.free.extend(newest.pages);
                        self.preemptions += 1;
                        continue;
                    }
                };
                self.running[at].pages.push(page);
                self.boundaries += 1;
            }
            self.running[at].len += 1;
            at += 1;
        }
    }

    /// The last `rows` tokens of each of these requests, with random tensors.
    fn step(&mut self, requests: &[&Request], rows: usize) -> Step {
        let mut step = Step { qo_indptr: vec![0], indptr: vec![0], ..Step::default() };
        for (number, request) in (0..).zip(requests) {
            step.batch_indices.extend(std::iter::repeat_n(number, rows));
            step.positions.extend((request.len - rows..request.len).map(|position| position as i32));
            step.qo_indptr.push(step.positions.len() as i32);
            step.indices.extend(&request.pages);
            step.indptr.push(step.indices.len() as i32);
            let before = (request.pages.len() - 1) * self.shape.page_size;
            step.last_page_len.push((request.len - before) as i32);
        }
        let (tokens, Shape { heads, dim, .. }) = (step.positions.len(), self.shape);
        for (values, heads) in [(&mut step.q, heads.qo), (&mut step.k, heads.kv), (&mut step.v, heads.kv)] {
            let mut number = || bf16::from_f32(self.random.below(2001) as f32 / 500.0 - 2.0);
            values.extend((0..tokens * heads * dim).map(|_| number()));
        }
        step
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arrivals, ends, preemptions, boundaries, .. } = self;
        write!(
            f,
            "{arrivals} arrivals, {ends} ends, {preemptions} preemptions, {boundaries} new pages for tokens"
        )
    }
}
