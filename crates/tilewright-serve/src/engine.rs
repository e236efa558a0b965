//! The serving engine: each step schedules, plans, runs the layers, samples and commits.
//!
//! Determinism on the CPU: a request's tokens are bit-identical whatever its batch peers, chunking, prefix reuse or preemption.
//! Every operator computes a row from that row alone, and attention splits keys at fixed positions.
//!
//! Determinism on a GPU: equal steps give equal bits. Kernels are chosen by the number of rows, so the last bits of logits may
//! depend on the batch and on chunking. Tokens may then differ where two logits nearly tie.

use crate::{
    cache::KvPool,
    decode_graphs::{DecodeGraphs, ModelRunner},
    model::{
        Transformer,
        activations::{Activations, Sizes},
        transformer::ForwardContext,
    },
    pool::PagePool,
    report::{Report, StepCost},
    request::{ContextLimit, Event, FinishReason, Fork, GenerateOptions, Request, RequestId, SUBMIT},
    scheduler::{Chunk, Scheduler},
    step::{Step, StepInputs, draw},
};
use std::time::Instant;
use tilewright::{
    Attention, Backend, Dtype, Plan, Result, Split, attention::Explanation, ensure, rope::CosSinCache,
    sampling::Sampled,
};

/// Keys per split of attention: long enough that few requests are split.
pub(crate) const SPLIT: Split = Split::Fixed { tokens: 2048 };

/// The engine's memory and its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens per page.
    pub page_size: usize,
    /// Pages of the pool; `num_pages * page_size` bounds the longest request.
    pub num_pages: usize,
    /// Maximum tokens per step; longer prompts are computed in chunks.
    pub max_step_tokens: usize,
    /// Maximum concurrent requests.
    pub max_requests: usize,
    /// Whether requests reuse the pages of earlier requests with the same prefix.
    pub prefix_reuse: bool,
    /// Dtype of keys and values in the pool; `None` is the dtype of the weights.
    pub kv_dtype: Option<Dtype>,
    /// Input dtype of matrix products and attention: f32, f16 or bf16. Tensor cores need 16 bits. Outputs of matrix products and
    /// the residual stream are always f32 ([`Precision`](crate::model::Precision)).
    pub activations: Dtype,
    /// Whether decode steps are captured and replayed, on a backend that supports it.
    pub graphs: bool,
}

impl Default for EngineOptions {
    /// 1,024 pages of 16 tokens, at most 512 tokens and 64 requests per step, with prefix reuse and f32 activations.
    fn default() -> Self {
        Self {
            page_size: 16,
            num_pages: 1024,
            max_step_tokens: 512,
            max_requests: 64,
            prefix_reuse: true,
            kv_dtype: None,
            activations: Dtype::F32,
            graphs: true,
        }
    }
}

/// Generates text for many requests at once.
#[derive(Debug)]
pub struct Engine<B> {
    model: Transformer,
    backend: B,
    attention: Vec<Attention<B>>,
    ropes: Vec<CosSinCache>,
    cache: KvPool,
    scheduler: Scheduler,
    activations: Activations,
    graphs: DecodeGraphs,
    options: EngineOptions,
    context: ContextLimit,
    next_id: usize,
    report: Report,
}

impl<B: Backend + Clone> Engine<B> {
    /// An engine for `model` on `backend`; uploads the weights to a device backend.
    ///
    /// # Errors
    /// When an option is 0, `activations` is a cache-only dtype, the pages do not fit in memory, or the backend does not support
    /// the model's attention.
    pub fn new(model: Transformer, backend: B, options: EngineOptions) -> Result<Self> {
        for (name, value) in [
            ("page_size", options.page_size),
            ("num_pages", options.num_pages),
            ("max_step_tokens", options.max_step_tokens),
            ("max_requests", options.max_requests),
        ] {
            ensure!(value > 0, "engine.new", "{name} = 0, expected at least 1");
        }
        let dtype = options.activations;
        ensure!(!dtype.is_cache_only(), "engine.new", "activations = {dtype}, expected f32, f16 or bf16");
        let kv_dtype = options.kv_dtype.unwrap_or(model.dtype());
        // Allocated first: the pool is the largest allocation, and its error names the size.
        let (num_pages, page_size) = (options.num_pages, options.page_size);
        let cache = KvPool::for_model(&backend, model.config(), num_pages, page_size, kv_dtype)?;
        let model = model.upload(&backend, |_| ())?;
        let pool = PagePool::new(num_pages, page_size, options.prefix_reuse)?;
        let (model_context, pool_tokens) = (model.config().max_position_embeddings, num_pages * page_size);
        let context = model_context.min(pool_tokens);
        Ok(Self {
            attention: model.attention(&backend, dtype, kv_dtype)?,
            ropes: model.ropes(context)?,
            cache,
            scheduler: Scheduler::new(pool, options),
            activations: Activations::new(&backend, model.config(), dtype, Sizes::default())?,
            graphs: DecodeGraphs::new(options.graphs && !backend.computes_on_host()),
            model,
            backend,
            options,
            context: ContextLimit { tokens: context, by_pages: pool_tokens < model_context },
            next_id: 0,
            report: Report::default(),
        })
    }

    /// The maximum length of prompt and continuation together, in tokens.
    pub fn context(&self) -> usize {
        self.context.tokens
    }

    /// Bytes of the KV pool.
    pub fn kv_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Bytes of weights that a step reads.
    pub fn weight_bytes_per_step(&self) -> usize {
        self.model.bytes_per_step()
    }

    /// Queues one continuation of `prompt` per entry of `continuations`; the prompt is computed once. Returns the ids
    /// in order.
    ///
    /// # Errors
    /// When the prompt is empty, does not fit into the context, or has a token outside the vocabulary; when there
    /// is no continuation; or when an option is out of range.
    pub fn submit(&mut self, prompt: &[u32], continuations: &[GenerateOptions]) -> Result<Vec<RequestId>> {
        let vocab = self.model.config().vocab_size;
        ensure!(!prompt.is_empty(), SUBMIT, "the prompt is empty, expected at least 1 token");
        let (len, limit) = (prompt.len(), self.context.tokens);
        let EngineOptions { num_pages, page_size, .. } = self.options;
        let context = match self.context.by_pages {
            true => format!("{num_pages} pages of {page_size} tokens hold {limit}"),
            false => format!("the context {limit}"),
        };
        ensure!(
            len < limit,
            SUBMIT,
            "the prompt has {len} tokens, {context}: expected at most {}, to leave room for one",
            limit - 1
        );
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            let text = format!("the prompt has token {token}, which is not in 0..{vocab}");
            return Err(tilewright::Error::new(SUBMIT, text));
        }
        for options in continuations {
            ensure!(options.max_tokens > 0, SUBMIT, "max_tokens = 0, expected at least 1");
            options.sampling.validate()?;
            options.edits.validate(vocab)?;
        }
        let ids: Vec<_> = (self.next_id..).map(RequestId).take(continuations.len()).collect();
        self.next_id += ids.len();
        let mut named = ids.iter().copied().zip(continuations.iter().cloned());
        let Some((id, options)) = named.next() else {
            return Err(tilewright::Error::new(SUBMIT, "there is no continuation, expected at least 1"));
        };
        let mut request = Request::new(id, prompt.to_vec(), options);
        request.forks = named.map(|(id, options)| Fork { id, options }).collect();
        self.scheduler.submit(request);
        Ok(ids)
    }

    /// Whether no request is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Advances every scheduled request by a chunk of its prompt or by one token.
    ///
    /// # Errors
    /// When an operator rejects its arguments, which only a damaged model can cause.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let start = Instant::now();
        let chunks = self.scheduler.schedule()?;
        if chunks.is_empty() {
            return Ok(Vec::new());
        }
        let step = Step::new(&self.scheduler, &chunks, self.options.page_size);
        let explanations = self.run(step)?;
        let drawn = self.sample(&chunks)?;
        self.record_step(&chunks, &explanations, start);
        self.commit(drawn)
    }

    /// Runs the layers and returns the explanations of their attention plans.
    fn run(&mut self, step: Step) -> Result<Vec<Explanation>> {
        let Self { model, backend, attention, ropes, cache, activations, graphs, .. } = self;
        let context = ForwardContext { backend, attention, ropes };
        let explain = |inputs: &StepInputs| inputs.plans.iter().map(Plan::explain).collect();
        let mut runner = ModelRunner { model, context, cache, activations };
        if graphs.applies_to(&step) {
            return Ok(explain(graphs.run(&mut runner, step)?));
        }
        let inputs = StepInputs::new(backend, attention, &step)?;
        runner.run_eagerly(&inputs)?;
        Ok(explain(&inputs))
    }

    /// Adds a finished step to the report.
    fn record_step(&mut self, chunks: &[Chunk], attention: &[Explanation], start: Instant) {
        let is_decode = |chunk: &&Chunk| {
            let request = &self.scheduler.running[chunk.request];
            chunk.tokens.len() == 1 && chunk.tokens.start >= request.prompt_len
        };
        let tokens: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let decode_tokens = chunks.iter().filter(is_decode).count();
        let cost = StepCost {
            prefill_tokens: tokens - decode_tokens,
            decode_tokens,
            time: start.elapsed(),
            weight_bytes: self.model.bytes_per_step(),
            flops_per_token: self.model.flops_per_token(),
        };
        let layers = self.model.layers_per_attention();
        self.report.add(cost, &layers.into_iter().zip(attention).collect::<Vec<_>>());
    }

    /// Samples a token for every fully computed request, forks included. Returns pairs of index into the running
    /// requests and token.
    fn sample(&mut self, chunks: &[Chunk]) -> Result<Vec<(usize, Sampled)>> {
        let mut drawn = Vec::new();
        for chunk in chunks {
            self.scheduler.advance(chunk)?;
        }
        let ready = chunks.iter().filter(|chunk| self.scheduler.running[chunk.request].uncomputed() == 0);
        let ready: Vec<usize> = ready.map(|chunk| chunk.request).collect();
        let logits = self.activations.first_logits(ready.len())?;
        drawn.extend(draw(&self.backend, &self.scheduler, &ready, logits)?);
        for (row, &leader) in ready.iter().enumerate() {
            if self.scheduler.running[leader].forks.is_empty() {
                continue;
            }
            let first = self.scheduler.running.len();
            let copies = self.scheduler.start_forks(leader)?;
            self.cache.copy_pages(&self.backend, &copies)?;
            let forks: Vec<usize> = (first..self.scheduler.running.len()).collect();
            // all forks sample from the leader's logits
            let logits = self.activations.repeated_logits(row, forks.len())?;
            drawn.extend(draw(&self.backend, &self.scheduler, &forks, logits)?);
        }
        Ok(drawn)
    }

    /// Appends the sampled tokens and releases finished requests.
    fn commit(&mut self, drawn: Vec<(usize, Sampled)>) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        let mut done = Vec::new();
        for (at, sampled) in drawn {
            let request = &mut self.scheduler.running[at];
            let id = request.id;
            let reason = match sampled {
                Ok(token) => {
                    events.push(Event::Token { request: id, token });
                    request.push(token, self.context)
                }
                Err(error) => {
                    // the sampler's text begins with the row in the batch, which is meaningless to the request
                    let text = error.message();
                    let why = text.split_once(": ").map_or(text, |(_, why)| why);
                    Some(FinishReason::Failed(why.to_owned()))
                }
            };
            if let Some(reason) = reason {
                self.report.finished.add(&reason);
                events.push(Event::Finished { request: id, reason });
                done.push(at);
            }
        }
        done.sort_unstable();
        for at in done.into_iter().rev() {
            self.scheduler.finish(at)?;
        }
        Ok(events)
    }

    /// Counters since the engine was created.
    pub fn report(&self) -> Report {
        let stats = self.scheduler.stats;
        Report {
            attention_time: self.activations.attention_time,
            replays: self.graphs.replays,
            reused_tokens: stats.reused_tokens,
            reused_pages: stats.reused_pages,
            peak_pages: stats.peak_pages,
            preemptions: stats.preemptions,
            num_pages: self.scheduler.pool().num_pages(),
            ..self.report
        }
    }

    /// Pages available to a new request: free pages and unlocked pages of the radix tree. All pages when the engine
    /// is idle.
    pub fn available_pages(&self) -> usize {
        self.scheduler.pool().available()
    }

    /// Checks that every page has exactly one owner, and that exactly the pages in use by requests are locked.
    ///
    /// # Errors
    /// When an invariant is broken, which is a bug.
    pub fn check_integrity(&self) -> Result<()> {
        self.scheduler.check_integrity()
    }
}

#[cfg(test)]
mod tests;
