//! `tilewright kernels clear`: an empty cache.

use super::{cache, counted, folder, size};
use clap::Args;
use miette::{IntoDiagnostic, Result};

/// Remove every kernel from the cache
///
/// They are assembled again when they are used. Files that are no kernels stay.
#[derive(Args)]
pub(crate) struct Arguments {}

pub(super) fn run(_: &Arguments) -> Result<String> {
    let cache = cache()?;
    let folder = folder(&cache)?;
    let (entries, bytes) = cache.clear().into_diagnostic()?;
    Ok(format!("removed {}, {}, from {}\n", counted(entries), size(bytes), folder.display()))
}
