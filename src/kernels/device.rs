//! This machine's GPU, whose driver assembles.

use miette::{Result, miette};
use tilewright_cuda::{
    Device,
    cache::{Assembler, Source},
};

/// A GPU and its driver.
pub(super) struct Gpu {
    device: Device,
    identity: String,
}

impl Gpu {
    /// The first GPU, for a command that needs one.
    pub(super) fn open(command: &str) -> Result<Self> {
        let device = Device::open().map_err(|why| {
            miette!(
                help = "without a GPU, `tilewright kernels bundle` assembles with ptxas",
                "{command}: {why}"
            )
        })?;
        Ok(Self { identity: String::new(), device })
    }

    pub(super) fn arch(&self) -> u32 {
        self.device.arch()
    }

    pub(super) fn name(&self) -> &str {
        self.device.name()
    }
}

impl Assembler for Gpu {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn assemble(&self, _source: &Source) -> Result<Vec<u8>, String> {
        Err("the runtime is not merged".to_owned())
    }
}
