//! The steps of `cargo xtask check`, fastest first.

use crate::{
    cargo::cargo,
    gate::{self, Verdict},
    guards,
    torch_tests::{self, Installation},
    tree::Tree,
};
use std::{
    io,
    path::Path,
    process::{Command, Output},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// One step that is a cargo command.
pub(crate) struct CargoStep<'a> {
    pub(crate) name: &'static str,
    pub(crate) arguments: &'a [&'a str],
    pub(crate) environment: &'a [(&'a str, &'a str)],
}

const FORMAT: CargoStep<'_> =
    CargoStep { name: "format", arguments: &["fmt", "--all", "--check"], environment: &[] };

/// Clippy precedes `doc`, which reuses its checked dependencies.
const BUILDS: [CargoStep<'_>; 3] = [
    CargoStep {
        name: "clippy",
        arguments: &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
        environment: &[],
    },
    CargoStep { name: "test", arguments: &["test", "--workspace"], environment: &[] },
    CargoStep {
        name: "doc",
        arguments: &["doc", "--workspace", "--no-deps"],
        environment: &[("RUSTDOCFLAGS", "-D warnings")],
    },
];

/// Runs every step in `root`; stops at the first failure.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let (mut times, begin) = (Vec::new(), Instant::now());
    let torch = Installation::start(root); // it takes a minute, while cargo compiles
    times.push(timed(FORMAT.name, || FORMAT.run(root))?.0);
    times.push(timed("guard", || guards::run(&Tree::read(root)?))?.0);
    for step in &BUILDS {
        times.push(timed(step.name, || step.run(root))?.0);
    }
    times.push(timed("torch", || torch_tests::run(root, torch))?.0);
    // they occupy one core, and the gate waits for processes
    let python = BackgroundStep::start(root, "python", "python-tests");
    let gate = timed("gate", || gate::run(root, &["--if-possible", "--quick"]));
    times.push(python.finish()?);
    let (time, verdict) = gate?;
    times.push(time);
    match verdict {
        Verdict::Passed => println!("\nall of CI passes"),
        Verdict::NotRun(why) => {
            println!("\nall of CI passes except the kernel gate, WHICH DID NOT RUN: {why}");
        }
    }
    for (name, duration) in &times {
        println!("  {name:8} {:6.1} s", duration.as_secs_f64());
    }
    println!("  {:8} {:6.1} s", "total", begin.elapsed().as_secs_f64());
    Ok(())
}

/// A task of this program that runs beside other steps. Its output is printed when they have ended.
struct BackgroundStep {
    name: &'static str,
    task: JoinHandle<(Duration, io::Result<Output>)>,
}

impl BackgroundStep {
    fn start(root: &Path, name: &'static str, task: &'static str) -> Self {
        let root = root.to_owned();
        let run = move || {
            let start = Instant::now();
            let program = std::env::current_exe();
            let output = program.and_then(|path| Command::new(path).arg(task).current_dir(root).output());
            (start.elapsed(), output)
        };
        Self { name, task: thread::spawn(run) }
    }

    fn finish(self) -> Result<(&'static str, Duration), String> {
        let name = self.name;
        let (duration, output) = self.task.join().map_err(|_| format!("step `{name}` panicked"))?;
        let output = output.map_err(|why| format!("step `{name}` does not start: {why}"))?;
        println!("\n== {name}: {:.1} s", duration.as_secs_f64());
        println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        match output.status.success() {
            true => Ok((name, duration)),
            false => Err(format!("step `{name}` failed: it ended with {}", output.status)),
        }
    }
}

/// Runs a step. Returns its name and duration, and its result.
pub(crate) fn timed<T>(
    name: &'static str,
    step: impl FnOnce() -> Result<T, String>,
) -> Result<((&'static str, Duration), T), String> {
    println!("\n== {name}");
    let start = Instant::now();
    let result = step();
    let duration = start.elapsed();
    println!("== {name}: {:.1} s", duration.as_secs_f64());
    let result = result.map_err(|why| format!("step `{name}` failed: {why}"))?;
    Ok(((name, duration), result))
}

impl CargoStep<'_> {
    pub(crate) fn run(&self, root: &Path) -> Result<(), String> {
        let words = self.environment.iter().map(|(name, value)| format!("{name}=\"{value}\" "));
        let spelled = format!("{}cargo {}", words.collect::<String>(), self.arguments.join(" "));
        println!("{spelled}");
        let status = cargo()
            .args(self.arguments)
            .envs(self.environment.iter().copied())
            .current_dir(root)
            .status()
            .map_err(|why| format!("`{spelled}` does not start: {why}"))?;
        if status.success() { Ok(()) } else { Err(format!("`{spelled}` ended with {status}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::{BackgroundStep, CargoStep, timed};
    use std::path::Path;

    #[test]
    fn a_failed_step_reports_its_command_and_status() {
        let step = CargoStep {
            name: "nothing",
            arguments: &["no-such-command", "--all"],
            environment: &[("RUSTDOCFLAGS", "-D warnings")],
        };
        let why = timed(step.name, || step.run(Path::new("."))).unwrap_err();
        let words = "step `nothing` failed: `RUSTDOCFLAGS=\"-D warnings\" cargo no-such-command --all` ended with exit status: 101";
        assert_eq!(why, words);
        let version = CargoStep { name: "version", arguments: &["--version"], environment: &[] };
        assert_eq!(timed(version.name, || version.run(Path::new("."))).unwrap().0.0, "version");
    }

    #[test]
    fn a_step_in_the_background_reports_its_status() {
        // this program is the test binary, which takes the task for a filter, or refuses an option
        let run = |task| BackgroundStep::start(Path::new("."), "python", task).finish();
        assert_eq!(run("no::such::test").unwrap().0, "python");
        assert_eq!(
            run("--no-such-option").unwrap_err(),
            "step `python` failed: it ended with exit status: 101"
        );
    }
}
