//! Builds a test target of the scratch copy and runs one test of it, with a time limit.

use super::fault::Fault;
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// What builds and runs fastest, a build for each fault: attention is much slower without any optimisation, and
/// optimising all of it again takes longer than it saves.
const PROFILE: [&str; 3] = ["profile.dev.opt-level=1", "profile.dev.debug=0", "profile.dev.incremental=true"];

/// How often it is looked whether a test has ended.
const TICK: Duration = Duration::from_millis(10);

/// The executable of a test target.
#[derive(Debug)]
pub(super) struct Built {
    executable: PathBuf,
    /// Where `cargo test` runs it: the package's folder.
    folder: PathBuf,
}

/// How a test ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    Passed,
    Failed,
    /// There is no test of this name, or it is ignored.
    Absent,
    /// It was still running at the time limit.
    Hung,
}

/// A line of `--message-format=json`.
#[derive(Deserialize)]
struct Message {
    manifest_path: Option<PathBuf>,
    executable: Option<PathBuf>,
    message: Option<Diagnostic>,
}

#[derive(Deserialize)]
struct Diagnostic {
    level: String,
    message: String,
}

/// Builds the target of `fault` in the tree at `root`.
///
/// # Errors
/// What the compiler, or cargo, says first.
pub(super) fn build(root: &Path, output: &Path, fault: &Fault) -> Result<Built, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "--quiet", "--no-run", "--message-format=json", "--package", &fault.package]);
    match fault.target.as_str() {
        "lib" => command.arg("--lib"),
        target => command.args(["--test", target]),
    };
    for option in PROFILE {
        command.args(["--config", option]);
    }
    command.env("CARGO_TARGET_DIR", output).env_remove("CARGO_INCREMENTAL").current_dir(root);
    let built = command.output().map_err(|why| format!("`cargo test` does not start: {why}"))?;
    let messages: Vec<Message> =
        built.stdout.split(|&b| b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    if !built.status.success() {
        let said = messages.into_iter().filter_map(|message| message.message);
        let error = said.into_iter().find(|message| message.level == "error").map(|message| message.message);
        let cargo_said = || String::from_utf8_lossy(&built.stderr).trim().to_owned();
        return Err(error.unwrap_or_else(cargo_said));
    }
    let test = messages.into_iter().find_map(|message| Some((message.executable?, message.manifest_path?)));
    let (executable, manifest) = test.ok_or("cargo built no test")?;
    Ok(Built { executable, folder: manifest.parent().unwrap_or(root).to_owned() })
}

impl Built {
    /// Runs one test; also returns how long it took.
    pub(super) fn run(&self, test: &str, limit: Duration) -> Result<(End, Duration), String> {
        let mut command = Command::new(&self.executable);
        command.args(["--exact", test]).current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        // what it prints may be longer than a pipe holds, and only the end matters
        let text = |why: std::io::Error| format!("{} does not run: {why}", self.executable.display());
        let printed = tempfile::NamedTempFile::new().map_err(text)?;
        let start = Instant::now();
        let child =
            command.stdout(printed.reopen().map_err(text)?).stderr(Stdio::null()).spawn().map_err(text)?;
        let Some(status) = wait(child, limit).map_err(text)? else { return Ok((End::Hung, start.elapsed())) };
        let time = start.elapsed();
        let end = match status.success() {
            false => End::Failed,
            true => {
                let bytes = std::fs::read(printed.path()).map_err(text)?;
                let passed = String::from_utf8_lossy(&bytes).contains("test result: ok. 1 passed");
                if passed { End::Passed } else { End::Absent }
            }
        };
        Ok((end, time))
    }
}

/// How the process ended; one that runs longer than `limit` is ended, and gives `None`.
fn wait(mut child: Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(TICK);
    }
}

#[cfg(test)]
mod tests {
    use super::{Built, Duration, End};

    /// Named here, run by the tests below: the one that passes.
    #[test]
    fn passes() {}

    fn this() -> Built {
        let folder = env!("CARGO_MANIFEST_DIR").into();
        Built { executable: std::env::current_exe().unwrap(), folder }
    }

    #[test]
    fn a_test_that_is_there_passes_and_one_that_is_not_is_absent() {
        let end = |test: &str| this().run(test, Duration::from_secs(60)).unwrap().0;
        assert_eq!(end("faults::trial::tests::passes"), End::Passed);
        assert_eq!(end("faults::trial::tests::nowhere"), End::Absent);
    }

    #[test]
    fn what_fails_and_what_hangs_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, line: &str| {
            use std::os::unix::fs::PermissionsExt;
            let path = folder.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{line}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            let built = Built { executable: path, folder: folder.path().to_owned() };
            built.run("any", Duration::from_millis(300)).unwrap().0
        };
        assert_eq!(script("fails", "exit 101"), End::Failed);
        assert_eq!(script("hangs", "exec sleep 60"), End::Hung);
    }
}
