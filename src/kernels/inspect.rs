//! `tilewright kernels inspect`: launch parameters, PTX, resources and times of one kernel.

use super::{assembling, cache, parse_arch, selection, size, targets, times};
use crate::plan::parse_roofline;
use clap::Args;
use miette::{IntoDiagnostic, Result, miette};
use std::{fmt::Write, path::PathBuf};
use tilewright::Roofline;
use tilewright_cuda::{
    Context,
    cache::{Assembler, Cache, Driver, Footprint, Ptxas, Settings, Source},
};
use tilewright_kernels::KernelEntry;
use tilewright_ptx::{Kernel, ir::ParamKind};

/// Show a kernel: registers, shared memory, spills, PTX, predicted and measured time
///
/// Times are for attention kernels over one decode step: the roofline estimate, and the measurement on this machine's GPU. Kernels with
/// hooks and kernels other than attention have no reference problem, hence no times.
#[derive(Args)]
pub(crate) struct InspectArgs {
    /// Kernel name; see `tilewright kernels list`
    name: String,
    /// Architecture, as in 90 or sm_90 [default: this machine's GPU, or the newest that the kernel supports]
    #[arg(long, value_parser = parse_arch, allow_negative_numbers = true)]
    arch: Option<u32>,
    /// Print only the PTX
    #[arg(long)]
    ptx: bool,
    /// Path of ptxas, the assembler of the CUDA toolkit [default: the driver, else ptxas on PATH]
    #[arg(long, value_name = "FILE")]
    ptxas: Option<PathBuf>,
    /// Bandwidth and throughput for the prediction [default: those of this machine's GPU]
    #[arg(long, value_name = "GB/s/GFLOP/s", value_parser = parse_roofline)]
    roofline: Option<Roofline>,
}

/// The assembler of the machine code.
enum KernelAssembler {
    Driver(Driver),
    Ptxas(Ptxas),
}

pub(super) fn run(arguments: &InspectArgs) -> Result<String> {
    let selected = selection::select(std::slice::from_ref(&arguments.name))?;
    let [entry] = selected.as_slice() else {
        return Err(miette!(
            "kernels inspect: {} are {} kernels, expected one",
            arguments.name,
            selected.len()
        ));
    };
    let kernel = (entry.build)().into_diagnostic()?;
    let assembler = arguments.assembler()?;
    let arch = arguments.arch.or_else(|| assembler.as_ref().ok()?.arch());
    let newest = entry.archs.last().copied().unwrap_or_default();
    let arch = arch.unwrap_or(newest);
    let source = Source::of(&kernel, arch).into_diagnostic()?;
    if arguments.ptx {
        return Ok(source.ptx().to_owned());
    }
    let mut report = describe(entry, &kernel, &source);
    match assembler {
        Ok(assembler) => report += &assembler.machine_code(&source)?,
        Err(why) => row(&mut report, "machine code", &format!("not known: {why}")),
    }
    report += &arguments.times(entry, arch);
    Ok(report)
}

impl InspectArgs {
    /// The predicted time, and the measured time if the GPU has this architecture.
    fn times(&self, entry: &KernelEntry, arch: u32) -> String {
        let mut report = String::new();
        let Some(problem) = &entry.problem else {
            row(
                &mut report,
                "time",
                &"not told: only attention kernels without hooks have a problem of their own",
            );
            return report;
        };
        row(&mut report, "over", &times::describe_step(problem));
        let gpu = self.gpu(arch);
        match times::predicted(problem, arch, self.roofline, &gpu) {
            Ok(time) => row(&mut report, "predicted", &time),
            Err(why) => row(&mut report, "predicted", &format_args!("not known: {why}")),
        }
        match gpu.and_then(|gpu| times::measured(problem, &gpu)) {
            Ok(time) => row(&mut report, "measured", &time),
            Err(why) => row(&mut report, "measured", &format_args!("skipped: {why}")),
        }
        report
    }

    /// This machine's GPU, if it has this architecture.
    fn gpu(&self, arch: u32) -> Result<Context> {
        let driver = assembling::open_driver("inspect")?;
        match assembling::arch(&driver) {
            gpu_arch if gpu_arch == arch => Ok(driver.context().clone()),
            gpu_arch => Err(miette!("the GPU is sm_{gpu_arch}")),
        }
    }

    /// The assembler: the ptxas passed, else the driver unless another architecture is requested, else ptxas on PATH; or why none
    /// is available.
    fn assembler(&self) -> Result<Result<KernelAssembler, String>> {
        if let Some(path) = &self.ptxas {
            return Ok(Ok(KernelAssembler::Ptxas(Ptxas::at(path).into_diagnostic()?)));
        }
        let no_gpu = match assembling::open_driver("inspect") {
            Ok(driver) if self.arch.is_none_or(|arch| arch == assembling::arch(&driver)) => {
                return Ok(Ok(KernelAssembler::Driver(driver)));
            }
            Ok(driver) => format!("the GPU is sm_{}", assembling::arch(&driver)),
            Err(why) => why.to_string(),
        };
        Ok(Ptxas::at("ptxas").map(KernelAssembler::Ptxas).map_err(|why| format!("{no_gpu}; {why}")))
    }
}

impl KernelAssembler {
    fn arch(&self) -> Option<u32> {
        match self {
            Self::Driver(driver) => Some(assembling::arch(driver)),
            Self::Ptxas(_) => None,
        }
    }

    fn machine_code(&self, source: &Source) -> Result<String> {
        // ptxas output is for display only and must not enter the driver's cache
        let (assembler, cache): (&dyn Assembler, Cache) = match self {
            Self::Driver(driver) => (driver, cache()?),
            Self::Ptxas(ptxas) => (ptxas, Cache::open(Settings::off()).into_diagnostic()?),
        };
        let code = cache.code(source, assembler).into_diagnostic()?;
        let mut report = String::new();
        let by = format!("{} by {}", size(code.cubin.len() as u64), code.assembler);
        row(&mut report, "machine code", &by);
        let Some(found) = Footprint::of(&code.cubin) else {
            row(&mut report, "resources", &"not readable in this assembler's format");
            return Ok(report);
        };
        row(&mut report, "instructions", &size(found.code_bytes));
        row(&mut report, "registers", &format_args!("{} a thread", found.registers));
        row(&mut report, "spills", &format_args!("{} bytes a thread", found.stack_bytes));
        Ok(report)
    }
}

/// The part of the report that needs no assembler.
fn describe(entry: &KernelEntry, kernel: &Kernel, source: &Source) -> String {
    let mut report = format!("{}\n", kernel.name);
    row(&mut report, "for", &targets(entry.archs));
    row(&mut report, "shown for", &source.target());
    let cluster =
        if kernel.cluster > 1 { format!(", clusters of {}", kernel.cluster) } else { String::new() };
    let ctas = kernel.ctas_per_sm;
    row(&mut report, "CTA", &format_args!("{} threads{cluster}, at least {ctas} to an SM", kernel.threads));
    row(&mut report, "shared memory", &format_args!("{} bytes a CTA", kernel.shared_layout().1));
    let param = |param: &tilewright_ptx::ir::Param| match param.kind {
        ParamKind::Value(class) => format!("{} {}", param.name, class.ptx()),
        ParamKind::TensorMap => format!("{} tensor map", param.name),
    };
    row(&mut report, "parameters", &kernel.params.iter().map(param).collect::<Vec<_>>().join(", "));
    let mut instructions = 0;
    kernel.for_each(|_| instructions += 1);
    let text = size(source.ptx().len() as u64);
    row(&mut report, "PTX", &format_args!("{instructions} instructions, {text}; --ptx prints it"));
    row(&mut report, "key", &source.key());
    report
}

fn row(report: &mut String, name: &str, text: &dyn std::fmt::Display) {
    let _ = writeln!(report, "  {name:15} {text}");
}
