//! One safetensors file, mapped into memory, and the tensors that its header promises.
//!
//! Invariant: every tensor's byte range lies inside the map and is as long as its dtype and shape say.

use super::OPERATOR;
use memmap2::Mmap;
use safetensors::{
    SafeTensors,
    tensor::{Metadata, SafeTensorError},
};
use std::{fs::File, ops::Range, path::Path, sync::Arc};
use tilewright::{Error, Result};

/// Bytes of the header's length, which the header follows.
const LENGTH: usize = 8;

/// Where a tensor lies.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) map: Arc<Mmap>,
    pub(super) bytes: Range<usize>,
    pub(super) dtype: safetensors::Dtype,
    pub(super) shape: Vec<usize>,
}

/// Maps the file and reads its header.
pub(super) fn open(path: &Path) -> Result<Vec<(String, Record)>> {
    let failed = |error| refusal(path, &format!("cannot be read: {error}"));
    let map = Arc::new(map(&File::open(path).map_err(failed)?).map_err(failed)?);
    let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|error| damage(path, &map, &error))?;
    let start = LENGTH + header;
    let records = metadata.tensors().into_iter().map(|(name, info)| {
        let (begin, end) = info.data_offsets;
        let bytes = start + begin..start + end;
        (name, Record { map: map.clone(), bytes, dtype: info.dtype, shape: info.shape.clone() })
    });
    Ok(records.collect())
}

#[allow(unsafe_code, reason = "a map of a file is the only way to read weights without copying them")]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and private to `Record`; `Weights::open` asks of its caller that nobody
    // writes to the files meanwhile, which no safe call could guarantee.
    unsafe { Mmap::map(file) }
}

fn refusal(path: &Path, what: &str) -> Error {
    Error::new(OPERATOR, format!("{}: {what}", path.display()))
}

/// Says of a file that is not valid what most probably happened to it.
fn damage(path: &Path, bytes: &[u8], error: &SafeTensorError) -> Error {
    if bytes.starts_with(b"version https://git-lfs") {
        return refusal(path, "is a Git LFS pointer, not the weights; run `git lfs pull` in the folder");
    }
    let wanted = match error {
        SafeTensorError::HeaderTooSmall => LENGTH as u64,
        // Only files shorter than their header get here; a length of nonsense is `HeaderTooLarge`.
        SafeTensorError::InvalidHeaderLength => LENGTH as u64 + header_length(bytes),
        SafeTensorError::MetadataIncompleteBuffer => promised(bytes).unwrap_or_default(),
        _ => 0,
    };
    let actual = bytes.len() as u64;
    if wanted > actual {
        return refusal(path, &format!("is truncated: {actual} bytes, expected {wanted}"));
    }
    if matches!(error, SafeTensorError::MetadataIncompleteBuffer) && wanted > 0 {
        return refusal(path, &format!("has {actual} bytes, its header describes {wanted}"));
    }
    refusal(path, &format!("has a damaged header: {error}"))
}

fn header_length(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |&length| u64::from_le_bytes(length))
}

/// The length of the file according to its header.
fn promised(bytes: &[u8]) -> Option<u64> {
    let end = LENGTH + usize::try_from(header_length(bytes)).ok()?;
    let metadata: Metadata = serde_json::from_slice(bytes.get(LENGTH..end)?).ok()?;
    Some((end + metadata.data_len()) as u64)
}
