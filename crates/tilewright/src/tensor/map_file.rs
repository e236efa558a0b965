//! Read-only memory maps of files, for weights without a copy.

use memmap2::Mmap;
use std::{fs::File, io};

/// Maps `file` into memory, read-only.
///
/// No process may write to the file or truncate it while the map exists: access to a truncated map is fatal (SIGBUS).
/// Replacing the file, as downloads and `mv` do, is safe.
///
/// # Errors
/// When the file cannot be mapped.
#[allow(unsafe_code, reason = "zero-copy weights need a memory map, and memmap2 has no safe constructor")]
pub fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only. The documented condition forbids writes to and truncation of the file while the map
    // exists, so the mapped bytes do not change.
    unsafe { Mmap::map(file) }
}
