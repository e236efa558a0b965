//! `tilewright kernels bundle`: ahead-of-time compilation of kernels, with or without a GPU.

use super::{assembling, kernel_count, parse_arch, selection, size};
use clap::Args;
use miette::{IntoDiagnostic, Report, Result, miette};
use std::{num::NonZero, path::PathBuf};
use tilewright_cuda::cache::{Assembler, Ptxas, make_bundle};

const EXAMPLES: &str = "\
Examples:
  The kernels of common models for Hopper, with the ptxas on PATH:
    tilewright kernels bundle kernels-sm90 --arch sm_90

  Some kernels for all their architectures, with a ptxas from pip (needs no GPU):
    pip install nvidia-cuda-nvcc-cu12==12.9.86
    tilewright kernels bundle kernels 'rmsnorm*' --ptxas .../site-packages/nvidia/cuda_nvcc/bin/ptxas";

/// Compile kernels ahead of time into a separate folder
///
/// A program that opens the folder loads kernels from it before it assembles any; assembling can also be disabled.
/// ptxas assembles for any GPU. A driver loads code of its own CUDA major version and of older ones. Without ptxas, the driver assembles for this machine's GPU only.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct BundleArgs {
    /// Output folder; must be empty or not exist
    folder: PathBuf,
    /// Kernels by name or prefix, as in gemm* [default: those that engines load for common models; '*': all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Comma-separated architectures, as in 80,90 or sm_80,sm_90 [default: all that a kernel supports]
    #[arg(long = "arch", value_name = "ARCH", value_delimiter = ',', value_parser = parse_arch, allow_negative_numbers = true)]
    archs: Vec<u32>,
    /// Path of ptxas, the assembler of the CUDA toolkit [default: ptxas on PATH]
    #[arg(long, value_name = "FILE")]
    ptxas: Option<PathBuf>,
}

pub(super) fn run(arguments: &BundleArgs) -> Result<String> {
    let kernels = selection::select(&arguments.names)?;
    let (assembler, archs) = arguments.assembler()?;
    let sources = selection::sources(&kernels, &archs)?;
    let workers = std::thread::available_parallelism().map_or(1, NonZero::get);
    let made = |done: &(dyn Fn(&_) + Sync)| {
        make_bundle(&arguments.folder, &sources, assembler.as_ref(), workers, done)
    };
    let bytes = assembling::with_bar(sources.len(), made)?.into_diagnostic()?;
    let (kernels, by) = (kernel_count(sources.len()), assembler.identity());
    Ok(format!("{kernels}, {}, assembled by {by}, in {}\n", size(bytes), arguments.folder.display()))
}

impl BundleArgs {
    /// The assembler and the architectures; an empty list means all.
    fn assembler(&self) -> Result<(Box<dyn Assembler>, Vec<u32>)> {
        let named = self.ptxas.clone().unwrap_or_else(|| "ptxas".into());
        let missing = match Ptxas::at(named) {
            Ok(ptxas) => return Ok((Box::new(ptxas), self.archs.clone())),
            Err(why) if self.ptxas.is_some() => return Err(why).into_diagnostic(),
            Err(why) => why,
        };
        let driver = assembling::open_driver("bundle").map_err(|no_gpu| no_assembler(&missing, &no_gpu))?;
        let arch = assembling::arch(&driver);
        match self.archs.as_slice() {
            [] => {}
            [requested] if *requested == arch => {}
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
    "`pip install nvidia-cuda-nvcc-cu12==12.9.86` brings a ptxas, which --ptxas names; it needs no GPU";

fn no_assembler(ptxas: &dyn std::fmt::Display, gpu: &Report) -> Report {
    miette!(help = HELP, "kernels bundle: nothing can assemble: {ptxas}; {gpu}")
}
