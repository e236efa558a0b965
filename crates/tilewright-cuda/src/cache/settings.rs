//! Where machine code is looked for and kept. The one place that reads the environment.

use super::error::{Error, Result};
use std::{
    ffi::{OsStr, OsString},
    num::NonZero,
    path::{Path, PathBuf},
};

/// The environment variable that says where kernels are kept.
pub const VARIABLE: &str = "TILEWRIGHT_CACHE";
const EXPECTED: &str =
    "an absolute path, `read-only`, `read-only:` with an absolute path behind it, or `off`";
/// The size that the folder may have, unless [`Settings::limit`] says otherwise.
pub const DEFAULT_LIMIT: u64 = 1 << 30;
/// Kernels that are assembled at once, unless [`Settings::workers`] says otherwise or the machine has fewer cores.
const DEFAULT_WORKERS: usize = 8;

/// What may be done with the cache's folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It is read, and what is assembled is kept there.
    ReadWrite,
    /// It is read; nothing in it changes.
    ReadOnly,
    /// It is left alone.
    Off,
}

/// Where machine code comes from, and where it is kept.
#[derive(Debug, Clone)]
#[must_use]
pub struct Settings {
    pub(super) folder: Option<PathBuf>,
    pub(super) mode: Mode,
    pub(super) limit: u64,
    pub(super) bundles: Vec<PathBuf>,
    pub(super) assemble: bool,
    pub(super) workers: usize,
    pub(super) warn: fn(&str),
}

impl Settings {
    /// Kept in `folder`, which is made when the first kernel is.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self::new(Some(folder.into()), Mode::ReadWrite)
    }

    /// Kept nowhere: each process assembles what it uses, or takes it from bundles.
    pub fn off() -> Self {
        Self::new(None, Mode::Off)
    }

    /// Kept where `TILEWRIGHT_CACHE` says: an absolute path, or `off`, `read-only` and `read-only:PATH` for the modes; without
    /// it in `$XDG_CACHE_HOME/tilewright/kernels`, which is `~/.cache/tilewright/kernels` where that is not set.
    ///
    /// # Errors
    /// When the variable says something else.
    pub fn from_environment() -> Result<Self> {
        let caches = std::env::var_os("XDG_CACHE_HOME");
        let home = std::env::home_dir();
        Self::told(std::env::var_os(VARIABLE).as_deref(), usual(caches, home.as_deref()))
    }

    /// As [`Self::from_environment`], where the variable is `told` and kernels are usually kept in `usual`.
    fn told(told: Option<&OsStr>, usual: Option<PathBuf>) -> Result<Self> {
        let of = |folder, mode| Ok(Self::new(Some(folder), mode));
        let usually = |mode| Ok(usual.clone().map_or_else(Self::off, |folder| Self::new(Some(folder), mode)));
        let Some(told) = told.filter(|told| !told.is_empty()) else { return usually(Mode::ReadWrite) };
        let path = Path::new(told);
        if path.is_absolute() {
            return of(path.to_owned(), Mode::ReadWrite);
        }
        match told.to_str() {
            Some("off") => return Ok(Self::off()),
            Some("read-only") => return usually(Mode::ReadOnly),
            Some(text) => {
                let folder = text.strip_prefix("read-only:").map(Path::new).filter(|path| path.is_absolute());
                if let Some(folder) = folder {
                    return of(folder.to_owned(), Mode::ReadOnly);
                }
            }
            None => {}
        }
        let value = told.to_string_lossy().into_owned();
        Err(Error::Setting { name: VARIABLE, value, expected: EXPECTED })
    }

    fn new(folder: Option<PathBuf>, mode: Mode) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let warn = |text: &str| eprintln!("tilewright: {text}");
        let (limit, workers) = (DEFAULT_LIMIT, cores.min(DEFAULT_WORKERS));
        Self { folder, mode, limit, bundles: Vec::new(), assemble: true, workers, warn }
    }

    /// Entries of the folder are read, and it is not written to.
    pub fn read_only(mut self) -> Self {
        if self.mode == Mode::ReadWrite {
            self.mode = Mode::ReadOnly;
        }
        self
    }

    /// The most bytes that entries may have together. When a kernel is added, those that were not used for the longest time are
    /// removed until that holds.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Looks in a bundle, too, before the folder. Bundles are looked at in the order in which they are given.
    pub fn bundle(mut self, folder: impl Into<PathBuf>) -> Self {
        self.bundles.push(folder.into());
        self
    }

    /// Nothing is assembled: what is in no bundle and not in the folder is an error that names it.
    pub fn refuse_to_assemble(mut self) -> Self {
        self.assemble = false;
        self
    }

    /// How many kernels are assembled at once, at least one.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.max(1);
        self
    }

    /// Who is told, once, that the cache cannot be used, and of bundles that do not fit. Otherwise standard error is.
    pub fn warn(mut self, warn: fn(&str)) -> Self {
        self.warn = warn;
        self
    }

    /// The folder, unless the cache is off.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// What may be done with the folder.
    pub fn mode(&self) -> Mode {
        self.mode
    }
}

/// The place for caches of `XDG_CACHE_HOME` or the home folder; none where there is neither. A relative path there is to be
/// ignored, as the XDG base directory specification says.
fn usual(caches: Option<OsString>, home: Option<&Path>) -> Option<PathBuf> {
    let caches = caches.map(PathBuf::from).filter(|path| path.is_absolute());
    let home = home.filter(|path| path.is_absolute());
    Some(caches.or_else(|| Some(home?.join(".cache")))?.join("tilewright/kernels"))
}

#[cfg(test)]
mod tests {
    use super::{Mode, Settings, usual};
    use std::path::{Path, PathBuf};

    fn told(text: &str) -> Result<(Option<PathBuf>, Mode), String> {
        let settings = Settings::told(Some(text.as_ref()), Some("/usual".into()));
        settings.map(|settings| (settings.folder, settings.mode)).map_err(|why| why.to_string())
    }

    #[test]
    fn the_variable_names_a_folder_or_a_mode() {
        let at = |path: &str| Some(PathBuf::from(path));
        assert_eq!(told(""), Ok((at("/usual"), Mode::ReadWrite)));
        assert_eq!(told("/k"), Ok((at("/k"), Mode::ReadWrite)));
        assert_eq!(told("read-only"), Ok((at("/usual"), Mode::ReadOnly)));
        assert_eq!(told("read-only:/k"), Ok((at("/k"), Mode::ReadOnly)));
        assert_eq!(told("off"), Ok((None, Mode::Off)));
        assert_eq!(Settings::told(None, None).unwrap().mode, Mode::Off);
    }

    #[test]
    fn any_other_value_is_refused_with_what_was_expected() {
        for text in ["on", "kernels", "./k", "read-only:k", "OFF"] {
            let why = told(text).unwrap_err();
            let begin = format!("kernel cache: TILEWRIGHT_CACHE = \"{text}\", expected an absolute path, ");
            assert!(why.starts_with(&begin), "{why}");
        }
    }

    #[test]
    fn the_usual_place_is_that_of_the_specification() {
        let home = Some(Path::new("/home/me"));
        let in_home = Some(PathBuf::from("/home/me/.cache/tilewright/kernels"));
        assert_eq!(usual(None, home), in_home);
        assert_eq!(usual(Some("caches".into()), home), in_home);
        assert_eq!(usual(Some("".into()), home), in_home);
        assert_eq!(usual(Some("/c".into()), home), Some("/c/tilewright/kernels".into()));
        assert_eq!(usual(None, None), None);
    }
}
