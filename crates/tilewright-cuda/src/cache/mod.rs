//! Machine code of kernels: from a bundle, from the cache, or from the assembler, in this order.
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
//! - A kernel is known by what it is: its PTX, the target, the assembler ([`Source::key`]). Nothing can be stale.
//! - The cache never decides whether something works. A folder that cannot be read or written, a full disk, an entry that is cut
//!   off or altered: kernels are assembled, and one warning says why.
//! - A process assembles a kernel once, however many threads ask; different kernels are assembled side by side.
//! - No entry is reached without its PTX, so a warm start records and prints its kernels, which takes milliseconds: a shorter key,
//!   made of a kernel's configuration, would have to know that the code that records it is the same, and nothing tells that
//!   of a crate under development or inside somebody's library.

mod bundle;
mod driver;
mod entry;
mod error;
mod flights;
mod folder;
mod footprint;
mod ptxas;
mod settings;
mod side_by_side;
mod source;

pub use bundle::make_bundle;
pub use driver::Driver;
pub use entry::Code;
pub use error::{Error, Missing, Result};
pub use folder::Listed;
pub use footprint::Footprint;
pub use ptxas::Ptxas;
pub use settings::{DEFAULT_LIMIT, Mode, Settings, VARIABLE};
pub use source::{Key, Source};

use driver::Functions;
use flights::Flights;
use folder::{Folder, Look};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
};

/// What makes machine code of PTX.
pub trait Assembler: Sync {
    /// Its name and version, as exactly as it is known. Code that another identity made is not taken from the cache.
    fn identity(&self) -> &str;

    /// The machine code of a kernel.
    ///
    /// # Errors
    /// What the assembler says about it, all of it.
    fn assemble(&self, source: &Source) -> std::result::Result<Vec<u8>, String>;
}

/// Where code came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A bundle.
    Bundle,
    /// The cache's folder.
    Cache,
    /// The assembler, in this process.
    Assembler,
}

/// How many kernels came from where, since the cache was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// From bundles.
    pub bundled: usize,
    /// From the folder.
    pub cached: usize,
    /// From the assembler.
    pub assembled: usize,
    /// Entries that were damaged, or refused by the device. They count as assembled, too.
    pub spoiled: usize,
}

/// Machine code, found or made.
#[derive(Debug)]
pub struct Cache {
    settings: Settings,
    folder: Option<Folder>,
    bundles: Vec<Folder>,
    flights: Flights,
    functions: Functions,
    counts: [AtomicUsize; 4],
    warned: AtomicBool,
}

/// Code and where it came from.
type Held = (Arc<Code>, Origin);

impl Cache {
    /// Opens it. The folder is looked at when the first kernel is asked for; bundles are now, because they were asked for by name.
    ///
    /// # Errors
    /// When a bundle is no folder of kernels.
    pub fn open(settings: Settings) -> Result<Self> {
        let bundles = settings.bundles.iter().map(|path| bundle::open(path)).collect::<Result<_>>()?;
        let folder = settings.folder.clone().filter(|_| settings.mode != Mode::Off).map(Folder::new);
        let (counts, warned) = (Default::default(), AtomicBool::new(false));
        let (flights, functions) = Default::default();
        Ok(Self { settings, folder, bundles, flights, functions, counts, warned })
    }

    /// What it was opened with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The machine code of a kernel.
    ///
    /// # Errors
    /// [`Error::Assembler`], or [`Error::Missing`] where nothing may be assembled.
    pub fn code(&self, source: &Source, assembler: &dyn Assembler) -> Result<Arc<Code>> {
        let key = source.key().assembled_by(assembler.identity());
        Ok(self.flights.once(key, || self.find(source, key, assembler))?.0)
    }

    /// What `load` makes of a kernel's machine code. Where it refuses code of a bundle or of the cache, and `spoiled` says that its
    /// error is about the code, as that of a driver is which is older than the code, the kernel is assembled.
    ///
    /// # Errors
    /// Those of [`code`](Self::code), and of `load`.
    pub fn load<T, E: From<Error> + fmt::Display>(
        &self,
        source: &Source,
        assembler: &dyn Assembler,
        load: impl Fn(&Code) -> std::result::Result<T, E>,
        spoiled: impl Fn(&E) -> bool,
    ) -> std::result::Result<T, E> {
        let key = source.key().assembled_by(assembler.identity());
        let (code, origin) = self.flights.once(key, || self.find(source, key, assembler))?;
        let why = match load(&code) {
            Err(why) if origin != Origin::Assembler && spoiled(&why) => {
                format!("the device refused it: {why}")
            }
            outcome => return outcome,
        };
        self.flights.forget(key, &code);
        let (code, _) = self.flights.once(key, || {
            self.spoil(origin, key, source.name(), &why);
            self.assemble(source, key, assembler, &[why])
        })?;
        load(&code)
    }

    /// The machine code of many kernels, several side by side; `done` is called from any thread as each is there.
    ///
    /// # Errors
    /// The first error of an assembler; otherwise, where nothing may be assembled, one that names all that are missing.
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
        let (mut codes, mut nowhere) = (Vec::new(), Vec::new());
        for outcome in side_by_side::each(sources, self.settings.workers, one) {
            match outcome {
                Ok(code) => codes.push(code),
                Err(Error::Missing(missing)) => nowhere.extend(missing),
                Err(other) => return Err(other),
            }
        }
        if nowhere.is_empty() { Ok(codes) } else { Err(Error::Missing(nowhere)) }
    }

    /// How many kernels came from where.
    pub fn counts(&self) -> Counts {
        let [bundled, cached, assembled, spoiled] =
            [0, 1, 2, 3].map(|at: usize| self.counts[at].load(Relaxed));
        Counts { bundled, cached, assembled, spoiled }
    }

    /// The entries of the folder, the most recently used first, each read whole; none where there is no folder yet.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn list(&self) -> Result<Vec<Listed>> {
        self.folder
            .as_ref()
            .map_or(Ok(Vec::new()), |folder| folder.list().map_err(|why| unusable(folder, &why)))
    }

    /// Removes every entry of the folder, whatever the mode, and nothing else. How many entries and bytes there were.
    ///
    /// # Errors
    /// When one cannot be removed.
    pub fn clear(&self) -> Result<(usize, u64)> {
        self.folder.as_ref().map_or(Ok((0, 0)), |folder| folder.clear().map_err(|why| unusable(folder, &why)))
    }

    fn find(&self, source: &Source, key: Key, assembler: &dyn Assembler) -> Result<Held> {
        let mut looked_in = Vec::new();
        let bundles = self.bundles.iter().map(|bundle| (bundle, source.key(), Origin::Bundle));
        let folder = self.folder.iter().map(|folder| (folder, key, Origin::Cache));
        for (place, key, origin) in bundles.chain(folder) {
            let using = origin == Origin::Cache && self.settings.mode == Mode::ReadWrite;
            let damage = match place.look(key, using) {
                Look::Found(code) => {
                    self.counts[origin as usize].fetch_add(1, Relaxed);
                    return Ok((Arc::new(code), origin));
                }
                Look::Damaged(why) => {
                    self.spoil(origin, key, source.name(), &why);
                    format!(" ({why})")
                }
                Look::Nothing => String::new(),
            };
            looked_in.push(format!("{}{damage}", place.path().display()));
        }
        self.assemble(source, key, assembler, &looked_in)
    }

    fn assemble(
        &self,
        source: &Source,
        key: Key,
        assembler: &dyn Assembler,
        looked_in: &[String],
    ) -> Result<Held> {
        let [kernel, target] = [source.name(), source.target()].map(str::to_owned);
        if !self.settings.assemble {
            let (configuration, looked_in) = (source.configuration().to_owned(), looked_in.to_vec());
            return Err(Error::Missing(vec![Missing { kernel, target, configuration, looked_in }]));
        }
        let code = made(source, assembler)?;
        self.counts[Origin::Assembler as usize].fetch_add(1, Relaxed);
        if let (Some(folder), Mode::ReadWrite) = (&self.folder, self.settings.mode)
            && let Err(why) = folder.write(key, &code).and_then(|()| folder.evict(self.settings.limit))
        {
            self.warn_once(&format!(
                "kernel cache: {}: {why}; kernels are assembled anew in each process",
                folder.path().display()
            ));
        }
        Ok((Arc::new(code), Origin::Assembler))
    }

    /// Counts an entry that is no good; one of the cache is removed if that is allowed, one of a bundle is told of.
    fn spoil(&self, origin: Origin, key: Key, kernel: &str, why: &str) {
        self.counts[3].fetch_add(1, Relaxed);
        match (&self.folder, origin) {
            (_, Origin::Bundle) => self.warn_once(&format!("kernel {kernel} of a bundle is not used: {why}")),
            (Some(folder), _) if self.settings.mode == Mode::ReadWrite => folder.remove(key),
            _ => {}
        }
    }

    fn warn_once(&self, text: &str) {
        if !self.warned.swap(true, Relaxed) {
            (self.settings.warn)(text);
        }
    }
}

/// The machine code that `assembler` makes of `source`.
fn made(source: &Source, assembler: &dyn Assembler) -> Result<Code> {
    let [kernel, target] = [source.name(), source.target()].map(str::to_owned);
    match assembler.assemble(source) {
        Ok(cubin) => Ok(Code { kernel, target, assembler: assembler.identity().to_owned(), cubin }),
        Err(log) => Err(Error::Assembler { kernel, target, log }),
    }
}

fn unusable(folder: &Folder, why: &std::io::Error) -> Error {
    Error::Path { path: folder.path().to_owned(), why: why.to_string() }
}
