//! Runs a kernel and reports the failing seed.

use tilewright_ptx::{Arg, Kernel, Launch, Memory};

/// Number of seeds of tests that vary the schedule.
pub(crate) const SEEDS: u64 = 32;

/// Runs `kernel`; `what` names the case in failures.
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
