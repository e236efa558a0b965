//! The driver of this machine's first GPU, as an assembler.

use miette::{Result, miette};
use tilewright_cuda::{Context, cache::Driver};

/// Opens the driver of the first GPU; errors name `command`.
pub(super) fn open(command: &str) -> Result<Driver> {
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
