//! Files of a model folder: bounded reads of regular files.
//!
//! Invariant: only a regular file is opened. Opening a FIFO blocks, and a device may never end.

use serde_json::{Map, Value};
use std::{
    fs::{File, Metadata},
    io::{ErrorKind, Read},
    path::Path,
};
use tilewright::{Error, Result, ensure};

/// Maximum bytes of a JSON or text file. The largest published `tokenizer.json` files have 35 MB.
pub(super) const MAX_TEXT_BYTES: u64 = 128 << 20;

/// The text of `dir/file`; `None` if the file does not exist.
pub(super) fn read_optional(operator: &'static str, dir: &Path, file: &str) -> Result<Option<String>> {
    let path = dir.join(file);
    let failed = |error: std::io::Error| fail(operator, &path, &format!("cannot be read: {error}"));
    let Some(file) = open(operator, &path)? else { return Ok(None) };
    let mut text = String::new();
    // The size of a file that grows, or of one in /proc, is not known before it is read.
    let size = file.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text).map_err(failed)? as u64;
    if size > MAX_TEXT_BYTES {
        let what = format!("is longer than {} MiB, which no such file needs", MAX_TEXT_BYTES >> 20);
        return Err(fail(operator, &path, &what));
    }
    Ok(Some(text))
}

/// The text of `dir/file`, which must exist.
pub(super) fn read_required(operator: &'static str, dir: &Path, file: &str) -> Result<String> {
    ensure!(dir.is_dir(), operator, "{}: there is no such folder", dir.display());
    read_optional(operator, dir, file)?
        .ok_or_else(|| Error::new(operator, format!("{}: there is no {file}", dir.display())))
}

/// Parses `text`, the content of `file`, as a JSON object.
pub(super) fn parse_object(operator: &'static str, file: &str, text: &str) -> Result<Map<String, Value>> {
    serde_json::from_str(text)
        .map_err(|error| Error::new(operator, format!("{file} is not a JSON object: {error}")))
}

/// Opens a regular file; `None` if it does not exist.
pub(super) fn open(operator: &'static str, path: &Path) -> Result<Option<File>> {
    let failed = |error: std::io::Error| fail(operator, path, &format!("cannot be read: {error}"));
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    if !metadata.is_file() {
        return Err(fail(operator, path, &format!("is {}, expected a regular file", kind(&metadata))));
    }
    File::open(path).map(Some).map_err(failed)
}

fn fail(operator: &'static str, path: &Path, what: &str) -> Error {
    Error::new(operator, format!("{}: {what}", path.display()))
}

/// The kind of something that is not a regular file.
fn kind(metadata: &Metadata) -> &'static str {
    if metadata.is_dir() {
        return "a folder";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = metadata.file_type();
        if kind.is_fifo() {
            return "a FIFO";
        } else if kind.is_socket() {
            return "a socket";
        }
    }
    "a device"
}
