//! Operator kernels beside attention in the simulator, against their f64 definitions, with many seeds.

mod append;
mod far_rows;
mod gemm;
mod rows;

use tilewright_ptx::{Arg, Kernel, Launch, Memory};

/// Number of seeds of tests that vary the schedule.
const SEEDS: u64 = 32;

/// Runs `kernel`; `what` names the case in failures.
fn simulate(what: &str, kernel: &Kernel, (grid, args): ([u32; 3], &[Arg]), seed: u64, memory: &mut Memory) {
    let run = Launch { kernel, grid, args, seed }.run(memory);
    run.unwrap_or_else(|fault| panic!("{what}, seed {seed}: {fault}"));
}
