//! One memory-mapped safetensors file and the tensors of its header.
//!
//! Invariant: every tensor's byte range is inside the map, and its length matches dtype and shape.

use super::{
    super::files,
    OPERATOR,
    tensor::{Encoding, TensorEntry},
};
use memmap2::Mmap;
use safetensors::{
    SafeTensors,
    tensor::{Metadata, SafeTensorError},
};
use std::{path::Path, sync::Arc};
use tilewright::{Error, Result, tensor};

/// Bytes of the length field before the header.
const LENGTH_BYTES: usize = 8;

/// Maps the file and reads its header.
pub(super) fn open(path: &Path) -> Result<Vec<(String, TensorEntry)>> {
    let map = map_file(OPERATOR, path)?;
    let (header, metadata) =
        SafeTensors::read_metadata(&map).map_err(|error| header_error(path, &map, &error))?;
    let start = LENGTH_BYTES + header;
    let entries = metadata.tensors().into_iter().map(|(name, info)| {
        let (begin, end) = info.data_offsets;
        let bytes = start + begin..start + end;
        let (encoding, shape) = (Encoding::Elements(info.dtype), info.shape.clone());
        (name, TensorEntry { map: map.clone(), bytes, encoding, shape, interleaved_heads: None })
    });
    Ok(entries.collect())
}

/// Maps a regular file. No process may write to it while the map exists ([`super::Weights::open`]).
pub(in crate::model) fn map_file(operator: &'static str, path: &Path) -> Result<Arc<Mmap>> {
    let failed = |what: &str| Error::new(operator, format!("{}: {what}", path.display()));
    let file = files::open(operator, path)?.ok_or_else(|| failed("does not exist"))?;
    tensor::map_file(&file).map(Arc::new).map_err(|error| failed(&format!("cannot be read: {error}")))
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
