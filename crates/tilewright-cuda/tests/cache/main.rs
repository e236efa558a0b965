//! The kernel cache with a fake assembler, so without a GPU: lookups, damage, threads, processes, eviction.

mod bundles;
mod damage;
mod eviction;
mod lookups;
mod processes;
mod threads;
mod toolkit;

use std::{
    fmt,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tilewright_cuda::cache::{Assembler, Cache, CacheError, Settings, Source};

/// An assembler that counts its calls. Its output depends on everything that machine code depends on.
pub(crate) struct Fake {
    identity: &'static str,
    calls: AtomicUsize,
    duration: Duration,
}

impl Fake {
    pub(crate) fn new(identity: &'static str) -> Self {
        Self { identity, calls: AtomicUsize::new(0), duration: Duration::ZERO }
    }

    pub(crate) fn that_takes(duration: Duration) -> Self {
        Self { duration, ..Self::new("fake 1") }
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Relaxed)
    }
}

impl Assembler for Fake {
    fn identity(&self) -> &str {
        self.identity
    }

    fn assemble(&self, source: &Source) -> Result<Vec<u8>, String> {
        self.calls.fetch_add(1, Relaxed);
        std::thread::sleep(self.duration);
        if source.ptx().contains("mistake") {
            return Err("line 3: no such instruction\nline 4: nor this".to_owned());
        }
        Ok(machine_code(self.identity, source))
    }
}

/// An error of loading.
#[derive(Debug, PartialEq)]
pub(crate) struct Refusal(pub(crate) String);

impl From<CacheError> for Refusal {
    fn from(error: CacheError) -> Self {
        Self(error.to_string())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The expected code: 200,000 bytes.
pub(crate) fn machine_code(identity: &str, source: &Source) -> Vec<u8> {
    let text = format!("{identity} {} {} {}\n", source.name(), source.target(), source.ptx());
    text.into_bytes().into_iter().cycle().take(200_000).collect()
}

pub(crate) fn kernel(number: usize) -> Source {
    Source::new(format!("kernel_{number}"), "sm_90a", format!(".target sm_90a\n add {number};\n ret;\n"))
}

pub(crate) fn open(folder: &Path) -> Cache {
    Cache::open(quiet(folder)).unwrap()
}

/// Settings for `folder` with which a warning fails the test.
pub(crate) fn quiet(folder: &Path) -> Settings {
    Settings::in_folder(folder).warn(|text| panic!("{text}"))
}

/// The names of the files in a folder, sorted.
pub(crate) fn files(folder: &Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Warnings of all tests; each test searches for its own.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

pub(crate) fn keep_warning(text: &str) {
    WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).push(text.to_owned());
}

/// The number of warnings that contain `part`.
pub(crate) fn warnings_about(part: &str) -> usize {
    let warnings = WARNINGS.lock().unwrap_or_else(PoisonError::into_inner);
    warnings.iter().filter(|text| text.contains(part)).count()
}
