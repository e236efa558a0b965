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

/// Addresses, then 32-bit numbers, then 64-bit ones: the order in which these kernels take them.
pub(crate) fn args(addresses: &[u64], words: &[u32], wide: &[u64]) -> Vec<Arg> {
    let addresses = addresses.iter().map(|&address| Arg::U64(address));
    let words = words.iter().map(|&word| Arg::U32(word));
    addresses.chain(words).chain(wide.iter().map(|&wide| Arg::U64(wide))).collect()
}
