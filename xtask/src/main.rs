//! The project's own chores: `cargo xtask check` is all of CI.

mod conformance;
mod faults;
mod guards;
mod lines;
mod rust_source;
mod steps;
mod tree;

use std::{path::Path, process::ExitCode};
use tree::Tree;

const HELP: &str = "\
The project's own chores.

Usage: cargo xtask <CHORE>

Chores:
  check         all of CI: format, guards, clippy, tests, documentation; stops at the first failure
  guard         the home-made guards alone; each first proves that it catches planted violations
  conformance   attention against its oracle on every instruction set of this machine, and the number of cases
  faults        plants each fault of tests/faults/ alone and sees its test fail; [AREA...] for some, --list to see them
  lines         sizes of the Rust files: sum, median, 90th percentile and largest, per crate
";

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
        ["conformance"] => conformance::run(root),
        ["faults", ref rest @ ..] => faults::run(root, rest),
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
