//! Norms, rotary embeddings, gated activations, quantization and elementwise operators against the oracle.

mod activation;
mod elementwise;
mod norm;
mod quantization;
mod rope;
mod rope_append;

use tilewright::Cpu;

/// The simulator runs every n-th case of long lists.
#[allow(dead_code, reason = "the CPU runs all cases; the GPU's tests include this module")]
const STRIDE: usize = 199;

#[allow(dead_code, reason = "the GPU's tests, which include this module, have other backends")]
fn backends() -> [Cpu; 1] {
    [Cpu::with_threads(2).unwrap()]
}
