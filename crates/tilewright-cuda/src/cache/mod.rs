//! The kernel cache: machine code from a bundle, from the cache folder, or from the assembler, in this order.
//!
//! ```
//! use tilewright_cuda::cache::{Assembler, Cache, Settings, Source};
//!
//! struct Echo; // a driver, or ptxas
//! impl Assembler for Echo {
//!     fn identity(&self) -> &str {
//!         "echo 1"
//!     }
//!     fn assemble(&self, source: &Source) -> Result<Vec<u8>, String> {
//!         Ok(source.ptx().into())
//!     }
//! }
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path().join("kernels");
//! let kernel = Source::new("nothing", "sm_80", ".target sm_80\n.visible .entry nothing() { ret; }");
//! let first = Cache::open(Settings::in_folder(&folder))?;
//! first.code(&kernel, &Echo)?;
//! assert_eq!(first.counts().assembled, 1);
//!
//! let later = Cache::open(Settings::in_folder(&folder))?; // in another process, say
//! later.code(&kernel, &Echo)?;
//! assert_eq!((later.counts().assembled, later.counts().cached), (0, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - A kernel is identified by its PTX, target and assembler ([`Source::key`]), so entries never become stale.
//! - The cache never causes a failure. If the folder is unreadable or read-only, the disk is full or an entry is damaged, kernels
//!   are assembled and one warning gives the reason.
//! - A process assembles a kernel once, even if several threads request it; different kernels are assembled in parallel.
//! - If the device rejects code of a bundle, the folder's code is used, else the assembler's.
//! - The key requires the PTX, so a warm start records and prints its kernels, which takes milliseconds. A key from a kernel's
//!   configuration alone would be stale when the code that records the kernel changes, which a library cannot detect.

mod bundle;
mod entry;
mod error;
mod folder;
mod footprint;
mod key;
mod lookup;
mod own_file;
pub(crate) mod parallel;
mod ptxas;
mod settings;

pub use crate::device::Driver;
pub use bundle::{BundleContent, make_bundle};
pub use entry::Code;
pub use error::{CacheError, MissingKernel, Result};
pub use folder::CacheEntry;
pub use footprint::Footprint;
pub use key::KernelKey;
pub use lookup::Source;
pub use ptxas::Ptxas;
pub use settings::{BUNDLE_FOLDER, DEFAULT_LIMIT, Mode, Settings, VARIABLE};

use crate::Function;
use folder::{Folder, Lookup};
use lookup::SingleFlight;
use std::{
    collections::HashMap,
    path::Path,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
};

/// Assembles PTX to machine code.
pub trait Assembler: Sync {
    /// Its name and exact version. The cache returns only code of the same identity.
    fn identity(&self) -> &str;

    /// Assembles a kernel.
    ///
    /// # Errors
    /// The whole log of the assembler.
    fn assemble(&self, source: &Source) -> std::result::Result<Vec<u8>, String>;
}

/// The source of a kernel's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A bundle.
    Bundle,
    /// The cache's folder.
    Cache,
    /// The assembler, in this process.
    Assembler,
}

/// Number of kernels per source, since the cache was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// From bundles.
    pub bundled: usize,
    /// From the folder.
    pub cached: usize,
    /// From the assembler.
    pub assembled: usize,
    /// Entries that were damaged or rejected by the device. Their kernels are also counted at the source that served them.
    pub invalid: usize,
}

/// The kernel cache.
#[derive(Debug)]
pub struct Cache {
    settings: Settings,
    folder: Option<Folder>,
    bundles: Vec<Folder>,
    single_flight: SingleFlight,
    /// Loaded kernels, by GPU and key. They live as long as the cache.
    pub(crate) functions: Mutex<HashMap<(usize, KernelKey), Function>>,
    counts: [AtomicUsize; 4],
    warned: AtomicBool,
    refusal: OnceLock<String>,
}

impl Cache {
    /// Opens the cache. Bundles are opened now, because they were configured explicitly; the folder is first read when a kernel
    /// is requested.
    ///
    /// # Errors
    /// If a bundle is not a folder with kernels. An optional one is then ignored.
    pub fn open(settings: Settings) -> Result<Self> {
        let mut bundles =
            settings.bundles.iter().map(|path| bundle::open(path)).collect::<Result<Vec<_>>>()?;
        bundles.extend(settings.optional_bundle.as_ref().and_then(|path| bundle::open(path).ok()));
        let folder = settings.folder.clone().filter(|_| settings.mode != Mode::Off).map(Folder::new);
        let (counts, warned) = (Default::default(), AtomicBool::new(false));
        let (single_flight, functions, refusal) = Default::default();
        Ok(Self { settings, folder, bundles, single_flight, functions, counts, warned, refusal })
    }

    /// The settings of [`open`](Self::open).
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The machine code of many kernels, assembled in parallel. `done` is called from any thread after each kernel.
    ///
    /// # Errors
    /// The first error of an assembler; otherwise, if assembling is disabled, one error that names all missing kernels.
    pub fn all(
        &self,
        sources: &[Source],
        assembler: &dyn Assembler,
        done: &(dyn Fn(&Source) + Sync),
    ) -> Result<Vec<Arc<Code>>> {
        let one = |source: &Source| {
            let code = self.code(source, assembler);
            done(source);
            code
        };
        let (mut codes, mut all_missing) = (Vec::new(), Vec::new());
        for outcome in parallel::map(sources, self.settings.workers, one) {
            match outcome {
                Ok(code) => codes.push(code),
                Err(CacheError::Missing(missing)) => all_missing.extend(missing),
                Err(other) => return Err(other),
            }
        }
        if all_missing.is_empty() { Ok(codes) } else { Err(CacheError::Missing(all_missing)) }
    }

    /// Number of kernels per source.
    pub fn counts(&self) -> Counts {
        let [bundled, cached, assembled, invalid] =
            [0, 1, 2, 3].map(|at: usize| self.counts[at].load(Relaxed));
        Counts { bundled, cached, assembled, invalid }
    }

    /// The first reason why a kernel of a bundle was not used, if any was not.
    pub fn bundle_refusal(&self) -> Option<&str> {
        self.refusal.get().map(String::as_str)
    }

    /// The folders of the bundles that are in use, in the order of their search.
    pub fn bundles(&self) -> impl Iterator<Item = &Path> {
        self.bundles.iter().map(Folder::path)
    }

    /// Reads all entries of the folder, the most recently used first; none if the folder does not exist.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn list(&self) -> Result<Vec<CacheEntry>> {
        self.folder
            .as_ref()
            .map_or(Ok(Vec::new()), |folder| folder.list().map_err(|why| unusable(folder, &why)))
    }

    /// Removes all entries of the folder in any mode and no other files. Returns the number of entries and their bytes.
    ///
    /// # Errors
    /// If an entry cannot be removed.
    pub fn clear(&self) -> Result<(usize, u64)> {
        self.folder.as_ref().map_or(Ok((0, 0)), |folder| folder.clear().map_err(|why| unusable(folder, &why)))
    }
}

fn unusable(folder: &Folder, why: &std::io::Error) -> CacheError {
    CacheError::Path { path: folder.path().to_owned(), why: why.to_string() }
}
