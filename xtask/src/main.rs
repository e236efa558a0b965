//! Tasks of the project: `cargo xtask check` is all of CI.
#![forbid(unsafe_code)]

mod bundle;
mod cargo;
mod comments;
mod conformance;
mod engines;
mod fuzz;
mod gate;
mod guards;
mod metrics;
mod mutants;
mod rust_source;
mod safety;
mod steps;
mod text;
mod torch_tests;
mod tree;
mod types;
mod walks;
mod wheel;
mod wheel_kernels;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};
use tree::Tree;

const HELP: &str = "\
Tasks of the project.

Usage: cargo xtask <TASK>

Tasks:
  check         all of CI: format, guards, clippy, tests, documentation, Python tests, tests with torch, gate; stops at the first failure
  guard         project conventions; each guard first proves that it reports planted violations
  metrics       size and readability in numbers; --list prints the places, --bless lowers the limits and raises those of NAMEs
  gate          assembles every instruction and kernel and checks the machine code; installs the assembler if needed;
                --bless records the present numbers, --if-possible passes without the tools, --quick measures sm_90 and the
                first architecture of each kernel only, NAME ... only kernels whose names begin so
  bundle        GPU tests and benches in target/bundle, for a machine with a GPU and without cargo
  conformance   attention against its oracle on every instruction set of this machine, with the number of cases; --all runs the
                full product of the factors
  fuzz          runs the readers of files on mutated inputs: --seconds N per target, --seed N, names of targets
  wheel         the Python wheel for manylinux_2_28 in target/wheels, at most 12 MB, with machine code for sm_90, and that of
                tilewright-as-flashinfer; needs Python 3 and its package registry; `wheel aarch64` builds for that processor
  sdist         the Python source distribution in target/wheels/sdist; `pip wheel` builds it with Rust
  python-tests  runs the Python tests on the library of the development profile; prints why if it cannot
  torch-tests   our tests that need torch, and a seeded sample of FlashInfer's on the CPU, with torch in target/python-torch;
                prints why if it cannot
  flashinfer-tests CHECKOUT
                a sample of FlashInfer's own tests on the CPU: --gpu, --per-file N, --sample-seed N, --largest N, --shard I/N,
                --seconds S, --outcomes FILE, --skip-outcomes FILE
  candle        format, clippy and tests of the workspace in examples: the adapter for candle and its example; not part of check
  package       packages the library crates and builds each from its package; not part of check
  mutants ir    runs mutants of the kernels in the simulator: --kernel NAME, --sample N; records the survivors
  mutants host  runs cargo-mutants on the schedule, masks, the CPU merge and the radix tree; records the survivors
";

/// The folder of build outputs: `CARGO_TARGET_DIR`, by default `root/target`.
fn target(root: &Path) -> PathBuf {
    root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

fn main() -> ExitCode {
    // Read at run time, because two checkouts may share one target folder.
    let package = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let Some(root) = Path::new(&package).parent() else {
        eprintln!("error: run it as `cargo xtask`, which sets CARGO_MANIFEST_DIR");
        return ExitCode::from(2);
    };
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["check"] => steps::check(root),
        ["guard"] => Tree::read(root).and_then(|tree| guards::run(&tree)),
        ["gate", ref rest @ ..] => gate::run(root, rest).map(drop),
        ["bundle"] => bundle::run(root),
        ["conformance", ref rest @ ..] => conformance::run(root, rest),
        ["fuzz", ref rest @ ..] => fuzz::run(root, rest),
        ["metrics", ref rest @ ..] => metrics::run(root, rest),
        ["candle"] => engines::candle(root),
        ["package"] => engines::package(root),
        ["wheel"] => wheel::build(root, None),
        ["wheel", processor] => wheel::build(root, Some(processor)),
        ["sdist"] => wheel::sdist(root),
        ["flashinfer-tests", checkout, ref rest @ ..] => wheel::flashinfer(root, checkout, rest),
        ["python-tests"] => wheel::test(root),
        ["torch-tests"] => torch_tests::run(root, torch_tests::Installation::start(root)),
        ["mutants", ref rest @ ..] => mutants::run(root, rest),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprintln!("error: `cargo xtask {}` is no task\n\n{HELP}", arguments.join(" "));
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("\nerror: {message}");
            ExitCode::FAILURE
        }
    }
}
