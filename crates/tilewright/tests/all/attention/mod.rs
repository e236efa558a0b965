//! The attention core against its oracle: conformance, invariants, planner properties, error texts.

mod block_sparse;
mod cascade;
mod conformance;
mod edges;
mod errors;
mod flashinfer;
mod gemm;
mod invariants;
mod kv;
mod lengths;
mod low_precision;
mod masks;
mod merge;
mod parts;
mod quantise;
mod replan;
mod scales;
mod schedule;
mod schedule_levels;
mod schedule_limits;
mod shared_pages;
mod strides;
mod variants;

use tilewright::Cpu;

/// The CPU backend once per instruction set of this machine.
fn backends() -> Vec<Cpu> {
    crate::cpus(2)
}
