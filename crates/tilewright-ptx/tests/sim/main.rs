//! The simulator: right kernels run with every seed, and for each kind of mistake a kernel that makes it is found out.

mod barriers;
mod clusters;
mod compute;
mod copies;
mod memory;
mod pipeline;
mod products;
mod races;
mod speed;

use tilewright_ptx::{
    build::Builder,
    ir::Kernel,
    sim::{Arg, Fault, FaultKind, Launch, Memory, Report},
};

/// Seeds of each test.
const SEEDS: u64 = 32;

/// A kernel.
fn kernel(threads: u32, body: impl FnOnce(&Builder)) -> Kernel {
    Builder::kernel("test", threads, body).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a kernel on one or more CTAs; the first parameter is the address of `words` words, which come back.
fn run(kernel: &Kernel, ctas: u32, words: &[u32], seed: u64) -> Result<(Vec<u32>, Report), Fault> {
    let mut memory = Memory::new();
    let address = memory.alloc_from(words);
    let args: &[Arg] = if kernel.params.is_empty() { &[] } else { &[Arg::U64(address)] };
    let report = Launch { kernel, grid: [ctas, 1, 1], args, seed }.run(&mut memory)?;
    Ok((memory.read(address, words.len())?, report))
}

/// With every seed these words come out.
#[track_caller]
fn gives(kernel: &Kernel, ctas: u32, words: &[u32], expected: &[u32]) {
    for seed in 0..SEEDS {
        match run(kernel, ctas, words, seed) {
            Ok((found, _)) => assert_eq!(found, expected, "seed {seed}"),
            Err(fault) => panic!("seed {seed}: {fault}"),
        }
    }
}

/// With every seed the kernel runs.
#[track_caller]
fn passes(kernel: &Kernel, ctas: u32) {
    for seed in 0..SEEDS {
        if let Err(fault) = run(kernel, ctas, &[0; 1024], seed) {
            panic!("seed {seed}: {fault}");
        }
    }
}

/// With every seed this mistake is found; one of the reports comes back.
#[track_caller]
fn finds(kind: FaultKind, kernel: &Kernel, ctas: u32) -> Fault {
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

/// With every seed one of these is found, the first with some.
#[track_caller]
fn finds_one_of(kinds: &[FaultKind], kernel: &Kernel) {
    let fault = |seed| run(kernel, 1, &[0; 1024], seed).expect_err("a fault").kind;
    let found: Vec<FaultKind> = (0..SEEDS).map(fault).collect();
    assert!(found.iter().all(|kind| kinds.contains(kind)), "{found:?}");
    assert!(found.contains(&kinds[0]), "{found:?}");
}
