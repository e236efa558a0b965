//! `tilewright kernels warm` and `tilewright kernels clear`: fill the cache ahead of use, and empty it.

use super::{assembling, cache, folder, kernel_count, selection, size};
use clap::Args;
use miette::{IntoDiagnostic, Result, bail};
use std::time::Instant;
use tilewright_cuda::cache::{Assembler, Mode, Source};

/// Assemble kernels for this machine's GPU into the cache
#[derive(Args)]
pub(crate) struct WarmArgs {
    /// Kernels by name or prefix, as in gemm* [default: those that engines load for common models on this GPU]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
}

pub(super) fn warm(arguments: &WarmArgs) -> Result<String> {
    let cache = cache()?;
    let folder = folder(&cache)?;
    if cache.settings().mode() != Mode::ReadWrite {
        bail!("kernels warm: {} may only be read", folder.display());
    }
    let kernels = selection::select(&arguments.names)?;
    let driver = assembling::open_driver("warm")?;
    let mut sources = Vec::new();
    for kernel in &kernels {
        let recorded = (kernel.build)().into_diagnostic()?;
        match Source::of(&recorded, assembling::arch(&driver)) {
            Ok(source) => sources.push(source),
            // not requested by name and not for this GPU
            Err(_) if arguments.names.is_empty() => {}
            Err(why) => return Err(why).into_diagnostic(),
        }
    }
    let start = Instant::now();
    assembling::with_bar(sources.len(), |done| cache.all(&sources, &driver, done))?.into_diagnostic()?;
    let counts = cache.counts();
    Ok(format!(
        "{} for {}: {} were there, {} assembled in {:.1} s by {}, in {}\n",
        kernel_count(sources.len()),
        driver.context().properties().name,
        counts.cached,
        counts.assembled,
        start.elapsed().as_secs_f64(),
        driver.identity(),
        folder.display()
    ))
}

/// Remove all kernels from the cache
///
/// Kernels are assembled again at their next use. Other files in the folder are kept.
#[derive(Args)]
pub(crate) struct ClearArgs {}

pub(super) fn clear(_: &ClearArgs) -> Result<String> {
    let cache = cache()?;
    let folder = folder(&cache)?;
    let (entries, bytes) = cache.clear().into_diagnostic()?;
    Ok(format!("removed {}, {}, from {}\n", kernel_count(entries), size(bytes), folder.display()))
}
