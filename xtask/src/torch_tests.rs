//! Tests of the Python package that need torch: our own, and a sample of FlashInfer's on the CPU.
//!
//! 1. [`Installation::start`] installs torch and downloads FlashInfer's source distribution while cargo compiles.
//! 2. [`run`] executes our tests and shards of the sample, one process per core.
//!
//! Both are kept in `target/python-torch` between runs. Without registry or space the stage is skipped.

use crate::{
    target,
    wheel::{self, TEST_TOOLS, TESTS, suite},
};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Torch of the recorded outcomes, and libraries of FlashInfer's tests and of its build script.
const TOOLS: [&str; 5] = ["torch==2.15.0", "einops", "scipy", "setuptools>=77", "packaging>=24"];
/// A release with the tests in its source distribution, which that of 0.6.18 lacks.
const RELEASE: &str = "flashinfer-python==0.3.1";
const ARCHIVE: &str = "flashinfer_python-0.3.1";
/// Tests whose reference modules are not in the distribution, and tests that need a GPU: variants as CUDA source, and operators on
/// uint32 that torch lacks on the CPU.
const EXCLUDED: [&str; 5] =
    ["test_alibi.py", "test_attention_sink.py", "test_rope.py", "test_jit_example.py", "test_xqa.py"];
/// The longest wait for an installation when its tests are next.
const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// The time between two queries of an installation.
const POLL: Duration = Duration::from_millis(100);
/// KiB of disk for torch with its libraries.
const NEEDED_KIB: u64 = 8 << 20;
/// Small cases of each file and function: the sample runs for half a minute on one core. Frequencies take millions of draws, pairs
/// 2 of lengths 16 thousand tokens, multi-item scoring has references in uint32, and products by CUTLASS are not served.
const SAMPLE: [&str; 8] = [
    "--per-file",
    "20",
    "--per-function",
    "12",
    "--largest",
    "200",
    "-k",
    "not freq and not seq_len_pairs2 and not multi_item and not cutlass",
];
const SEED: &str = "1";
/// Executes pytest with these arguments on the core of `TEST_CORE`: threads of torch and of the CPU backend would wait for each other.
const ON_ONE_CORE: &str = "import os, sys
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, [cores[int(os.environ['TEST_CORE']) % len(cores)]])
os.execv(sys.executable, [sys.executable, '-m', 'pytest', *sys.argv[1:]])";

/// Torch and FlashInfer's tests.
pub(crate) struct Installed {
    python: PathBuf,
    checkout: PathBuf,
}

/// An installation in the background, which ends if the check fails before.
pub(crate) struct Installation {
    is_cancelled: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Installed, String>>>,
}

impl Installation {
    pub(crate) fn start(root: &Path) -> Self {
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let (folder, flag) = (target(root).join("python-torch"), is_cancelled.clone());
        Self { is_cancelled, thread: Some(thread::spawn(move || install(&folder, &flag))) }
    }

    /// Waits for its end, for a limited time; an error is the reason why torch is missing.
    pub(crate) fn wait(mut self) -> Result<Installed, String> {
        let (thread, start) = (self.thread.take(), Instant::now());
        while thread.as_ref().is_some_and(|thread| !thread.is_finished()) && start.elapsed() < LONGEST_WAIT {
            thread::sleep(POLL);
        }
        self.is_cancelled.store(true, Ordering::Relaxed); // no effect after its end
        thread
            .and_then(|thread| thread.join().ok())
            .unwrap_or_else(|| Err("the installation panicked".to_owned()))
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // the check has failed for another reason
        }
    }
}

/// Installs what `folder` lacks. The list of installed tools is written last, so that an interrupted installation is repeated.
fn install(folder: &Path, is_cancelled: &AtomicBool) -> Result<Installed, String> {
    let (python, checkout) = (folder.join("bin/python"), folder.join(ARCHIVE));
    let step = |command: &mut Command| finish(command, &folder.join("install.log"), is_cancelled);
    let pip = || {
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check", "--retries", "1"]);
        pip
    };
    let tools = [TEST_TOOLS.as_slice(), TOOLS.as_slice()].concat();
    let (list, wanted) = (folder.join("installed"), tools.join("\n"));
    if !fs::read_to_string(&list).is_ok_and(|installed| installed == wanted) {
        fs::create_dir_all(folder).map_err(|why| format!("cannot create {}: {why}", folder.display()))?;
        let free = free_kib(folder)?;
        if free < NEEDED_KIB {
            return Err(format!("{} GB are free, expected at least {}", free >> 20, NEEDED_KIB >> 20));
        }
        step(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
        step(pip().args(["install", "--no-compile"]).args(&tools))?; // few of its modules are imported
        fs::write(&list, wanted).map_err(|why| why.to_string())?;
    }
    let archive = folder.join(format!("{ARCHIVE}.tar.gz"));
    if archive.exists() || !checkout.exists() {
        // without isolation: its build script, which reads the version, finds its tools here
        let options = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest"];
        step(pip().args(options).arg(folder).arg(RELEASE))?;
        let mut tar = Command::new("tar");
        step(tar.arg("-xzf").arg(&archive).arg("-C").arg(folder).arg(format!("{ARCHIVE}/tests")))?;
        fs::remove_file(&archive).map_err(|why| why.to_string())?; // what was unpacked is complete
    }
    Ok(Installed { python, checkout })
}

/// Free KiB of the file system of `folder`.
fn free_kib(folder: &Path) -> Result<u64, String> {
    let output = Command::new("df").args(["-Pk"]).arg(folder).output();
    let output = output.map_err(|why| format!("`df` does not start: {why}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let free = text.lines().nth(1).and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
    free.ok_or_else(|| format!("`df` prints {text:?}, expected the free space"))
}

/// Executes a command, whose output goes to `log`; an error has the last line of it. Ends it if the installation is cancelled.
fn finish(command: &mut Command, log: &Path, is_cancelled: &AtomicBool) -> Result<(), String> {
    let mut child = spawn(command, log)?;
    loop {
        if let Some(status) = child.try_wait().map_err(|why| why.to_string())? {
            let text = fs::read_to_string(log).unwrap_or_default();
            let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
            return if status.success() { Ok(()) } else { Err(format!("{last} ({})", log.display())) };
        }
        if is_cancelled.load(Ordering::Relaxed) {
            let _ = child.kill();
            let _ = child.wait();
            return Err("the installation took too long".to_owned());
        }
        thread::sleep(POLL);
    }
}

/// Starts a command, whose output goes to `log`.
fn spawn(command: &mut Command, log: &Path) -> Result<Child, String> {
    let opened = File::create(log).and_then(|file| Ok((file.try_clone()?, file)));
    let (out, err) = opened.map_err(|why| format!("cannot write {}: {why}", log.display()))?;
    let name = command.get_program().to_string_lossy().into_owned();
    let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
    child.map_err(|why| format!("`{name}` does not start: {why}"))
}

/// Runs our tests that need torch, and the sample of FlashInfer's. Without torch it prints the reason and passes.
pub(crate) fn run(root: &Path, installation: Installation) -> Result<(), String> {
    let Installed { python, checkout } = match installation.wait() {
        Ok(installed) => installed,
        Err(why) => {
            println!("skipped: the tests with torch did not run: {why}");
            return Ok(());
        }
    };
    let (package, folder) = (wheel::linked_package(root)?, target(root).join("python-torch"));
    let names = suite().filter_map(|file| file.rsplit('/').next()).filter(|name| !EXCLUDED.contains(name));
    let files = names.map(|name| format!("tests/{name}")).filter(|file| checkout.join(file).exists());
    let files: Vec<String> = files.collect();
    let cores = thread::available_parallelism().map_or(1, usize::from).min(4);
    println!("FlashInfer's tests: {RELEASE}, seed {SEED}, {}, {cores} processes", SAMPLE.join(" "));
    let mut jobs = Vec::new();
    for (name, options) in [("flashinfer", vec![]), ("others", vec!["--ignore-glob=*/test_flashinfer.py"])] {
        let mut ours = Command::new(&python);
        ours.args(["-c", ON_ONE_CORE, "-q", "-p", "no:cacheprovider", "-m", "torch", "-rf"]).args(options);
        let tests = root.join(TESTS);
        ours.arg(if name == "others" { tests } else { tests.join("test_flashinfer.py") });
        ours.env("PYTHONPATH", &package).current_dir(root);
        jobs.push((format!("tilewright-{name}"), ours));
    }
    for shard in 0..cores {
        let mut theirs = Command::new(&python);
        theirs.args(["-c", ON_ONE_CORE]);
        wheel::flashinfer_suite(root, &mut theirs, &checkout, Some(&package))?;
        let of = format!("{shard}/{cores}");
        theirs.args(&files).args(SAMPLE).args(["--sample-seed", SEED, "--shard", &of]);
        jobs.push((format!("flashinfer-{shard}"), theirs));
    }
    let failed = execute(&folder, jobs, cores)?;
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// Executes the jobs in their order, one at a time per core. Prints their last lines, and all of those that fail, whose names it
/// returns.
fn execute(folder: &Path, jobs: Vec<(String, Command)>, cores: usize) -> Result<Vec<String>, String> {
    let (queue, failed) = (Mutex::new(jobs.into_iter()), Mutex::new(Vec::new()));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = &|core: usize| -> Result<(), String> {
        while let Some((name, mut command)) = next() {
            let log = folder.join(format!("{name}.log"));
            command
                .env("TEST_CORE", core.to_string())
                .env("OMP_NUM_THREADS", "1")
                .env_remove("PYTHONDONTWRITEBYTECODE") // later processes use the bytecode of torch
                .env("PYTHONPYCACHEPREFIX", folder.join("bytecode"));
            let status = spawn(&mut command, &log)?.wait().map_err(|why| why.to_string())?;
            let text = fs::read_to_string(&log).unwrap_or_default();
            if status.success() {
                println!("{name}: {}", text.lines().last().unwrap_or_default());
            } else {
                println!("{name}:\n{text}");
                failed.lock().unwrap_or_else(PoisonError::into_inner).push(name);
            }
        }
        Ok(())
    };
    let results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|core| scope.spawn(move || work(core))).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err("a job panicked".to_owned())))
            .collect()
    });
    results.into_iter().collect::<Result<(), String>>()?;
    Ok(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}
