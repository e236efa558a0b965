//! The attention core against its oracle: conformance, invariants, planner properties, error texts.
//!
//! Everything that executes is generic over [`tilewright::Backend`], so that each backend is judged by the same code.

mod conformance;
mod edges;
mod elements;
mod errors;
mod gemm;
mod generator;
mod invariants;
mod judge;
mod kv;
mod lengths;
mod merge;
mod run;
mod sample;
mod schedule;
mod storage;
mod strides;

use tilewright::{Cpu, cpu::Isa};

/// The CPU backend once per instruction set of this machine.
fn cpus(threads: usize) -> Vec<Cpu> {
    let with_isa = |isa| Cpu::with_threads(threads).with_isa(isa).expect("it is available");
    Isa::available().into_iter().map(with_isa).collect()
}
