//! Timings of candle's Qwen3 on the CPU with random f32 weights: a contender of `benches/peers/cpu_serving.py`.
//!
//! ```text
//! candle-qwen3 CONFIG.json CONTEXT PREFILL STEPS REPEATS
//! ```
//!
//! Each line of standard input is a case, a number of requests that decode or `null` for prefill. Its answer is a line with the
//! seconds of each step. The first line of the output is the name of the contender.

use candle_core::{D, DType, Device, Error, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::qwen3::{Config, ModelForCausalLM};
use serde_json::{Value, json};
use std::{io::Write, time::Instant};

const WARMUP: usize = 4;

/// A model with the sizes of its cases.
struct Bench {
    model: ModelForCausalLM,
    vocab_size: usize,
    context: usize,
    prefill: usize,
    steps: usize,
    repeats: usize,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [config, sizes @ ..] = arguments.as_slice() else {
        return Err(Error::msg("expected CONFIG.json CONTEXT PREFILL STEPS REPEATS"));
    };
    let sizes: Vec<usize> =
        sizes.iter().map(|size| size.parse().map_err(Error::wrap)).collect::<Result<_>>()?;
    let &[context, prefill, steps, repeats] = sizes.as_slice() else {
        return Err(Error::msg(format!("{} sizes, expected CONTEXT PREFILL STEPS REPEATS", sizes.len())));
    };
    let config = read_config(config)?;
    let variables = VarMap::new();
    let weights = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let model = ModelForCausalLM::new(&config, weights)?;
    let mut bench = Bench { model, vocab_size: config.vocab_size, context, prefill, steps, repeats };
    answer(&json!("candle-transformers 0.11"))?;
    for line in std::io::stdin().lines() {
        let batch: Option<usize> = serde_json::from_str(&line?).map_err(Error::wrap)?;
        let seconds = match batch {
            Some(batch) => bench.decode(batch)?,
            None => bench.prefill()?,
        };
        answer(&json!(seconds))?;
    }
    Ok(())
}

/// The configuration, with the fields that candle requires and a `config.json` may omit.
fn read_config(path: &str) -> Result<Config> {
    let mut fields: Value = serde_json::from_str(&std::fs::read_to_string(path)?).map_err(Error::wrap)?;
    for (field, default) in [("max_window_layers", json!(0)), ("use_sliding_window", json!(false))] {
        if fields[field].is_null() {
            fields[field] = default;
        }
    }
    serde_json::from_value(fields).map_err(Error::wrap)
}

fn answer(value: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}")?;
    Ok(out.flush()?)
}

impl Bench {
    /// Token ids `[rows, tokens]`.
    fn tokens(&self, rows: usize, tokens: usize) -> Result<Tensor> {
        let ids: Vec<u32> = (0..rows * tokens).map(|i| (i * 7 % self.vocab_size) as u32).collect();
        Tensor::from_vec(ids, (rows, tokens), &Device::Cpu)
    }

    /// Seconds of each prefill of one prompt.
    fn prefill(&mut self) -> Result<Vec<f64>> {
        let ids = self.tokens(1, self.prefill)?;
        let mut seconds = Vec::new();
        for _ in 0..=self.repeats {
            self.model.clear_kv_cache();
            let start = Instant::now();
            self.model.forward(&ids, 0)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(seconds.split_off(1))
    }

    /// Seconds of each step of `batch` requests.
    fn decode(&mut self, batch: usize) -> Result<Vec<f64>> {
        self.model.clear_kv_cache();
        let mut logits = self.model.forward(&self.tokens(batch, self.context)?, 0)?;
        let mut seconds = Vec::new();
        for step in 0..WARMUP + self.steps {
            let start = Instant::now();
            let ids = logits.squeeze(1)?.argmax(D::Minus1)?.unsqueeze(1)?;
            logits = self.model.forward(&ids, self.context + step)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(seconds.split_off(WARMUP))
    }
}
