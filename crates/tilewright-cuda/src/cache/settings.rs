//! Settings of the kernel cache.

use super::{CacheError, Result, own_file};
use std::{
    ffi::{OsStr, OsString},
    num::NonZero,
    path::{Path, PathBuf},
};

/// The environment variable that selects the cache folder.
pub const VARIABLE: &str = "TILEWRIGHT_CACHE";
const EXPECTED: &str =
    "an absolute path, `read-only`, `read-only:` with an absolute path behind it, `off` or `jit`";
/// The value of [`VARIABLE`] without any stored machine code.
const JIT: &str = "jit";
/// The name of the bundle beside a program or library.
pub const BUNDLE_FOLDER: &str = "tilewright-kernels";
/// Default maximum size of the folder; see [`Settings::limit`].
pub const DEFAULT_LIMIT: u64 = 1 << 30;
/// Default maximum number of kernels assembled in parallel; see [`Settings::workers`].
const DEFAULT_WORKERS: usize = 8;

/// Access to the cache folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The folder is read, and assembled kernels are written to it.
    ReadWrite,
    /// The folder is read and never changed.
    ReadOnly,
    /// The folder is not used.
    Off,
}

/// Sources of machine code and the place where it is cached.
#[derive(Debug, Clone)]
#[must_use]
pub struct Settings {
    pub(super) folder: Option<PathBuf>,
    pub(super) mode: Mode,
    pub(super) limit: u64,
    pub(super) bundles: Vec<PathBuf>,
    /// A bundle that is used if it exists, after the others.
    pub(super) optional_bundle: Option<PathBuf>,
    pub(super) assemble: bool,
    pub(super) workers: usize,
    pub(super) warn: fn(&str),
}

impl Settings {
    /// Caches kernels in `folder`, which is created with the first kernel.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self::new(Some(folder.into()), Mode::ReadWrite)
    }

    /// Caches nothing: each process assembles its kernels or takes them from bundles.
    pub fn off() -> Self {
        Self::new(None, Mode::Off)
    }

    /// Reads `TILEWRIGHT_CACHE`: an absolute path, `off`, `read-only`, `read-only:PATH` or `jit`. If it is unset, the folder is
    /// `$XDG_CACHE_HOME/tilewright/kernels`, by default `~/.cache/tilewright/kernels`.
    ///
    /// The bundle beside the program, or beside the library that contains this crate, is used if there is one: the folder
    /// [`BUNDLE_FOLDER`]. With `jit`, the driver assembles every kernel.
    ///
    /// # Errors
    /// If the variable has any other value.
    pub fn from_environment() -> Result<Self> {
        let caches = std::env::var_os("XDG_CACHE_HOME");
        let home = std::env::home_dir();
        let value = std::env::var_os(VARIABLE);
        let settings = Self::parse(value.as_deref(), default_folder(caches, home.as_deref()))?;
        match own_file::folder() {
            Some(folder) if value.is_none_or(|value| value != JIT) => {
                Ok(settings.optional_bundle(folder.join(BUNDLE_FOLDER)))
            }
            _ => Ok(settings),
        }
    }

    /// As [`Self::from_environment`], with the variable's `value` and the default folder.
    fn parse(value: Option<&OsStr>, default: Option<PathBuf>) -> Result<Self> {
        let cached_in = |folder, mode| Ok(Self::new(Some(folder), mode));
        let in_default =
            |mode| Ok(default.clone().map_or_else(Self::off, |folder| Self::new(Some(folder), mode)));
        let Some(value) = value.filter(|value| !value.is_empty()) else { return in_default(Mode::ReadWrite) };
        let path = Path::new(value);
        if path.is_absolute() {
            return cached_in(path.to_owned(), Mode::ReadWrite);
        }
        match value.to_str() {
            Some("off" | JIT) => return Ok(Self::off()),
            Some("read-only") => return in_default(Mode::ReadOnly),
            Some(text) => {
                let folder = text.strip_prefix("read-only:").map(Path::new).filter(|path| path.is_absolute());
                if let Some(folder) = folder {
                    return cached_in(folder.to_owned(), Mode::ReadOnly);
                }
            }
            None => {}
        }
        let value = value.to_string_lossy().into_owned();
        Err(CacheError::Setting { name: VARIABLE, value, expected: EXPECTED })
    }

    fn new(folder: Option<PathBuf>, mode: Mode) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let warn = |text: &str| eprintln!("tilewright: {text}");
        let (limit, workers) = (DEFAULT_LIMIT, cores.min(DEFAULT_WORKERS));
        let (bundles, optional_bundle) = (Vec::new(), None);
        Self { folder, mode, limit, bundles, optional_bundle, assemble: true, workers, warn }
    }

    /// Reads the folder's entries and never writes to it.
    pub fn read_only(mut self) -> Self {
        if self.mode == Mode::ReadWrite {
            self.mode = Mode::ReadOnly;
        }
        self
    }

    /// Limits the total size of the entries. Adding a kernel evicts the least recently used entries until the limit holds.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Adds a bundle. Bundles are searched in the order of these calls, before the folder.
    pub fn bundle(mut self, folder: impl Into<PathBuf>) -> Self {
        self.bundles.push(folder.into());
        self
    }

    /// Sets the bundle that is used if it exists, after the others. Its entries never cause a warning.
    pub fn optional_bundle(mut self, folder: impl Into<PathBuf>) -> Self {
        self.optional_bundle = Some(folder.into());
        self
    }

    /// The folder of the optional bundle, which may not exist.
    pub fn optional_bundle_folder(&self) -> Option<&Path> {
        self.optional_bundle.as_deref()
    }

    /// Never assembles: a kernel in no bundle and not in the folder is an error that names it.
    pub fn refuse_to_assemble(mut self) -> Self {
        self.assemble = false;
        self
    }

    /// The number of kernels assembled in parallel, at least one.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.max(1);
        self
    }

    /// The function that reports, once, that the cache is unusable or a bundle does not fit. By default it prints to standard
    /// error.
    pub fn warn(mut self, warn: fn(&str)) -> Self {
        self.warn = warn;
        self
    }

    /// The folder, unless the cache is off.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The access to the folder.
    pub fn mode(&self) -> Mode {
        self.mode
    }
}

/// The default folder: below `XDG_CACHE_HOME`, or else below the home folder. Relative paths are ignored, as the XDG base
/// directory specification requires.
fn default_folder(caches: Option<OsString>, home: Option<&Path>) -> Option<PathBuf> {
    let caches = caches.map(PathBuf::from).filter(|path| path.is_absolute());
    let home = home.filter(|path| path.is_absolute());
    Some(caches.or_else(|| Some(home?.join(".cache")))?.join("tilewright/kernels"))
}

#[cfg(test)]
mod tests {
    use super::{Mode, Settings, default_folder};
    use std::path::{Path, PathBuf};

    fn parse(text: &str) -> Result<(Option<PathBuf>, Mode), String> {
        let settings = Settings::parse(Some(text.as_ref()), Some("/usual".into()));
        settings.map(|settings| (settings.folder, settings.mode)).map_err(|why| why.to_string())
    }

    #[test]
    fn the_variable_names_a_folder_or_a_mode() {
        let at = |path: &str| Some(PathBuf::from(path));
        assert_eq!(parse(""), Ok((at("/usual"), Mode::ReadWrite)));
        assert_eq!(parse("/k"), Ok((at("/k"), Mode::ReadWrite)));
        assert_eq!(parse("read-only"), Ok((at("/usual"), Mode::ReadOnly)));
        assert_eq!(parse("read-only:/k"), Ok((at("/k"), Mode::ReadOnly)));
        assert_eq!(parse("off"), Ok((None, Mode::Off)));
        assert_eq!(parse("jit"), Ok((None, Mode::Off)));
        assert_eq!(Settings::parse(None, None).unwrap().mode, Mode::Off);
    }

    #[test]
    fn other_values_are_rejected_with_the_valid_ones() {
        for text in ["on", "kernels", "./k", "read-only:k", "OFF"] {
            let why = parse(text).unwrap_err();
            let begin = format!("kernel cache: TILEWRIGHT_CACHE = \"{text}\", expected an absolute path, ");
            assert!(why.starts_with(&begin), "{why}");
        }
    }

    #[test]
    fn the_default_folder_follows_the_specification() {
        let home = Some(Path::new("/home/me"));
        let in_home = Some(PathBuf::from("/home/me/.cache/tilewright/kernels"));
        assert_eq!(default_folder(None, home), in_home);
        assert_eq!(default_folder(Some("caches".into()), home), in_home);
        assert_eq!(default_folder(Some("".into()), home), in_home);
        assert_eq!(default_folder(Some("/c".into()), home), Some("/c/tilewright/kernels".into()));
        assert_eq!(default_folder(None, None), None);
    }
}
