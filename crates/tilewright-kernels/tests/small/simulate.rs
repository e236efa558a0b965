//! Runs a kernel, and says which run failed.

use tilewright_ptx::{
    ir::Kernel,
    sim::{Arg, Launch, Memory},
};

/// How often a kernel is run where the timing is what is tested.
pub(crate) const SEEDS: u64 = 32;

/// Runs `kernel`; `what` names the case in a failure.
pub(crate) fn simulate(
    what: &str,
    kernel: &Kernel,
    (grid, args): ([u32; 3], &[Arg]),
    seed: u64,
    memory: &mut Memory,
) {
    let run = Launch { kernel, grid, args, seed }.run(memory);
    run.unwrap_or_else(|fault| panic!("{what}, seed {seed}: {fault}"));
}
