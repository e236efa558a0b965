//! A progress bar for assembling, shown if standard error is a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use miette::{IntoDiagnostic, Result};
use tilewright_cuda::cache::Source;

/// Runs `work` on `kernels` kernels; `work` calls its argument after each one.
pub(super) fn with_bar<R>(kernels: usize, work: impl FnOnce(&(dyn Fn(&Source) + Sync)) -> R) -> Result<R> {
    let style =
        ProgressStyle::with_template("assembling {bar:30} {pos}/{len} {wide_msg}").into_diagnostic()?;
    let bar = ProgressBar::new(kernels as u64).with_style(style);
    let result = work(&|source| {
        bar.set_message(format!("{} for {}", source.name(), source.target()));
        bar.inc(1);
    });
    bar.finish_and_clear();
    Ok(result)
}
