//! Mutants of host code, run by cargo-mutants: the schedule, masks, the CPU merge and the radix tree.

use super::{Record, Score, Survivor, check_filters, test_names};
use crate::cargo::{cargo, output};
use std::{collections::BTreeMap, fs, path::Path};

/// Files of a package, and the tests that cover them.
struct Group {
    package: &'static str,
    files: &'static [&'static str],
    /// Options that select the test binaries.
    binaries: &'static [&'static str],
    /// Filters on the tests.
    tests: &'static [&'static str],
}

const GROUPS: [Group; 2] = [
    Group {
        package: "tilewright",
        files: &[
            "crates/tilewright/src/attention/schedule.rs",
            "crates/tilewright/src/attention/schedule/**",
            "crates/tilewright/src/attention/mask.rs",
            "crates/tilewright/src/cpu/simd/merge.rs",
        ],
        binaries: &["--test=all", "--test=team"],
        tests: &[
            "schedule", "mask", "merge", "cascade", "invariants", "lengths", "edges", "replan",
            "shared_pages", "errors",
        ],
    },
    Group {
        package: "tilewright-serve",
        files: &["crates/tilewright-serve/src/radix/**"],
        binaries: &["--lib", "--test=all"],
        tests: &["radix"],
    },
];

/// Runs cargo-mutants on each group and records the outcomes by file.
pub(super) fn run(root: &Path) -> Result<(), String> {
    let version = cargo().args(["mutants", "--version"]).output();
    if !version.is_ok_and(|output| output.status.success()) {
        return Err(
            "cargo-mutants is missing; install it with `cargo install cargo-mutants --locked`".to_owned()
        );
    }
    let mut record = Record::read(root, "host.csv", "file")?;
    for group in &GROUPS {
        check_tests(root, group)?;
        let output = crate::target(root).join("mutants").join(group.package);
        fs::create_dir_all(&output).map_err(|why| format!("{}: {why}", output.display()))?;
        let mut command = cargo();
        command.args(["mutants", "--package", group.package, "--jobs", "2", "--output"]).arg(&output);
        command.args(group.files.iter().flat_map(|file| ["--file", file]));
        command.arg("--").args(group.binaries).arg("--").args(group.tests);
        let status =
            command.current_dir(root).status().map_err(|why| format!("cargo does not start: {why}"))?;
        // 2 and 3 report missed mutants and timeouts
        if !matches!(status.code(), Some(0 | 2 | 3)) {
            return Err(format!("cargo mutants ended with {status}"));
        }
        let list = |name: &str| fs::read_to_string(output.join("mutants.out").join(name)).unwrap_or_default();
        let scores = scores(&(list("caught.txt") + &list("timeout.txt")), &list("missed.txt"));
        for (file, score) in scores {
            println!(
                "{file:60} {:4} of {:4} killed",
                score.killed(),
                score.mutants - record.equivalent(&file, &score)
            );
            record.set(&file, &score)?;
        }
    }
    Ok(())
}

/// Lists the tests of a group, and checks that each of its filters selects one.
fn check_tests(root: &Path, group: &Group) -> Result<(), String> {
    let mut command = cargo();
    command.args(["test", "--quiet", "--package", group.package]).args(group.binaries).args(["--", "--list"]);
    let list = output(command.current_dir(root))
        .map_err(|why| format!("the tests of {} are not listed: {why}", group.package))?;
    let names = test_names(&list);
    check_filters(group.package, group.tests.iter().copied(), |filter| {
        names.iter().any(|name| name.contains(filter))
    })
}

/// The scores by file, from lists with one mutant `file:line:column: change` per line.
fn scores(killed: &str, missed: &str) -> BTreeMap<String, Score> {
    let mut scores: BTreeMap<String, Score> = BTreeMap::new();
    for (lines, survives) in [(killed, false), (missed, true)] {
        for (at, mutant) in lines.lines().filter_map(|line| line.split_once(": ")) {
            let file = at.split(':').next().unwrap_or_default();
            let score = scores.entry(file.to_owned()).or_default();
            score.mutants += 1;
            if survives {
                score.survivors.push(Survivor { mutant: mutant.to_owned(), at: at.to_owned() });
            }
        }
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::scores;

    #[test]
    fn outcomes_are_counted_by_file() {
        let killed = "src/a.rs:1:2: replace f with 0\nsrc/b.rs:3:4: replace < with <= in g\n";
        let scores = scores(killed, "src/a.rs:5:6: replace + with - in f\n");
        let counts: Vec<_> = scores.values().map(|score| (score.mutants, score.survivors.len())).collect();
        assert_eq!(counts, [(2, 1), (1, 0)]);
        let survivor = &scores["src/a.rs"].survivors[0];
        assert_eq!(
            (survivor.at.as_str(), survivor.mutant.as_str()),
            ("src/a.rs:5:6", "replace + with - in f")
        );
    }
}
