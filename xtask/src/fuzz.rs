//! `cargo xtask fuzz`: each reader of files runs on mutations of its corpus, in a process with limited memory.
//!
//! 1. `tilewright-fuzz` and `tilewright` are built.
//! 2. Per target one process runs under an address-space limit and watches the time of each run.
//! 3. An input that panics, aborts, exhausts the memory or takes too long is copied to `target/fuzz/failures` and named.
//!    It belongs into `fuzz/corpus` once it is fixed.

use crate::{cargo, target};
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{SystemTime, UNIX_EPOCH},
};

/// Address space of a target's process, in KiB: 4 GiB.
const MEMORY_KIB: u64 = 4 << 20;

/// Seconds per target without `--seconds`.
const SECONDS: u64 = 60;

/// The options of `cargo xtask fuzz`.
#[derive(Debug, PartialEq)]
struct FuzzOptions {
    seconds: u64,
    seed: u64,
    /// Only these targets; all if empty.
    targets: Vec<String>,
}

impl FuzzOptions {
    fn parse(arguments: &[&str], now: u64) -> Result<Self, String> {
        let mut options = Self { seconds: SECONDS, seed: now, targets: Vec::new() };
        let mut arguments = arguments.iter();
        while let Some(&argument) = arguments.next() {
            let mut number = || {
                let value = arguments.next().ok_or_else(|| format!("fuzz: {argument} has no value"))?;
                value.parse().map_err(|_| format!("fuzz: {argument} {value}: expected a number"))
            };
            match argument {
                "--seconds" => options.seconds = number()?,
                "--seed" => options.seed = number()?,
                _ if argument.starts_with('-') => return Err(format!("fuzz: {argument} is no option")),
                name => options.targets.push(name.to_owned()),
            }
        }
        Ok(options)
    }
}

/// Runs the targets; the error lists the failed ones.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let options = FuzzOptions::parse(arguments, now)?;
    let (corpus, fixtures) = (root.join("fuzz/corpus"), root.join("tests/fixtures"));
    let all = folders(&corpus)?;
    if let Some(name) = options.targets.iter().find(|name| !all.contains(name)) {
        return Err(format!("fuzz: {name} is no target, expected {}", all.join(", ")));
    }
    let (programs, output) = (Programs::build(root)?, target(root).join("fuzz"));
    let session = FuzzSession { programs, corpus, fixtures, output, options };
    let mut failed = Vec::new();
    for name in all.iter().filter(|name| session.is_selected(name)) {
        match session.fuzz(name) {
            Ok(summary) => println!("{name:18} {summary}"),
            Err(reason) => {
                println!("{name:18} FAILED: {reason}");
                failed.push(name.as_str());
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("fuzz: {} failed", failed.join(", "))) }
}

/// Programs, folders and options of one call.
struct FuzzSession {
    programs: Programs,
    corpus: PathBuf,
    fixtures: PathBuf,
    output: PathBuf,
    options: FuzzOptions,
}

impl FuzzSession {
    fn is_selected(&self, name: &str) -> bool {
        self.options.targets.is_empty() || self.options.targets.iter().any(|target| target == name)
    }

    /// Runs one target; the error has the reason and the path of the input.
    fn fuzz(&self, name: &str) -> Result<String, String> {
        // In memory if possible: each run writes its input.
        let work = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let work = work.map_err(|why| format!("no work folder: {why}"))?;
        let output = limited(&self.programs.fuzzer)
            .arg(name)
            .args(["--seconds", &self.options.seconds.to_string(), "--seed", &self.options.seed.to_string()])
            .arg("--corpus")
            .arg(self.corpus.join(name))
            .arg("--fixtures")
            .arg(&self.fixtures)
            .arg("--work")
            .arg(work.path())
            .arg("--program")
            .arg(&self.programs.tilewright)
            .output()
            .map_err(|why| format!("the fuzzer does not start: {why}"))?;
        if output.status.success() {
            return Ok(format!("{}, seed {}", last_line(&output.stdout), self.options.seed));
        }
        let saved = self.save(name, &work.path().join("current"))?;
        Err(format!("{}: {}", reason(&output), saved.display()))
    }

    /// Copies the input to the folder of failures.
    fn save(&self, name: &str, input: &Path) -> Result<PathBuf, String> {
        let folder = self.output.join("failures");
        let saved = folder.join(format!("{name}-{}", self.options.seed));
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::copy(input, &saved))
            .map_err(|why| format!("the input cannot be saved as {}: {why}", saved.display()))?;
        Ok(saved)
    }
}

/// `program` under the limit of the address space. The shell's `ulimit` needs no unsafe code here.
fn limited(program: &Path) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("ulimit -v {MEMORY_KIB} && exec \"$0\" \"$@\"")).arg(program);
    command
}

/// The last message of the process, or its signal.
fn reason(output: &Output) -> String {
    match (output.status.code(), last_line(&output.stderr)) {
        (Some(_), message) if !message.is_empty() => message,
        (_, message) => format!("{}{}{message}", output.status, if message.is_empty() { "" } else { ": " }),
    }
}

fn last_line(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().lines().last().unwrap_or_default().to_owned()
}

/// The names of the folders in `dir`, sorted.
fn folders(dir: &Path) -> Result<Vec<String>, String> {
    let fail = |why: std::io::Error| format!("{}: {why}", dir.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        names.push(entry.map_err(fail)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// The programs of a session.
struct Programs {
    fuzzer: PathBuf,
    tilewright: PathBuf,
}

impl Programs {
    /// Builds both at once, so that they share the features of the engine.
    fn build(root: &Path) -> Result<Self, String> {
        let packages = ["tilewright-fuzz", "--package", "tilewright-cli", "--bins"];
        let messages = cargo::build(root, &["build"], &packages)?;
        let find = |name: &str| {
            let mut programs = messages.iter().filter(|message| message["target"]["name"] == name);
            let program = programs.find_map(|message| message["executable"].as_str());
            program.map(PathBuf::from).ok_or_else(|| format!("cargo built no {name}"))
        };
        Ok(Self { fuzzer: find("tilewright-fuzz")?, tilewright: find("tilewright")? })
    }
}

#[cfg(test)]
mod tests {
    use super::{FuzzOptions, MEMORY_KIB, limited, reason};
    use std::path::Path;

    #[test]
    fn options_are_parsed_or_refused() {
        let parse = |arguments: &[&str]| FuzzOptions::parse(arguments, 7);
        let all = FuzzOptions { seconds: 60, seed: 7, targets: Vec::new() };
        assert_eq!(parse(&[]), Ok(all));
        let some = FuzzOptions { seconds: 5, seed: 9, targets: vec!["config".to_owned()] };
        assert_eq!(parse(&["--seconds", "5", "config", "--seed", "9"]), Ok(some));
        assert_eq!(parse(&["--seconds"]), Err("fuzz: --seconds has no value".to_owned()));
        assert_eq!(parse(&["--seconds", "x"]), Err("fuzz: --seconds x: expected a number".to_owned()));
        assert_eq!(parse(&["--fast"]), Err("fuzz: --fast is no option".to_owned()));
    }

    #[test]
    fn processes_are_limited_and_their_failures_have_a_reason() {
        let output = limited(Path::new("sh")).args(["-c", "ulimit -v"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), MEMORY_KIB.to_string());
        let failed = limited(Path::new("sh")).args(["-c", "echo one >&2; echo two >&2; exit 1"]).output();
        assert_eq!(reason(&failed.unwrap()), "two");
        let killed = limited(Path::new("sh")).args(["-c", "kill -ABRT $$"]).output().unwrap();
        assert!(reason(&killed).starts_with("signal: 6 (SIGABRT)"), "{}", reason(&killed));
    }
}
