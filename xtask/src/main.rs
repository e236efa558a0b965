//! The project's own chores: `cargo xtask check` is all of CI.

mod bundle;
mod conformance;
mod faults;
mod gate;
mod guards;
mod lines;
mod pictures;
mod rust_source;
mod steps;
mod tree;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};
use tree::Tree;

const HELP: &str = "\
The project's own chores.

Usage: cargo xtask <CHORE>

Chores:
  check         all of CI: format, guards, clippy, tests, documentation, gate; stops at the first failure
  guard         the home-made guards alone; each first proves that it catches planted violations
  gate          assembles every instruction and kernel and reads the machine code; installs the assembler if need be;
                --bless makes what is now what is expected, --if-possible passes where the tools are not to be had
  bundle        the GPU's tests and benches in target/bundle, for a machine with a GPU and without cargo
  conformance   attention against its oracle on every instruction set of this machine, and the number of cases
  faults        plants each fault of tests/faults/ alone and sees its test fail; [AREA...] for some, --list to see them
  pictures      draws the layouts of docs/tiles.md from the code; a test compares the files with what it draws
  lines         sizes of the Rust files: sum, median, 90th percentile and largest, per crate
";

/// The folder of build outputs, which `root/target` is if nothing else was asked for.
fn target(root: &Path) -> PathBuf {
    root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

fn main() -> ExitCode {
    // Asked at run time: a target folder may be shared by two checkouts.
    let package = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let Some(root) = Path::new(&package).parent() else {
        eprintln!("error: run it as `cargo xtask`, which says where the project is");
        return ExitCode::from(2);
    };
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["check"] => steps::check(root),
        ["guard"] => Tree::read(root).and_then(|tree| guards::run(&tree)),
        ["gate", ref rest @ ..] => gate::run(root, rest).map(drop),
        ["bundle"] => bundle::run(root),
        ["conformance"] => conformance::run(root),
        ["faults", ref rest @ ..] => faults::run(root, rest),
        ["pictures"] => pictures::run(root),
        ["lines"] => Tree::read(root).map(|tree| print!("{}", lines::report(&tree))),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprintln!("error: `cargo xtask {}` is no chore\n\n{HELP}", arguments.join(" "));
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
