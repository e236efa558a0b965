//! One memory-mapped safetensors file and the tensors of its header.
//!
//! Invariant: every tensor's byte range is inside the map, and its length matches dtype and shape.

use super::{super::files, OPERATOR};
use memmap2::Mmap;
use safetensors::{
    SafeTensors,
    tensor::{Metadata, SafeTensorError},
};
use std::{fs::File, ops::Range, path::Path, sync::Arc};
use tilewright::{Error, Result};

/// Bytes of the length field before the header.
const LENGTH_BYTES: usize = 8;

/// The location, dtype and shape of a tensor.
#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    pub(super) map: Arc<Mmap>,
    pub(super) bytes: Range<usize>,
    pub(super) dtype: safetensors::Dtype,
    pub(super) shape: Vec<usize>,
}

/// Maps the file and reads its header.
pub(super) fn open(path: &Path) -> Result<Vec<(String, TensorEntry)>> {
    let failed = |error| error_at(path, &format!("cannot be read: {error}"));
    let file = files::open(OPERATOR, path)?.ok_or_else(|| error_at(path, "does not exist"))?;
    let map = Arc::new(map(&file).map_err(failed)?);
    let (header, metadata) =
        SafeTensors::read_metadata(&map).map_err(|error| header_error(path, &map, &error))?;
    let start = LENGTH_BYTES + header;
    let entries = metadata.tensors().into_iter().map(|(name, info)| {
        let (begin, end) = info.data_offsets;
        let bytes = start + begin..start + end;
        (name, TensorEntry { map: map.clone(), bytes, dtype: info.dtype, shape: info.shape.clone() })
    });
    Ok(entries.collect())
}

#[allow(unsafe_code, reason = "zero-copy weights need a memory map, and memmap2 has no safe constructor")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and private to `TensorEntry`. The contract of `Weights::open` forbids writes to and
    // truncation of the file while the map exists, so the mapped bytes do not change.
    unsafe { Mmap::map(file) }
}

fn error_at(path: &Path, what: &str) -> Error {
    Error::new(OPERATOR, format!("{}: {what}", path.display()))
}

/// The most probable cause of an invalid file.
fn header_error(path: &Path, bytes: &[u8], error: &SafeTensorError) -> Error {
    if bytes.starts_with(b"version https://git-lfs") {
        return error_at(path, "is a Git LFS pointer, not the weights; run `git lfs pull` in the folder");
    }
    let expected = match error {
        SafeTensorError::HeaderTooSmall => LENGTH_BYTES as u64,
        // Only for files shorter than their header; an implausible length is `HeaderTooLarge`.
        SafeTensorError::InvalidHeaderLength => LENGTH_BYTES as u64 + header_length(bytes),
        SafeTensorError::MetadataIncompleteBuffer => described_length(bytes).unwrap_or_default(),
        _ => 0,
    };
    let actual = bytes.len() as u64;
    if expected > actual {
        return error_at(path, &format!("is truncated: {actual} bytes, expected {expected}"));
    }
    if matches!(error, SafeTensorError::MetadataIncompleteBuffer) && expected > 0 {
        return error_at(path, &format!("has {actual} bytes, its header describes {expected}"));
    }
    error_at(path, &format!("has a damaged header: {error}"))
}

fn header_length(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |&length| u64::from_le_bytes(length))
}

/// The file length according to the header.
fn described_length(bytes: &[u8]) -> Option<u64> {
    let end = LENGTH_BYTES + usize::try_from(header_length(bytes)).ok()?;
    let metadata: Metadata = serde_json::from_slice(bytes.get(LENGTH_BYTES..end)?).ok()?;
    Some((end + metadata.data_len()) as u64)
}
