//! `cargo xtask conformance [--all]`: tests attention against the oracle on every instruction set of the machine and counts the
//! cases. With `--all` the factors of a problem are combined in full, without it in pairs.

use crate::cargo::cargo;
use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::Stdio,
};

const TESTS: [&str; 8] = ["test", "-p", "tilewright", "--test", "all", "--", "attention::", "--nocapture"];

/// Runs the suite in `root`; prints the number of cases per property and their sum.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let cases_to_run = match arguments {
        [] => "pairs",
        ["--all"] => "all",
        _ => return Err(format!("conformance: `{}`, expected no arguments or --all", arguments.join(" "))),
    };
    let mut command = cargo();
    command.args(TESTS).env("TILEWRIGHT_CONFORMANCE", cases_to_run).current_dir(root);
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(|why| format!("cargo does not start: {why}"))?;
    let (mut properties, mut total) = (0, 0);
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(|why| format!("the suite's output cannot be read: {why}"))?;
        if let Some(cases) = cases(&line) {
            (properties, total) = (properties + 1, total + cases);
            println!("{line}");
        } else if line.starts_with("test result") || line.contains("combinations in") {
            println!("{line}");
        }
    }
    let status = child.wait().map_err(|why| format!("the suite cannot be waited for: {why}"))?;
    println!("{total} cases of {properties} properties");
    if status.success() { Ok(()) } else { Err(format!("the suite ended with {status}")) }
}

/// The number in `property: 12 cases`.
fn cases(line: &str) -> Option<usize> {
    line.strip_suffix(" cases")?.rsplit_once(": ")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{cases, run};
    use std::path::Path;

    #[test]
    fn unknown_arguments_are_errors() {
        let why = run(Path::new("."), &["--every"]).unwrap_err();
        assert_eq!(why, "conformance: `--every`, expected no arguments or --all");
    }

    #[test]
    fn the_number_of_cases_is_parsed() {
        assert_eq!(cases("attention::masks::cpu::windows: 252 cases"), Some(252));
        assert_eq!(cases("cpu: 2 threads, AVX2: 13860 combinations in 3 s"), None);
        assert_eq!(cases("12 cases"), None);
    }
}
