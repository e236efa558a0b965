//! `tilewright kernels bundle`: machine code made ahead of time, also where there is no GPU.

use super::{chosen, counted, device, progress, size};
use clap::Args;
use miette::{IntoDiagnostic, Report, Result, miette};
use std::{num::NonZero, path::PathBuf};
use tilewright_cuda::cache::{Assembler, Ptxas, make_bundle};

const EXAMPLES: &str = "\
Examples:
  Everything for Hopper, by the ptxas on PATH:
    tilewright kernels bundle kernels-sm90 --arch 90

  Two kernels for all that they can be for, by a ptxas that pip has installed (no GPU is needed):
    pip install nvidia-cuda-nvcc==13.0.88
    tilewright kernels bundle kernels 'rmsnorm*' --ptxas .../site-packages/nvidia/cu13/bin/ptxas";

/// Make machine code ahead of time, into a folder of its own
///
/// A program that is given the folder takes kernels from there before it assembles any, and can be told to assemble
/// none. Made by ptxas, for any GPU; by the driver, for this machine's GPU, where there is no ptxas.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The folder; it has to be empty, or not there yet
    folder: PathBuf,
    /// Kernels by name, or by what names begin with, as in gemm*. [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Architectures, with commas between them: 90 is sm_90. [default: all that a kernel is for]
    #[arg(long = "arch", value_name = "ARCH", value_delimiter = ',')]
    archs: Vec<u32>,
    /// The assembler of the CUDA toolkit. [default: ptxas of PATH]
    #[arg(long, value_name = "FILE")]
    ptxas: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments) -> Result<String> {
    let kernels = chosen::kernels(&arguments.names)?;
    let (assembler, archs) = arguments.assembler()?;
    let sources = chosen::sources(&kernels, &archs)?;
    let workers = std::thread::available_parallelism().map_or(1, NonZero::get);
    let made = |done: &(dyn Fn(&_) + Sync)| {
        make_bundle(&arguments.folder, &sources, assembler.as_ref(), workers, done)
    };
    let bytes = progress::shown(sources.len(), made)?.into_diagnostic()?;
    let (kernels, by) = (counted(sources.len()), assembler.identity());
    Ok(format!("{kernels}, {}, assembled by {by}, in {}\n", size(bytes), arguments.folder.display()))
}

impl Arguments {
    /// What assembles, and for which architectures: none are all.
    fn assembler(&self) -> Result<(Box<dyn Assembler>, Vec<u32>)> {
        let named = self.ptxas.clone().unwrap_or_else(|| "ptxas".into());
        let missing = match Ptxas::at(named) {
            Ok(ptxas) => return Ok((Box::new(ptxas), self.archs.clone())),
            Err(why) if self.ptxas.is_some() => return Err(why).into_diagnostic(),
            Err(why) => why,
        };
        let driver = device::open("bundle").map_err(|no_gpu| nothing_assembles(&missing, &no_gpu))?;
        let arch = device::arch(&driver);
        match self.archs.as_slice() {
            [] => {}
            [asked] if *asked == arch => {}
            _ => {
                return Err(miette!(
                    help = HELP,
                    "kernels bundle: the driver assembles for sm_{arch} alone, and {missing}"
                ));
            }
        }
        Ok((Box::new(driver), vec![arch]))
    }
}

const HELP: &str =
    "`pip install nvidia-cuda-nvcc==13.0.88` brings a ptxas, which --ptxas names; it needs no GPU";

fn nothing_assembles(ptxas: &dyn std::fmt::Display, gpu: &Report) -> Report {
    miette!(help = HELP, "kernels bundle: nothing can assemble: {ptxas}; {gpu}")
}
