//! Norms, rotary embeddings and gated activations against the oracle.

mod activation;
mod norm;
mod rope;

use tilewright::Cpu;

/// The CPU backend.
fn backends() -> Vec<Cpu> {
    vec![Cpu::with_threads(2).unwrap()]
}
