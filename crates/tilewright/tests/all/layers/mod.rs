//! Norms, rotary embeddings, gated activations and elementwise operators against the oracle.

mod activation;
mod elementwise;
mod norm;
mod rope;
mod rope_append;

use tilewright::Cpu;

/// The CPU backend.
fn backends() -> Vec<Cpu> {
    vec![Cpu::with_threads(2).unwrap()]
}
