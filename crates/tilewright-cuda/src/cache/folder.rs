//! Entries as files of a folder, which any number of processes read and write at once.
//!
//! A file gets its name when it is complete and on disk, and never changes after: whoever finds a name finds all of an entry, or,
//! if a disk or a person spoiled it, none. There is no lock, so that none can be left behind. The time of a file's last change
//! is when it was last used.

use super::{
    entry::{Code, decode, encode},
    source::Key,
};
use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// What entries' names end with.
const SUFFIX: &str = ".kernel";
/// What names begin with while files are written.
const DRAFT: &str = ".draft-";
/// A draft this old belongs to a process that was killed: writing takes milliseconds.
const ABANDONED: Duration = Duration::from_secs(600);
/// Uses closer together than this are one, so that a start that uses many kernels does not write as many times.
const SAME_USE: Duration = Duration::from_secs(60);
/// More bytes than any kernel has. What is larger is not ours, and not read.
const MOST_BYTES: u64 = 256 << 20;

/// A folder of entries.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    path: PathBuf,
}

/// What lies under a key.
#[derive(Debug)]
pub(super) enum Look {
    Nothing,
    Damaged(String),
    Found(Code),
}

/// An entry as it lies in its folder.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its key.
    pub key: Key,
    /// Its content, or why it is none.
    pub code: Result<Code, String>,
    /// Size of its file.
    pub bytes: u64,
    /// When it was last used.
    pub used: SystemTime,
}

/// A file with an entry's name.
#[derive(Debug)]
struct Named {
    key: Key,
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

    fn file(&self, key: Key) -> PathBuf {
        self.path.join(format!("{key}{SUFFIX}"))
    }

    /// Reads what lies under `key`; `using` it keeps it from being evicted soon.
    pub(super) fn look(&self, key: Key, using: bool) -> Look {
        let (file, bytes) = match self.bytes(key) {
            Ok(read) => read,
            Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Look::Nothing;
            }
            Err(why) => return Look::Damaged(format!("it cannot be read: {why}")),
        };
        match decode(key, &bytes) {
            Ok(code) => {
                if using {
                    mark_used(&file);
                }
                Look::Found(code)
            }
            Err(damage) => Look::Damaged(damage.to_owned()),
        }
    }

    fn bytes(&self, key: Key) -> io::Result<(File, Vec<u8>)> {
        let path = self.file(key);
        let found = fs::metadata(&path)?;
        if !found.is_file() || found.len() > MOST_BYTES {
            // opening a pipe would wait for somebody to write
            return Err(io::Error::other("it is no file of a kernel's size"));
        }
        let mut file = File::open(&path)?;
        let mut bytes = Vec::with_capacity(found.len() as usize + 1);
        Read::by_ref(&mut file).take(MOST_BYTES).read_to_end(&mut bytes)?;
        Ok((file, bytes))
    }

    /// Writes an entry; whoever looks meanwhile finds what was there before, or all of it.
    pub(super) fn write(&self, key: Key, code: &Code) -> io::Result<()> {
        fs::create_dir_all(&self.path)?;
        let mut named = tempfile::Builder::new();
        named.prefix(DRAFT);
        #[cfg(unix)]
        let readable = {
            use std::os::unix::fs::PermissionsExt;
            fs::Permissions::from_mode(0o644) // less the process's mask: folders and bundles may be shared
        };
        #[cfg(unix)]
        named.permissions(readable);
        let mut draft = named.tempfile_in(&self.path)?;
        draft.write_all(&encode(key, code))?;
        draft.as_file().sync_all()?;
        draft.persist(self.file(key)).map_err(|failed| failed.error)?;
        #[cfg(unix)]
        File::open(&self.path)?.sync_all()?; // the name, too
        Ok(())
    }

    /// Removes what lies under `key`. If it cannot be removed, it will be a miss again.
    pub(super) fn remove(&self, key: Key) {
        let _ = fs::remove_file(self.file(key));
    }

    /// Entries, the least recently used first.
    fn named(&self) -> io::Result<Vec<Named>> {
        let mut entries = Vec::new();
        for file in self.files()? {
            let file = file?;
            let name = file.file_name();
            let key = name.to_str().and_then(|name| Key::parse(name.strip_suffix(SUFFIX)?));
            // it may have been evicted by another process since the folder was read
            let (Some(key), Ok(found)) = (key, file.metadata()) else { continue };
            if found.is_file() {
                entries.push(Named { key, bytes: found.len(), used: found.modified()? });
            }
        }
        entries.sort_by_key(|entry| (entry.used, entry.key));
        Ok(entries)
    }

    /// Whether it has no entry.
    pub(super) fn is_empty(&self) -> io::Result<bool> {
        Ok(self.named()?.is_empty())
    }

    /// The folder's files; none where there is no folder yet.
    fn files(&self) -> io::Result<impl Iterator<Item = io::Result<fs::DirEntry>> + use<>> {
        let files = match fs::read_dir(&self.path) {
            Err(why) if why.kind() == ErrorKind::NotFound => None,
            files => Some(files?),
        };
        Ok(files.into_iter().flatten())
    }

    /// Every entry with its content, the most recently used first.
    pub(super) fn list(&self) -> io::Result<Vec<Listed>> {
        let named = self.named()?;
        let listed = named.into_iter().rev().filter_map(|Named { key, bytes, used }| {
            let code = match self.look(key, false) {
                Look::Nothing => return None,
                Look::Damaged(why) => Err(why),
                Look::Found(code) => Ok(code),
            };
            Some(Listed { key, code, bytes, used })
        });
        Ok(listed.collect())
    }

    /// Removes the least recently used entries until all are within `limit` bytes, and what killed processes left.
    pub(super) fn evict(&self, limit: u64) -> io::Result<()> {
        let entries = self.named()?;
        let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for entry in entries {
            if bytes <= limit {
                break;
            }
            gone(fs::remove_file(self.file(entry.key)))?;
            bytes -= entry.bytes;
        }
        self.remove_drafts(ABANDONED)
    }

    /// Removes every entry and every draft, and nothing else. How many entries and bytes there were.
    pub(super) fn clear(&self) -> io::Result<(usize, u64)> {
        let (mut entries, mut bytes) = (0, 0);
        for entry in self.named()? {
            gone(fs::remove_file(self.file(entry.key)))?;
            (entries, bytes) = (entries + 1, bytes + entry.bytes);
        }
        self.remove_drafts(Duration::ZERO)?;
        Ok((entries, bytes))
    }

    fn remove_drafts(&self, age: Duration) -> io::Result<()> {
        for file in self.files()? {
            let file = file?;
            let draft = file.file_name().to_str().is_some_and(|name| name.starts_with(DRAFT));
            if draft && file.metadata().and_then(|found| found.modified()).is_ok_and(|at| passed(at) >= age) {
                gone(fs::remove_file(file.path()))?;
            }
        }
        Ok(())
    }
}

/// How long ago `at` is; nothing for a time to come.
fn passed(at: SystemTime) -> Duration {
    at.elapsed().unwrap_or_default()
}

/// Sets the time of the last use to now. A folder that forbids it keeps the order in which its entries were written.
fn mark_used(file: &File) {
    let used = file.metadata().and_then(|found| found.modified());
    if used.is_ok_and(|at| passed(at) >= SAME_USE) {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// The result of removing a file that another process may have removed before.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(why) if why.kind() != ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}
