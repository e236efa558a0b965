//! A folder with one file per entry, shared by any number of processes.
//!
//! A file is renamed to its final name when it is complete and synced, and never changes afterwards. So a reader finds a whole
//! entry, or none; the checksum detects later damage. There are no locks, so a killed process leaves none. A file's modification
//! time is the time of its last use.

use super::{
    entry::{Code, decode, encode},
    key::KernelKey,
};
use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, ErrorKind, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// Suffix of entries.
const SUFFIX: &str = ".kernel";
/// Prefix of files being written.
const DRAFT: &str = ".draft-";
/// Drafts of this age belong to killed processes: writing takes milliseconds.
const ABANDONED: Duration = Duration::from_secs(600);
/// Uses within this time count once, so that a start with many kernels does not update as many files.
const SAME_USE: Duration = Duration::from_secs(60);
/// Maximum size of an entry. Larger files are not ours and are not read.
const MAX_BYTES: u64 = 256 << 20;

/// A folder of entries.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    path: PathBuf,
}

/// The result of looking up a key.
#[derive(Debug)]
pub(super) enum Lookup {
    Missing,
    Damaged(String),
    Found(Code),
}

/// An entry of the cache folder.
#[derive(Debug, Clone)]
pub struct CacheEntry {
    /// Its key.
    pub key: KernelKey,
    /// Its content, or the reason why it is damaged.
    pub code: Result<Code, String>,
    /// Size of its file.
    pub bytes: u64,
    /// When it was last used.
    pub used: SystemTime,
}

/// A file with the name of an entry.
#[derive(Debug)]
struct EntryFile {
    key: KernelKey,
    bytes: u64,
    used: SystemTime,
}

impl Folder {
    pub(super) fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn file(&self, key: KernelKey) -> PathBuf {
        self.path.join(format!("{key}{SUFFIX}"))
    }

    /// Reads the entry under `key`. `using` updates the time of its last use, which delays its eviction.
    pub(super) fn lookup(&self, key: KernelKey, using: bool) -> Lookup {
        let (file, bytes) = match self.bytes(key) {
            Ok(read) => read,
            Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Lookup::Missing;
            }
            Err(why) => return Lookup::Damaged(format!("it cannot be read: {why}")),
        };
        match decode(key, &bytes) {
            Ok(code) => {
                if using {
                    mark_used(&file);
                }
                Lookup::Found(code)
            }
            Err(damage) => Lookup::Damaged(damage.to_owned()),
        }
    }

    fn bytes(&self, key: KernelKey) -> io::Result<(File, Vec<u8>)> {
        let path = self.file(key);
        let found = fs::metadata(&path)?;
        if !found.is_file() || found.len() > MAX_BYTES {
            // opening a pipe would block until a writer opens it
            return Err(io::Error::other("it is no file of a kernel's size"));
        }
        let mut file = File::open(&path)?;
        let mut bytes = Vec::with_capacity(found.len() as usize + 1);
        Read::by_ref(&mut file).take(MAX_BYTES).read_to_end(&mut bytes)?;
        Ok((file, bytes))
    }

    /// Writes an entry atomically: concurrent readers find the previous content or the new one.
    pub(super) fn write(&self, key: KernelKey, code: &Code) -> io::Result<()> {
        fs::create_dir_all(&self.path)?;
        let mut draft_file = tempfile::Builder::new();
        draft_file.prefix(DRAFT);
        #[cfg(unix)]
        let readable = {
            use std::os::unix::fs::PermissionsExt;
            fs::Permissions::from_mode(0o644) // masked by the umask: folders and bundles may be shared
        };
        #[cfg(unix)]
        draft_file.permissions(readable);
        let mut draft = draft_file.tempfile_in(&self.path)?;
        draft.write_all(&encode(key, code))?;
        draft.as_file().sync_all()?;
        draft.persist(self.file(key)).map_err(|failed| failed.error)?;
        #[cfg(unix)]
        File::open(&self.path)?.sync_all()?; // make the rename durable
        Ok(())
    }

    /// Removes the entry under `key`. If that fails, the next lookup misses again.
    pub(super) fn remove(&self, key: KernelKey) {
        let _ = fs::remove_file(self.file(key));
    }

    /// Files of entries, the least recently used first.
    fn entry_files(&self) -> io::Result<Vec<EntryFile>> {
        let mut entries = Vec::new();
        for file in self.files()? {
            let file = file?;
            // another process may have evicted it since the folder was read
            let (Some(key), Ok(found)) = (key_of(&file.file_name()), file.metadata()) else { continue };
            if found.is_file() {
                entries.push(EntryFile { key, bytes: found.len(), used: found.modified()? });
            }
        }
        entries.sort_by_key(|entry| (entry.used, entry.key));
        Ok(entries)
    }

    /// Whether any file has the name of an entry.
    pub(super) fn has_entry_file(&self) -> io::Result<bool> {
        for file in self.files()? {
            if key_of(&file?.file_name()).is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The files of the folder; none if it does not exist.
    fn files(&self) -> io::Result<impl Iterator<Item = io::Result<fs::DirEntry>> + use<>> {
        let files = match fs::read_dir(&self.path) {
            Err(why) if why.kind() == ErrorKind::NotFound => None,
            files => Some(files?),
        };
        Ok(files.into_iter().flatten())
    }

    /// All entries with their content, the most recently used first.
    pub(super) fn list(&self) -> io::Result<Vec<CacheEntry>> {
        let files = self.entry_files()?;
        let listed = files.into_iter().rev().filter_map(|EntryFile { key, bytes, used }| {
            let code = match self.lookup(key, false) {
                Lookup::Missing => return None,
                Lookup::Damaged(why) => Err(why),
                Lookup::Found(code) => Ok(code),
            };
            Some(CacheEntry { key, code, bytes, used })
        });
        Ok(listed.collect())
    }

    /// Removes the least recently used entries until the total is at most `limit` bytes, and drafts of killed processes.
    pub(super) fn evict(&self, limit: u64) -> io::Result<()> {
        let entries = self.entry_files()?;
        let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for entry in entries {
            if bytes <= limit {
                break;
            }
            ignore_missing(fs::remove_file(self.file(entry.key)))?;
            bytes -= entry.bytes;
        }
        self.remove_drafts(ABANDONED)
    }

    /// Removes all entries and drafts and no other files. Returns the number of entries and their bytes.
    pub(super) fn clear(&self) -> io::Result<(usize, u64)> {
        let (mut entries, mut bytes) = (0, 0);
        for entry in self.entry_files()? {
            ignore_missing(fs::remove_file(self.file(entry.key)))?;
            (entries, bytes) = (entries + 1, bytes + entry.bytes);
        }
        self.remove_drafts(Duration::ZERO)?;
        Ok((entries, bytes))
    }

    fn remove_drafts(&self, min_age: Duration) -> io::Result<()> {
        for file in self.files()? {
            let file = file?;
            let draft = file.file_name().to_str().is_some_and(|name| name.starts_with(DRAFT));
            if draft && file.metadata().and_then(|found| found.modified()).is_ok_and(|at| age(at) >= min_age)
            {
                ignore_missing(fs::remove_file(file.path()))?;
            }
        }
        Ok(())
    }
}

/// The key in the name of an entry.
fn key_of(name: &OsStr) -> Option<KernelKey> {
    KernelKey::parse(name.to_str()?.strip_suffix(SUFFIX)?)
}

/// Age of `at`; zero if it is in the future.
fn age(at: SystemTime) -> Duration {
    at.elapsed().unwrap_or_default()
}

/// Sets the time of the last use to now. If the folder forbids it, entries keep the order in which they were written.
fn mark_used(file: &File) {
    let used = file.metadata().and_then(|found| found.modified());
    if used.is_ok_and(|at| age(at) >= SAME_USE) {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// Ignores that another process removed the file first.
fn ignore_missing(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(why) if why.kind() != ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}
