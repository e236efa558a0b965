//! `tilewright kernels clear`: empties the cache.

use super::{cache, folder, kernel_count, size};
use clap::Args;
use miette::{IntoDiagnostic, Result};

/// Remove all kernels from the cache
///
/// Kernels are assembled again at their next use. Other files in the folder are kept.
#[derive(Args)]
pub(crate) struct ClearArgs {}

pub(super) fn run(_: &ClearArgs) -> Result<String> {
    let cache = cache()?;
    let folder = folder(&cache)?;
    let (entries, bytes) = cache.clear().into_diagnostic()?;
    Ok(format!("removed {}, {}, from {}\n", kernel_count(entries), size(bytes), folder.display()))
}
