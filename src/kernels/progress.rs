//! Progress of assembling.

use crate::progress;
use miette::Result;
use tilewright_cuda::cache::Source;

/// Runs `work` on `kernels` kernels; `work` calls its argument after each one.
pub(super) fn with_bar<R>(kernels: usize, work: impl FnOnce(&(dyn Fn(&Source) + Sync)) -> R) -> Result<R> {
    let bar = progress::count("assembling", kernels as u64)?;
    let result = work(&|source| {
        bar.set_message(format!("{} for {}", source.name(), source.target()));
        bar.inc(1);
    });
    bar.finish_and_clear();
    Ok(result)
}
