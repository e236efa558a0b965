//! Mutants of kernels, run in the simulator by the tests of the kernels crate and by the engine's tests on the simulated backend.
//!
//! 1. Builds the tests with the feature `mutation` of tilewright-ptx.
//! 2. Runs each test alone: records its duration, and the mutations of the kernels that it launches.
//! 3. Samples mutations per kernel and runs the tests that execute them, fastest first, until one fails.
//!
//! A mutation applies to all configurations of a kernel, whose names begin alike. A test that exceeds its time limit has detected the mutant.

use super::{Record, Score, Survivor};
use crate::{cargo, gate::parallel};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

/// Packages with tests that launch kernels in the simulator, and prefixes of these tests.
const PACKAGES: [(&str, &[&str]); 2] =
    [("tilewright-kernels", &[""]), ("tilewright-cuda", &["conformance::", "plan_on_device::"])];

/// Tests on a GPU.
const EXCLUDED: &str = "::gpu::";

/// The options of `cargo xtask mutants ir`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// The kernels to mutate; all if empty.
    kernels: Vec<String>,
    /// Mutants per kernel.
    sample: usize,
}

impl Options {
    pub(super) fn parse(arguments: &[&str]) -> Result<Self, String> {
        let mut options = Self { kernels: Vec::new(), sample: 20 };
        for option in arguments.chunks(2) {
            match option {
                ["--kernel", name] => options.kernels.push((*name).to_owned()),
                ["--sample", number] => {
                    options.sample =
                        number.parse().map_err(|_| format!("--sample: `{number}` is not a number"))?;
                }
                _ => return Err(format!("`{}`: expected `--kernel NAME` or `--sample N`", option.join(" "))),
            }
        }
        Ok(options)
    }
}

/// A test function of a test binary.
struct Test {
    package: &'static str,
    binary: PathBuf,
    name: String,
    /// The maximum duration of a run.
    limit: Duration,
}

/// The tests that execute each mutation of a kernel, fastest first, as indices.
type Mutations = BTreeMap<String, Vec<usize>>;

pub(super) fn run(root: &Path, options: &Options) -> Result<(), String> {
    let mut tests = tests(root)?;
    let kernels = dry_run(root, &mut tests)?;
    // kernels with fast tests first
    let mut kernels: Vec<(String, Mutations)> = kernels.into_iter().collect();
    kernels.sort_by_key(|(_, mutations)| mutations.values().flatten().map(|&at| tests[at].limit).max());
    for (kernel, mutations) in &kernels {
        println!("{kernel:40} {:6} mutations", mutations.len());
    }
    let known = |name: &str| kernels.iter().any(|(kernel, _)| kernel == name);
    if let Some(unknown) = options.kernels.iter().find(|name| !known(name)) {
        return Err(format!(
            "--kernel {unknown}: no test executes this kernel, expected one of the list above"
        ));
    }
    let mut record = Record::read(root, "ir.csv", "kernel")?;
    record.retain(known);
    let (mut mutants, mut killed) = (0, 0);
    for (kernel, mutations) in &kernels {
        if !options.kernels.is_empty() && !options.kernels.contains(kernel) {
            continue;
        }
        let start = Instant::now();
        let sample = sample(mutations.keys().map(String::as_str), options.sample);
        let done = AtomicUsize::new(0);
        let results = parallel(&sample, |id| {
            let action = format!("run {kernel} {id}");
            let survives = mutations[*id].iter().all(|&at| tests[at].passes(root, &action));
            eprint!("\r{kernel} {}/{} ", done.fetch_add(1, Ordering::Relaxed) + 1, sample.len());
            survives
        });
        let survivors: Vec<Survivor> = sample
            .iter()
            .zip(results)
            .filter(|(_, survives)| *survives)
            .map(|(id, _)| survivor(id))
            .collect();
        let score = Score { mutants: sample.len(), survivors };
        let of = score.mutants - record.equivalent(kernel, &score);
        (mutants, killed) = (mutants + of, killed + score.killed());
        let seconds = start.elapsed().as_secs_f64();
        println!("\r{kernel:40} {:3} of {of:3} killed, {seconds:6.1} s", score.killed());
        record.set(kernel, &score)?;
    }
    println!("{killed} of {mutants} killed");
    Ok(())
}

/// Builds the test binaries and lists their tests.
fn tests(root: &Path) -> Result<Vec<Test>, String> {
    let mut tests = Vec::new();
    for (package, prefixes) in PACKAGES {
        let targets = [package, "--test", "all", "--features", "tilewright-ptx/mutation"];
        let messages = cargo::build(root, &["test", "--no-run"], &targets)?;
        let Some(binary) = messages.iter().find_map(|message| message["executable"].as_str()) else {
            return Err(format!("{package} has no tests"));
        };
        let binary = PathBuf::from(binary);
        let list = Command::new(&binary).arg("--list").output();
        let list = list.map_err(|why| format!("{}: {why}", binary.display()))?;
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        let mut names = super::test_names(&list);
        names.retain(|name| !name.contains(EXCLUDED));
        super::check_filters(package, prefixes.iter().copied(), |prefix| {
            names.iter().any(|name| name.starts_with(prefix))
        })?;
        names.retain(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
        tests.extend(names.into_iter().map(|name| Test {
            package,
            binary: binary.clone(),
            name: name.to_owned(),
            limit: Duration::from_secs(600),
        }));
    }
    Ok(tests)
}

/// Runs each test without mutants; sorts the tests by duration and returns the mutations of each kernel.
fn dry_run(root: &Path, tests: &mut [Test]) -> Result<BTreeMap<String, Mutations>, String> {
    let folder = tempfile::tempdir().map_err(|why| format!("no folder for temporary files: {why}"))?;
    let lists: Vec<PathBuf> = (0..tests.len()).map(|at| folder.path().join(at.to_string())).collect();
    let runs: Vec<(&Test, &PathBuf)> = tests.iter().zip(&lists).collect();
    let done = AtomicUsize::new(0);
    let results = parallel(&runs, |(test, list)| {
        let start = Instant::now();
        let passes = test.passes(root, &format!("list {}", list.display()));
        eprint!("\rdry run {}/{} ", done.fetch_add(1, Ordering::Relaxed) + 1, runs.len());
        (passes, start.elapsed())
    });
    eprintln!();
    let failed: Vec<&str> = tests
        .iter()
        .zip(&results)
        .filter(|(_, result)| !result.0)
        .map(|(test, _)| test.name.as_str())
        .collect();
    if !failed.is_empty() {
        return Err(format!("tests fail without mutants: {}", failed.join(", ")));
    }
    let mut order: Vec<usize> = (0..tests.len()).collect();
    order.sort_by_key(|&at| results[at].1);
    let mut kernels: BTreeMap<String, Mutations> = BTreeMap::new();
    for at in order {
        tests[at].limit = 10 * results[at].1 + Duration::from_secs(10);
        let text = fs::read_to_string(&lists[at]).unwrap_or_default();
        for (kernel, id) in text.lines().filter_map(|line| line.split_once('\t')) {
            kernels.entry(kernel.to_owned()).or_default().entry(id.to_owned()).or_default().push(at);
        }
    }
    Ok(kernels)
}

impl Test {
    /// Runs the test with an action of the simulator's hook. Returns whether it passes within its limit.
    fn passes(&self, root: &Path, action: &str) -> bool {
        let child = Command::new(&self.binary)
            .args(["--exact", &self.name, "--test-threads", "1"])
            .env("TILEWRIGHT_MUTANT", action)
            .env_remove("RUST_BACKTRACE")
            .current_dir(root.join("crates").join(self.package))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(mut child) = child else { return false };
        let end = Instant::now() + self.limit;
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                _ => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return false;
                }
            }
        }
    }
}

/// Up to `size` mutations: pseudo-random with a fixed seed, evenly over the kinds, and one copy per site before the next.
fn sample<'a>(ids: impl Iterator<Item = &'a str>, size: usize) -> Vec<&'a str> {
    let mut sites: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for id in ids {
        sites.entry(id.split(", copy ").next().unwrap_or_default()).or_default().push(id);
    }
    let mut kinds: BTreeMap<&str, Vec<(usize, &str)>> = BTreeMap::new();
    for (site, mut copies) in sites {
        copies.sort_by_key(|id| hash(id));
        kinds
            .entry(site.split(':').next().unwrap_or_default())
            .or_default()
            .extend(copies.into_iter().enumerate());
    }
    for ids in kinds.values_mut() {
        ids.sort_by_key(|(copy, id)| (*copy, hash(id)));
    }
    let largest = kinds.values().map(Vec::len).max().unwrap_or(0);
    let rounds = (0..largest).flat_map(|at| kinds.values().filter_map(move |ids| Some(ids.get(at)?.1)));
    rounds.take(size).collect()
}

/// FNV-1a, which is stable across toolchains.
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Splits `statement, at file:line:column, copy 0`.
fn survivor(id: &str) -> Survivor {
    let (mutant, rest) = id.split_once(", at ").unwrap_or((id, ""));
    let (at, copy) = rest.split_once(", ").unwrap_or((rest, ""));
    Survivor { mutant: format!("{mutant}, {copy}"), at: at.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::{Options, Test, sample, survivor};
    use std::{collections::BTreeSet, process::Command, time::Duration};

    #[test]
    fn options_are_parsed() {
        let options = Options::parse(&["--sample", "5", "--kernel", "a"]).unwrap();
        assert_eq!(options, Options { kernels: vec!["a".to_owned()], sample: 5 });
        assert_eq!(Options::parse(&["--sample", "x"]).unwrap_err(), "--sample: `x` is not a number");
        let why = Options::parse(&["--kernel"]).unwrap_err();
        assert_eq!(why, "`--kernel`: expected `--kernel NAME` or `--sample N`");
    }

    #[test]
    fn samples_are_repeatable_and_cover_all_kinds() {
        let id = |at: usize| format!("{}: {}, copy {}", ["a", "b", "c"][at % 3], at % 6, at / 6);
        let ids: Vec<String> = (0..48).map(id).collect();
        let take = |size| sample(ids.iter().map(String::as_str), size);
        let kinds: Vec<&str> = take(6).iter().map(|id| &id[..1]).collect();
        assert_eq!(kinds, ["a", "b", "c", "a", "b", "c"]);
        let sites: BTreeSet<&str> = take(6).iter().map(|id| &id[..4]).collect();
        assert_eq!(sites.len(), 6);
        assert_eq!(take(6), take(6));
        assert_eq!(take(99).len(), 48);
    }

    #[test]
    fn survivors_name_statement_and_line() {
        let found = survivor("swap operands: sub.u32 $d, $0, $1, operand 1, at src/a.rs:3:4, copy 7");
        assert_eq!(found.mutant, "swap operands: sub.u32 $d, $0, $1, operand 1, copy 7");
        assert_eq!(found.at, "src/a.rs:3:4");
    }

    #[cfg(unix)]
    #[test]
    fn failures_and_hangs_are_not_passes() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("crates/a")).unwrap();
        let passes = |script: &str, seconds| {
            let binary = root.path().join("binary");
            // written by another process: a fork of another test could inherit a descriptor, and the file would be busy
            let write = "printf '#!/bin/sh\\n%s\\n' \"$2\" >\"$1\" && chmod 755 \"$1\"";
            let written = Command::new("sh").args(["-c", write, "sh"]).arg(&binary).arg(script).status();
            assert!(written.is_ok_and(|status| status.success()));
            let test =
                Test { package: "a", binary, name: "a".to_owned(), limit: Duration::from_secs(seconds) };
            test.passes(root.path(), "run a b")
        };
        assert!(passes("test \"$2 $TILEWRIGHT_MUTANT\" = 'a run a b'", 60));
        assert!(!passes("exit 101", 60));
        assert!(!passes("exec sleep 60", 1), "a hang");
    }
}
