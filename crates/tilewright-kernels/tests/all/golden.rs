//! PTX of the kernels: equal to the golden files, and deterministic across builds and processes.
//!
//! Golden files contain no source lines, so moving code does not change them. `cargo xtask gate --bless` rewrites
//! them.

use std::{collections::BTreeSet, path::Path, process::Command, sync::LazyLock};
use tilewright_kernels::{all, golden_texts};
use tilewright_ptx::text::ptx;

/// PTX of every kernel for every architecture, with lines of the source.
fn every_text() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(fresh_text);
    &TEXT
}

/// [`every_text`] of kernels that are built anew.
fn fresh_text() -> String {
    let of = |entry: &tilewright_kernels::KernelEntry| {
        let kernel = (entry.build)().unwrap();
        entry.archs.iter().map(|&arch| ptx(&kernel, arch).unwrap()).collect::<String>()
    };
    all().iter().map(of).collect()
}

#[test]
fn golden_files_match() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let texts = golden_texts().unwrap();
    let files =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let expected: BTreeSet<String> = texts.iter().map(|(file, _)| file.clone()).collect();
    assert_eq!(files.collect::<BTreeSet<_>>(), expected, "the files of golden/");
    for (file, text) in texts {
        let golden = std::fs::read_to_string(folder.join(&file)).unwrap();
        if golden == text {
            continue;
        }
        let differ = |&(_, (was, is)): &(usize, (&str, &str))| was != is;
        let (at, (was, is)) = (1..)
            .zip(golden.lines().chain(["the end"]).zip(text.lines().chain(["the end"])))
            .find(differ)
            .unwrap_or((0, ("", "other ends of lines")));
        panic!(
            "golden/{file}:{at}:\n  was {}\n  is  {}\nif that is meant: cargo xtask gate --bless",
            was.trim(),
            is.trim()
        );
    }
}

#[test]
fn builds_are_deterministic() {
    assert!(every_text() == fresh_text(), "two builds in one process differ");
}

#[test]
fn processes_print_the_same_text() {
    let mut other = Command::new(std::env::current_exe().unwrap());
    let output =
        other.args(["--ignored", "--exact", "golden::print_every_text", "--nocapture"]).output().unwrap();
    let there = String::from_utf8(output.stdout).unwrap();
    assert!(there.contains(every_text()), "another process prints something else");
}

#[test]
#[ignore = "not a test of its own: read by `processes_print_the_same_text`"]
fn print_every_text() {
    println!("{}", every_text());
}

#[test]
fn source_lines_are_relative_to_the_repository() {
    let text = every_text();
    let files: BTreeSet<&str> = text.lines().filter_map(|line| line.strip_prefix(".file ")).collect();
    assert!(files.len() >= 3, "kernels have lines of the source: {files:?}");
    for file in files {
        assert!(file.contains(" \"crates/tilewright-"), "{file} is not a path from the root");
    }
    let golden = golden_texts().unwrap();
    let source = |line: &str| line.contains(".loc") || line.contains(".file") || line.contains(".rs");
    assert!(
        !golden.iter().any(|(_, text)| text.lines().any(source)),
        "golden texts name lines of the source"
    );
}
