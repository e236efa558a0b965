//! The logits of every draw, bit for bit: whatever the engine did, they are those of the text scored as a whole, and
//! the token is the one that they, the seed and the number of the draw decide.
//!
//! The tests of the crate compare drawn tokens, which differ only when logits differ by much.

use super::{Engine, EngineOptions};
use crate::{
    Event, GenerateOptions, RequestId,
    model::{ModelConfig, Transformer, Weights},
};
use std::{collections::BTreeMap, path::Path};
use tilewright::{
    Cpu, Dtype, View,
    sampling::{SamplingParams, sample},
};

const DRAWS: usize = 40;

/// A text and the logits of its draws, `None` where a continuation drew from those of another.
struct Text {
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
    GenerateOptions { max_tokens: DRAWS, sampling, stop: Vec::new() }
}

/// Runs prompts of these lengths, the second with three continuations, and checks every logit of every draw.
fn check(model: impl Fn() -> Transformer, threads: usize, options: EngineOptions, lens: &[usize]) {
    let mut engine = Engine::new(model(), Cpu::with_threads(threads), options).unwrap();
    let mut texts = BTreeMap::<RequestId, Text>::new();
    for (seed, &len) in (1..).zip(lens) {
        // prompts share their beginning, for reuse
        let tokens = [&prompt(1, 13.min(len))[..], &prompt(seed, len - 13.min(len))].concat();
        let continuations: Vec<_> =
            if seed == 2 { vec![draws(2), draws(3), draws(4)] } else { vec![draws(7)] };
        for (id, wanted) in engine.submit(&tokens, &continuations).unwrap().into_iter().zip(continuations) {
            let text =
                Text { tokens: tokens.clone(), prompt_len: len, sampling: wanted.sampling, logits: vec![] };
            texts.insert(id, text);
        }
    }
    while !engine.is_idle() {
        let events = engine.step().unwrap();
        engine.check_integrity().unwrap();
        // in the order of the rows; continuations that start from another's logits come last and have no row
        let logits = engine.activations.logits().unwrap();
        let logits = logits.as_slice::<f32>().unwrap_or_default();
        let mut rows = logits.chunks_exact(engine.model.config().vocab_size);
        for event in events {
            let Event::Token { request, token } = event else { continue };
            let text = texts.get_mut(&request).unwrap();
            text.tokens.push(token);
            text.logits.push(rows.next().map(|row| row.iter().map(|x| x.to_bits()).collect()));
        }
        assert_eq!(rows.next(), None, "every row was drawn from");
    }
    let model = model();
    let kv_dtype = options.kv_dtype.unwrap_or(model.dtype());
    for (id, text) in texts {
        assert_eq!(text.logits.len(), DRAWS, "{id}");
        text.check(&model, kv_dtype, &format!("{id}, {threads} threads, {options:?}"));
    }
}

impl Text {
    /// Holds every draw against the logits of the whole text.
    fn check(&self, model: &Transformer, kv_dtype: Dtype, context: &str) {
        let (cpu, vocab) = (Cpu::with_threads(2), model.config().vocab_size);
        let whole = model.score(&cpu, &self.tokens, kv_dtype).unwrap();
        let rows = whole.chunks_exact(vocab).skip(self.prompt_len - 1);
        for (draw, (row, seen)) in rows.zip(&self.logits).enumerate() {
            let bits: Vec<u32> = row.iter().map(|x| x.to_bits()).collect();
            assert!(seen.as_ref().is_none_or(|seen| *seen == bits), "{context}, draw {draw}");
            let params = SamplingParams { offset: draw as u64, ..self.sampling };
            let mut token = [Ok(0)];
            sample(&cpu, View::new(row, &[1, vocab]).unwrap(), &[params], &mut token).unwrap();
            assert_eq!(token, [Ok(self.tokens[self.prompt_len + draw])], "{context}, draw {draw}");
        }
    }
}

/// Undisturbed; in chunks; with too few pages; one request at a time.
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
fn logits_have_the_bits_of_the_whole_text_in_f32() {
    for name in ["tests/fixtures/llama", "tests/fixtures/qwen2", "tests/fixtures/qwen3"] {
        for (setup, threads) in setups().into_iter().zip([2, 1, 4, 2, 1, 3]) {
            check(|| model(name, None, 0), threads, setup, &[1, 37, 16, 130, 17]);
        }
    }
}

#[test]
fn logits_have_the_bits_of_the_whole_text_in_16_bits() {
    for (dtype, kv_dtype) in [(Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F32), (Dtype::F32, Dtype::F16)]
    {
        for setup in setups() {
            let setup = EngineOptions { kv_dtype: Some(kv_dtype), ..setup };
            check(|| model("tests/fixtures/qwen3", Some(dtype), 0), 2, setup, &[3, 37, 100]);
        }
    }
}

#[test]
fn logits_of_the_shipped_model_have_the_bits_of_the_whole_text() {
    for setup in [setups()[1], setups()[4]] {
        check(|| model("models/tilewright-small", None, 0), 2, setup, &[9, 37, 100]);
    }
}

#[test]
fn logits_have_the_bits_of_the_whole_text_where_its_keys_are_divided() {
    // two and a bit pieces of attention
    for max_step_tokens in [512, 700] {
        let options = EngineOptions { num_pages: 600, max_step_tokens, ..EngineOptions::default() };
        check(|| model("tests/fixtures/llama", None, 8192), 2, options, &[4200, 20]);
    }
}
