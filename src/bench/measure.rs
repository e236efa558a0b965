//! Timed steps of an engine: decode of a batch, and prefill of a prompt; and the memory bandwidth of a device, the bound of decode.

use super::{BenchArgs, Setting};
use miette::{IntoDiagnostic, Result, ensure};
use std::time::Instant;
use tilewright::{Backend, Cpu, Dtype, ViewMut, sampling::SamplingParams, tensor};
use tilewright_cuda::Cuda;
use tilewright_serve::{Engine, EngineOptions, GenerateOptions, RequestEdits, model::Transformer};

const PAGE_SIZE: usize = 16;
/// Decode steps before the measured ones.
const WARM_UP: usize = 4;

/// An engine for all cases.
pub(super) struct Bench<B> {
    engine: Engine<B>,
    vocab: usize,
    steps: usize,
    repeats: usize,
    /// Tokens of a prefill step.
    step_tokens: usize,
    /// Bytes of weights that a decode step reads.
    pub(super) weight_bytes: usize,
}

/// Times of the steps of a case.
pub(super) struct Measurement {
    pub(super) seconds: Spread,
    /// Weights, and keys and values, that a step reads.
    pub(super) bytes_per_step: f64,
    /// The number of measured steps.
    pub(super) steps: usize,
}

/// Median and percentiles of samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spread {
    pub(super) low: f64,
    pub(super) median: f64,
    pub(super) high: f64,
}

impl Spread {
    /// Of at least one sample.
    pub(super) fn new(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[((samples.len() - 1) as f64 * share).round() as usize];
        Self { low: at(0.1), median: at(0.5), high: at(0.9) }
    }

    /// `tokens` per time.
    pub(super) fn rate(self, tokens: f64) -> Self {
        Self { low: tokens / self.high, median: tokens / self.median, high: tokens / self.low }
    }
}

/// Tokens that a request decodes so that all requests decode together for `steps` steps. The first ones decode while the `prompt_tokens`
/// of the others are prefilled in steps of `step_tokens`.
fn decode_tokens(steps: usize, prompt_tokens: usize, step_tokens: usize) -> usize {
    steps + WARM_UP + 1 + prompt_tokens.div_ceil(step_tokens)
}

impl<B: Backend + Clone> Bench<B> {
    /// `graphs`: whether a device captures and replays decode steps.
    pub(super) fn new(model: Transformer, backend: B, args: &BenchArgs, graphs: bool) -> Result<Self> {
        let longest = args.settings().into_iter().map(Setting::tokens_per_step).max().unwrap_or(1);
        let step_tokens = longest.max(512);
        let tokens = args.settings().into_iter().map(|setting| match setting {
            Setting::Decode { batch, context } => {
                let tokens = decode_tokens(args.steps, batch * context, step_tokens);
                batch * (context + tokens + PAGE_SIZE)
            }
            Setting::Prefill { tokens } => tokens + PAGE_SIZE,
        });
        let activations = match (backend.computes_on_host(), args.dtype()) {
            (true, _) => Dtype::F32,
            (false, Dtype::F32) => Dtype::Bf16,
            (false, dtype) => dtype,
        };
        let options = EngineOptions {
            page_size: PAGE_SIZE,
            num_pages: tokens.max().unwrap_or(PAGE_SIZE).div_ceil(PAGE_SIZE) + 1,
            max_step_tokens: step_tokens,
            max_requests: longest,
            prefix_reuse: false,
            activations,
            graphs,
            ..EngineOptions::default()
        };
        let vocab = model.config().vocab_size;
        let engine = Engine::new(model, backend, options).into_diagnostic()?;
        let weight_bytes = engine.weight_bytes_per_step();
        let (steps, repeats) = (args.steps, args.repeats);
        Ok(Self { engine, vocab, steps, repeats, step_tokens, weight_bytes })
    }

    pub(super) fn measure(&mut self, setting: Setting) -> Result<Measurement> {
        let (mut seconds, before) = (Vec::new(), self.engine.report());
        let (mut bytes, mut steps) = (0.0, 0);
        match setting {
            Setting::Decode { batch, context } => {
                let tokens = decode_tokens(self.steps, batch * context, self.step_tokens);
                for request in 0..batch {
                    self.submit(context, request, tokens)?;
                }
                while self.engine.report().prefill_tokens - before.prefill_tokens < batch * context {
                    self.step()?;
                }
                for _ in 0..WARM_UP {
                    self.step()?;
                }
                let start = self.engine.report();
                while !self.engine.is_idle() && seconds.len() < self.steps {
                    let tokens = self.engine.report().decode_tokens;
                    let time = self.step()?;
                    if self.engine.report().decode_tokens - tokens == batch {
                        seconds.push(time);
                    }
                }
                let end = self.engine.report();
                bytes += end.decode_work.bytes - start.decode_work.bytes;
                steps += end.steps - start.steps;
                while !self.engine.is_idle() {
                    self.step()?;
                }
            }
            Setting::Prefill { tokens } => {
                for repeat in 0..=self.repeats {
                    self.submit(tokens, repeat, 1)?;
                    let (mut time, start) = (0.0, self.engine.report());
                    while !self.engine.is_idle() {
                        time += self.step()?;
                    }
                    let end = self.engine.report();
                    if repeat > 0 {
                        seconds.push(time);
                        bytes += end.prefill_work.bytes - start.prefill_work.bytes;
                        steps += 1;
                    }
                }
            }
        }
        ensure!(!seconds.is_empty(), "bench: {setting}: no step decoded all requests at once");
        let measured = seconds.len();
        Ok(Measurement {
            seconds: Spread::new(seconds),
            bytes_per_step: bytes / steps as f64,
            steps: measured,
        })
    }

    /// Queues a prompt of `tokens` tokens that depend on `seed`.
    fn submit(&mut self, tokens: usize, seed: usize, max_tokens: usize) -> Result<()> {
        let prompt: Vec<u32> =
            (0..tokens).map(|at| ((at * 7919 + seed * 104_729) % self.vocab) as u32).collect();
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let options =
            GenerateOptions { max_tokens, sampling, stop: Vec::new(), edits: RequestEdits::default() };
        self.engine.submit(&prompt, &[options]).into_diagnostic()?;
        Ok(())
    }

    /// The seconds of a step.
    fn step(&mut self) -> Result<f64> {
        let start = Instant::now();
        self.engine.step().into_diagnostic()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Bytes copied on a GPU.
const COPY_BYTES: usize = 1 << 30;
const COPIES: usize = 4;

/// A device whose memory bandwidth can be measured.
pub(super) trait MeasureBandwidth {
    /// Bytes per second.
    fn measure_bandwidth(&self) -> Result<f64>;
}

impl MeasureBandwidth for Cpu {
    fn measure_bandwidth(&self) -> Result<f64> {
        Ok(self.measure_roofline().bytes_per_second)
    }
}

impl MeasureBandwidth for Cuda {
    /// Copies within device memory, which read and write.
    fn measure_bandwidth(&self) -> Result<f64> {
        let (from, mut to) = (
            Backend::allocate(self, Dtype::I8, COPY_BYTES).into_diagnostic()?,
            Backend::allocate(self, Dtype::I8, COPY_BYTES).into_diagnostic()?,
        );
        let shape = [COPY_BYTES];
        let mut best = f64::INFINITY;
        for _ in 0..COPIES {
            let start = Instant::now();
            let (from, to) = (from.view(&shape).into_diagnostic()?, to.view_mut(&shape).into_diagnostic()?);
            tensor::copy(self, from, to).into_diagnostic()?;
            wait(self)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(2.0 * COPY_BYTES as f64 / best)
    }
}

/// Waits for the work of a device, by a copy to the host.
pub(super) fn wait<B: Backend>(backend: &B) -> Result<()> {
    if backend.computes_on_host() {
        return Ok(());
    }
    let one = backend.allocate(Dtype::F32, 1).into_diagnostic()?;
    let mut on_host = [0.0f32];
    let to = ViewMut::new(&mut on_host[..], &[1]).into_diagnostic()?;
    tensor::copy(backend, one.view(&[1]).into_diagnostic()?, to).into_diagnostic()
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn a_spread_is_of_sorted_samples_and_rates_swap_its_ends() {
        let spread = Spread::new((0..=10).rev().map(f64::from).collect());
        assert_eq!((spread.low, spread.median, spread.high), (1.0, 5.0, 9.0));
        let rate = spread.rate(45.0);
        assert_eq!((rate.low, rate.median, rate.high), (5.0, 9.0, 45.0));
        assert_eq!(Spread::new(vec![2.0]).rate(1.0).median, 0.5);
    }
}
