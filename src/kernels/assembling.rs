//! Assembling of kernels: the driver of this machine's first GPU as an assembler, and a bar of the progress.

use crate::progress;
use miette::{Result, miette};
use tilewright_cuda::{
    Context,
    cache::{Driver, Source},
};

/// Opens the driver of the first GPU; errors name `command`.
pub(super) fn open_driver(command: &str) -> Result<Driver> {
    let context = Context::open(0).map_err(|why| {
        miette!(
            help = "without a GPU, `tilewright kernels bundle` assembles with ptxas",
            "kernels {command}: {why}"
        )
    })?;
    Ok(Driver::of(&context))
}

/// The architecture of its GPU: 90 is sm_90.
pub(super) fn arch(driver: &Driver) -> u32 {
    driver.context().properties().arch
}

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
