//! Fuzzing of one reader: mutates its corpus, runs the reader on each input, and stops at the first failure.
//!
//! ```text
//! tilewright-fuzz TARGET --seconds N --seed S --corpus DIR --fixtures DIR --work DIR [--program PATH]
//! ```
//!
//! Before each run the input is in `WORK/current`, so it survives an abort. The process fails with the reason on a panic, and
//! when a run takes longer than [`MAX_RUN`].
//! `cargo xtask fuzz` starts one process per target, with a limit of its address space.
#![forbid(unsafe_code)]

mod mutate;
mod targets;

use mutate::Mutator;
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use targets::Target;

/// The longest permitted run.
const MAX_RUN: Duration = Duration::from_secs(2);

/// The file in the work folder that holds the input of the present run.
const CURRENT: &str = "current";

/// The arguments of a session.
struct Session {
    target: Target,
    seconds: u64,
    seed: u64,
    corpus: PathBuf,
    work: PathBuf,
}

fn main() -> ExitCode {
    match Session::parse(std::env::args().skip(1)).and_then(|session| session.run()) {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

impl Session {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let target = arguments.next().ok_or("there is no target")?;
        let mut options = BTreeMap::new();
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} has no value"))?;
            options.insert(name, value);
        }
        let mut take = |name: &str| options.remove(name).ok_or_else(|| format!("{name} is missing"));
        let number = |name: &str, text: String| {
            text.parse().map_err(|_| format!("{name} = {text:?}, expected a number"))
        };
        let work = PathBuf::from(take("--work")?);
        let fixtures = PathBuf::from(take("--fixtures")?);
        let session = Self {
            seconds: number("--seconds", take("--seconds")?)?,
            seed: number("--seed", take("--seed")?)?,
            corpus: take("--corpus")?.into(),
            target: Target::new(&target, &work, &fixtures, take("--program").ok().map(PathBuf::from))?,
            work,
        };
        match options.keys().next() {
            Some(name) => Err(format!("{name} is no option")),
            None => Ok(session),
        }
    }

    /// Runs the corpus, then mutations of it until the time is over.
    fn run(&self) -> Result<String, String> {
        let corpus = read_corpus(&self.corpus)?;
        let watch = watch();
        let (start, limit) = (Instant::now(), Duration::from_secs(self.seconds));
        let mut mutator = Mutator::new(self.seed, corpus.clone());
        let (mut runs, mut slowest) = (0u64, Duration::ZERO);
        let mut inputs = corpus.into_iter();
        while start.elapsed() < limit {
            let input = inputs.next().unwrap_or_else(|| mutator.next());
            std::fs::write(self.work.join(CURRENT), &input).map_err(|why| format!("cannot write: {why}"))?;
            let begun = Instant::now();
            watch.store(1 + start_of_epoch().elapsed().as_millis() as u64, Ordering::Relaxed);
            let result = catch_unwind(AssertUnwindSafe(|| self.target.run(&input)));
            watch.store(0, Ordering::Relaxed);
            slowest = slowest.max(begun.elapsed());
            runs += 1;
            match result {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => return Err(format!("run {runs}: {reason}")),
                Err(_) => return Err(format!("run {runs}: a panic")),
            }
        }
        Ok(format!("{runs} inputs, the slowest took {} ms", slowest.as_millis()))
    }
}

/// The time that the watch counts from.
fn start_of_epoch() -> Instant {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Starts a thread that ends the process when a run takes too long. The value is the millisecond after the start of the run;
/// 0 between runs.
fn watch() -> Arc<AtomicU64> {
    let begun = Arc::new(AtomicU64::new(0));
    let shared = begun.clone();
    start_of_epoch();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(MAX_RUN / 20);
            let begun = shared.load(Ordering::Relaxed);
            let now = 1 + start_of_epoch().elapsed().as_millis() as u64;
            if begun > 0 && now.saturating_sub(begun) > MAX_RUN.as_millis() as u64 {
                eprintln!("a run takes longer than {} s", MAX_RUN.as_secs());
                std::process::exit(1);
            }
        }
    });
    begun
}

/// The files of `dir`, by name.
fn read_corpus(dir: &Path) -> Result<Vec<Vec<u8>>, String> {
    let fail = |why: std::io::Error| format!("{}: {why}", dir.display());
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        paths.push(entry.map_err(fail)?.path());
    }
    paths.sort();
    if paths.is_empty() {
        return Err(format!("{}: the corpus is empty", dir.display()));
    }
    paths.iter().map(|path| std::fs::read(path).map_err(fail)).collect()
}

#[cfg(test)]
mod tests {
    use super::{MAX_RUN, Target, mutate::Mutator, read_corpus};
    use std::{path::Path, time::Instant};

    /// Inputs that once failed are in the corpus. `plan` needs the program, so `tests/all/cli_plan.rs` runs it.
    #[test]
    fn every_reader_accepts_or_refuses_its_corpus() {
        let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let (root, fixtures) = (project.join("fuzz/corpus"), project.join("tests/fixtures"));
        for name in Target::NAMES.into_iter().filter(|name| *name != "plan") {
            let work = tempfile::tempdir().unwrap();
            let target = Target::new(name, work.path(), &fixtures, None).unwrap();
            for (at, input) in read_corpus(&root.join(name)).unwrap().iter().enumerate() {
                let start = Instant::now();
                assert_eq!(target.run(input), Ok(()), "{name}: input {at}");
                assert!(start.elapsed() < MAX_RUN, "{name}: input {at} took {:?}", start.elapsed());
            }
        }
    }

    #[test]
    fn equal_seeds_give_equal_inputs() {
        let corpus = vec![br#"{"a": [1, 2.5, "x"], "b": null}"#.to_vec(), b"text".to_vec()];
        let inputs = |seed| {
            let mut mutator = Mutator::new(seed, corpus.clone());
            (0..200).map(|_| mutator.next()).collect::<Vec<_>>()
        };
        assert_eq!(inputs(3), inputs(3));
        assert_ne!(inputs(3), inputs(4));
        let distinct: std::collections::BTreeSet<_> = inputs(3).into_iter().collect();
        assert!(distinct.len() > 150, "{} distinct inputs of 200", distinct.len());
    }
}
