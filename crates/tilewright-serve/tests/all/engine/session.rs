//! An engine under test: checks integrity after every step and records the output of each request.

use crate::{
    fixtures::{fixture, transformer},
    generator::Generator,
};
use std::{collections::BTreeMap, path::PathBuf};
use tilewright::{Cpu, Dtype, sampling::SamplingParams};
use tilewright_serve::{
    Engine, EngineOptions, Event, FinishReason, GenerateOptions, Report, RequestEdits, RequestId,
};

/// Vocabulary size common to all fixtures.
pub(crate) const VOCAB: usize = 288;
/// The bundled trained model: 8 layers, 4,096 tokens, bf16, a context of 2,048.
pub(crate) const SHIPPED: &str = "tilewright-small";

/// Model, threads and options of an engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) model: &'static str,
    /// Dtype of the weights; `None` is as stored.
    pub(crate) dtype: Option<Dtype>,
    pub(crate) threads: usize,
    pub(crate) options: EngineOptions,
}

/// A prompt and one continuation of it.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) prompt: Vec<u32>,
    pub(crate) options: GenerateOptions,
}

/// Output and finish reason of a request.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<u32>,
    pub(crate) reason: Option<FinishReason>,
}

pub(crate) struct Session {
    pub(crate) engine: Engine<Cpu>,
    outcomes: BTreeMap<RequestId, Outcome>,
}

impl Setup {
    /// 512 pages of 16 tokens without reuse, and steps larger than every prompt: no preemption and no chunking.
    pub(crate) fn new(model: &'static str) -> Self {
        let options = EngineOptions { num_pages: 512, prefix_reuse: false, ..EngineOptions::default() };
        Self { model, dtype: None, threads: 2, options }
    }

    /// Same, with changed options.
    pub(crate) fn with(self, change: impl Fn(&mut EngineOptions)) -> Self {
        let mut options = self.options;
        change(&mut options);
        Self { options, ..self }
    }

    pub(crate) fn start(&self) -> Session {
        let model = transformer(&folder(self.model), self.dtype);
        Session::new(
            Engine::new(model, Cpu::with_threads(self.threads).unwrap(), self.options).expect("an engine"),
        )
    }

    /// Runs each case in a separate engine.
    pub(crate) fn run_separately(&self, cases: &[Case]) -> Vec<Outcome> {
        cases.iter().map(|case| self.run_batched(std::slice::from_ref(case)).remove(0)).collect()
    }

    pub(crate) fn run_batched(&self, cases: &[Case]) -> Vec<Outcome> {
        self.start().run(cases)
    }
}

impl Session {
    pub(crate) fn new(engine: Engine<Cpu>) -> Self {
        Self { engine, outcomes: BTreeMap::new() }
    }

    pub(crate) fn submit(&mut self, case: &Case) -> RequestId {
        self.submit_all(&case.prompt, std::slice::from_ref(&case.options))[0]
    }

    pub(crate) fn submit_all(&mut self, prompt: &[u32], options: &[GenerateOptions]) -> Vec<RequestId> {
        let ids = self.engine.submit(prompt, options).expect("a good request");
        self.outcomes.extend(ids.iter().map(|&id| (id, Outcome::default())));
        ids
    }

    pub(crate) fn step(&mut self) {
        for event in self.engine.step().expect("a step") {
            match event {
                Event::Token { request, token } => {
                    let outcome = self.outcomes.get_mut(&request).expect("a known request");
                    assert_eq!(outcome.reason, None, "{request} continues after its end");
                    outcome.tokens.push(token);
                }
                Event::Finished { request, reason } => {
                    let outcome = self.outcomes.get_mut(&request).expect("a known request");
                    assert_eq!(outcome.reason.replace(reason), None, "{request} ends twice");
                }
            }
        }
        self.engine.check_integrity().expect("pages with one owner each");
    }

    /// Steps until the engine is idle, then checks that all pages are available.
    pub(crate) fn finish(&mut self) {
        let mut steps = 0;
        while !self.engine.is_idle() {
            self.step();
            steps += 1;
            assert!(steps < 100_000, "the engine makes no progress");
        }
        assert_eq!(self.engine.available_pages(), self.report().num_pages, "a page is lost");
    }

    pub(crate) fn run(&mut self, cases: &[Case]) -> Vec<Outcome> {
        let ids: Vec<_> = cases.iter().map(|case| self.submit(case)).collect();
        self.finish();
        ids.into_iter().map(|id| self.take_outcome(id)).collect()
    }

    /// The tokens of a running request so far.
    pub(crate) fn generated(&self, request: RequestId) -> &[u32] {
        &self.outcomes[&request].tokens
    }

    /// Removes and returns the outcome of a finished request.
    pub(crate) fn take_outcome(&mut self, request: RequestId) -> Outcome {
        let outcome = self.outcomes.remove(&request).expect("a known request");
        assert!(outcome.reason.is_some(), "{request} is not done");
        outcome
    }

    pub(crate) fn report(&self) -> Report {
        self.engine.report()
    }
}

/// The folder of a fixture, or of the shipped model.
pub(crate) fn folder(model: &str) -> PathBuf {
    if model == SHIPPED { fixture("../../models").join(model) } else { fixture(model) }
}

/// `len` random tokens.
pub(crate) fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut generator = Generator::new(seed);
    (0..len).map(|_| generator.below(VOCAB) as u32).collect()
}

/// Options to sample `max_tokens` tokens: each seed selects one of four filters.
pub(crate) fn draws(seed: u64, max_tokens: usize) -> GenerateOptions {
    let plain = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    let sampling = match seed % 4 {
        0 => plain,
        1 => SamplingParams { temperature: 0.8, top_p: 0.95, ..plain },
        2 => SamplingParams { temperature: 1.5, top_k: Some(40), ..plain },
        _ => SamplingParams { min_p: 0.01, ..plain },
    };
    GenerateOptions { max_tokens, sampling, stop: Vec::new(), edits: RequestEdits::default() }
}

/// A request of `len` random tokens that samples `max_tokens`.
pub(crate) fn case(seed: u64, len: usize, max_tokens: usize) -> Case {
    Case { prompt: prompt(seed, len), options: draws(seed, max_tokens) }
}
