//! Sampling against its oracle: filters and draws, edits, log-probabilities, speculative sampling, pipelines, error texts.

mod distribution;
mod edits;
mod errors;
mod filters;
mod pipeline;
mod speculative;
mod speculative_distribution;
mod tensors;
mod top;
mod transform;

use tilewright::Cpu;

fn backends() -> [Cpu; 1] {
    [Cpu::with_threads(2).unwrap()]
}
