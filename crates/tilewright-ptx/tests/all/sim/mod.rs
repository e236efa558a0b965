//! The simulator: correct kernels run with every seed, and every kind of bug is reported.

mod barriers;
mod clusters;
mod compute;
mod copies;
mod dependent_launches;
mod memory;
mod pipeline;
mod products;
mod races;

use crate::kernel;
use tilewright_ptx::{Arg, Fault, FaultKind, Kernel, Launch, Memory, Report};

/// Seeds per test.
const SEEDS: u64 = 32;

/// Runs a kernel and returns the final `words`, an array in global memory that is the kernel's only parameter.
fn run(kernel: &Kernel, ctas: u32, words: &[u32], seed: u64) -> Result<(Vec<u32>, Report), Fault> {
    let mut memory = Memory::new();
    let address = memory.alloc_from(words);
    let args: &[Arg] = if kernel.params.is_empty() { &[] } else { &[Arg::U64(address)] };
    let report = Launch { kernel, grid: [ctas, 1, 1], args, seed }.run(&mut memory)?;
    Ok((memory.read(address, words.len())?, report))
}

/// Asserts the output words for every seed.
#[track_caller]
fn assert_output(kernel: &Kernel, ctas: u32, words: &[u32], expected: &[u32]) {
    for seed in 0..SEEDS {
        match run(kernel, ctas, words, seed) {
            Ok((found, _)) => assert_eq!(found, expected, "seed {seed}"),
            Err(fault) => panic!("seed {seed}: {fault}"),
        }
    }
}

/// Asserts that the kernel runs without fault for every seed.
#[track_caller]
fn assert_passes(kernel: &Kernel, ctas: u32) {
    for seed in 0..SEEDS {
        if let Err(fault) = run(kernel, ctas, &[0; 1024], seed) {
            panic!("seed {seed}: {fault}");
        }
    }
}

/// Asserts that every seed reports this kind of fault; returns the first fault.
#[track_caller]
fn assert_fault(kind: FaultKind, kernel: &Kernel, ctas: u32) -> Fault {
    let faults: Vec<Fault> = (0..SEEDS)
        .map(|seed| match run(kernel, ctas, &[0; 1024], seed) {
            Ok(_) => panic!("seed {seed}: nothing was found, expected {kind}"),
            Err(fault) => fault,
        })
        .collect();
    for (seed, fault) in faults.iter().enumerate() {
        assert_eq!(fault.kind, kind, "seed {seed}: {fault}");
        assert!(!fault.message.is_empty());
    }
    faults[0].clone()
}

/// The kinds of the faults that some of `seeds` seeds report.
fn fault_kinds(kernel: &Kernel, ctas: u32, words: &[u32], seeds: u64) -> Vec<FaultKind> {
    (0..seeds).filter_map(|seed| run(kernel, ctas, words, seed).err()).map(|fault| fault.kind).collect()
}

/// Asserts that every seed reports one of these kinds, and at least one seed the first.
#[track_caller]
fn assert_fault_in(kinds: &[FaultKind], kernel: &Kernel) {
    let fault = |seed| run(kernel, 1, &[0; 1024], seed).expect_err("a fault").kind;
    let found: Vec<FaultKind> = (0..SEEDS).map(fault).collect();
    assert!(found.iter().all(|kind| kinds.contains(kind)), "{found:?}");
    assert!(found.contains(&kinds[0]), "{found:?}");
}
