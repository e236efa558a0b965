//! Bit-exact logits: for every sampled token the engine's logits equal those of the whole text scored at once, and the
//! token is determined by logits, seed and offset.
//!
//! The integration tests compare sampled tokens, which are less sensitive.

use super::{Engine, EngineOptions};
use crate::{
    Event, GenerateOptions, RequestEdits, RequestId,
    model::{ModelConfig, Transformer, Weights},
};
use std::{collections::BTreeMap, path::Path};
use tilewright::{Cpu, Dtype, SamplingParams, View, sampling::sample};

const DRAWS: usize = 40;

/// The tokens of a request with the logits of each sampled one; `None` for a token sampled from another request's logits.
struct TokenTrace {
    tokens: Vec<u32>,
    prompt_len: usize,
    sampling: SamplingParams,
    logits: Vec<Option<Vec<u32>>>,
}

fn model(name: &str, dtype: Option<Dtype>, context: usize) -> Transformer {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dir = root.join(name);
    let mut config = ModelConfig::open(&dir).unwrap();
    config.max_position_embeddings = config.max_position_embeddings.max(context);
    Transformer::new(config, &Weights::open(&dir).unwrap(), dtype).unwrap()
}

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (1..=len as u32).map(|i| (seed * 7919 + i * i * 31 + i * 17) % 288).collect()
}

fn draws(seed: u64) -> GenerateOptions {
    let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    GenerateOptions { max_tokens: DRAWS, sampling, stop: Vec::new(), edits: RequestEdits::default() }
}

/// Runs prompts of these lengths, the second with three continuations, and checks all logits of every sampled token.
fn check(model: impl Fn() -> Transformer, threads: usize, options: EngineOptions, lens: &[usize]) {
    let mut engine = Engine::new(model(), Cpu::with_threads(threads).unwrap(), options).unwrap();
    let mut traces = BTreeMap::<RequestId, TokenTrace>::new();
    for (seed, &len) in (1..).zip(lens) {
        // prompts share a prefix, for reuse
        let tokens = [&prompt(1, 13.min(len))[..], &prompt(seed, len - 13.min(len))].concat();
        let continuations: Vec<_> =
            if seed == 2 { vec![draws(2), draws(3), draws(4)] } else { vec![draws(7)] };
        for (id, options) in engine.submit(&tokens, &continuations).unwrap().into_iter().zip(continuations) {
            let trace = TokenTrace {
                tokens: tokens.clone(),
                prompt_len: len,
                sampling: options.sampling,
                logits: vec![],
            };
            traces.insert(id, trace);
        }
    }
    while !engine.is_idle() {
        let events = engine.step().unwrap();
        engine.check_integrity().unwrap();
        // events are in row order; forks come last and have no row
        let logits = engine.activations.logits().unwrap();
        let logits = logits.as_slice::<f32>().unwrap_or_default();
        let mut rows = logits.chunks_exact(engine.model.config().vocab_size);
        for event in events {
            let Event::Token { request, token } = event else { continue };
            let trace = traces.get_mut(&request).unwrap();
            trace.tokens.push(token);
            trace.logits.push(rows.next().map(|row| row.iter().map(|x| x.to_bits()).collect()));
        }
        assert_eq!(rows.next(), None, "every row was sampled from");
    }
    let model = model();
    let kv_dtype = options.kv_dtype.unwrap_or(model.dtype());
    for (id, trace) in traces {
        assert_eq!(trace.logits.len(), DRAWS, "{id}");
        trace.check(&model, kv_dtype, &format!("{id}, {threads} threads, {options:?}"));
    }
}

impl TokenTrace {
    /// Compares every sampled token with the logits of the whole text.
    fn check(&self, model: &Transformer, kv_dtype: Dtype, context: &str) {
        let (cpu, vocab) = (Cpu::with_threads(2).unwrap(), model.config().vocab_size);
        let whole = model.score(&cpu, &self.tokens, kv_dtype).unwrap();
        let rows = whole.chunks_exact(vocab).skip(self.prompt_len - 1);
        for (draw, (row, logits)) in rows.zip(&self.logits).enumerate() {
            let bits: Vec<u32> = row.iter().map(|x| x.to_bits()).collect();
            assert!(logits.as_ref().is_none_or(|logits| *logits == bits), "{context}, draw {draw}");
            let params = SamplingParams { offset: draw as u64, ..self.sampling };
            let mut token = [Ok(0)];
            sample(&cpu, View::new(row, &[1, vocab]).unwrap(), &[params], &mut token).unwrap();
            assert_eq!(token, [Ok(self.tokens[self.prompt_len + draw])], "{context}, draw {draw}");
        }
    }
}

/// Undisturbed, chunked, with too few pages, and with one request at a time.
fn setups() -> [EngineOptions; 6] {
    let plain = EngineOptions { num_pages: 64, prefix_reuse: false, ..EngineOptions::default() };
    [
        plain,
        EngineOptions { prefix_reuse: true, max_step_tokens: 7, ..plain },
        EngineOptions { page_size: 5, num_pages: 40, max_step_tokens: 16, ..plain },
        EngineOptions { page_size: 1, num_pages: 180, prefix_reuse: true, ..plain },
        EngineOptions { num_pages: 12, prefix_reuse: true, max_step_tokens: 1, ..plain },
        EngineOptions { page_size: 64, num_pages: 20, max_requests: 1, prefix_reuse: true, ..plain },
    ]
}

#[test]
fn logits_equal_those_of_the_whole_text_in_f32() {
    for name in ["tests/fixtures/llama", "tests/fixtures/qwen2", "tests/fixtures/qwen3"] {
        for (setup, threads) in setups().into_iter().zip([2, 1, 4, 2, 1, 3]) {
            check(|| model(name, None, 0), threads, setup, &[1, 37, 16, 130, 17]);
        }
    }
}

#[test]
fn logits_equal_those_of_the_whole_text_in_16_bits() {
    for (dtype, kv_dtype) in [(Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F32), (Dtype::F32, Dtype::F16)]
    {
        for setup in setups() {
            let setup = EngineOptions { kv_dtype: Some(kv_dtype), ..setup };
            check(|| model("tests/fixtures/qwen3", Some(dtype), 0), 2, setup, &[3, 37, 100]);
        }
    }
}

#[test]
fn logits_of_the_shipped_model_equal_those_of_the_whole_text() {
    for setup in [setups()[1], setups()[4]] {
        check(|| model("models/tilewright-small", None, 0), 2, setup, &[9, 37, 100]);
    }
}

#[test]
fn logits_equal_those_of_the_whole_text_with_split_keys() {
    // slightly more than two splits
    for max_step_tokens in [512, 700] {
        let options = EngineOptions { num_pages: 600, max_step_tokens, ..EngineOptions::default() };
        check(|| model("tests/fixtures/llama", None, 8192), 2, options, &[4200, 20]);
    }
}
