//! `tilewright doctor`: reports the machine's hardware and the selected backend.

mod gpu;
mod memory;

use clap::Args;
use miette::{IntoDiagnostic, Result};
use serde::Serialize;
use std::{fmt, path::PathBuf};
use tilewright::{Backend, Cpu, cpu::Isa};

/// Required files of a model folder.
const MODEL_FILES: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];

const EXAMPLES: &str = "\
Examples:
  tilewright doctor
  tilewright doctor --json";

/// Report this machine's hardware and the backend that will run
///
/// Measures memory bandwidth and arithmetic throughput, which takes about a quarter of a second. A missing GPU or model
/// is not an error.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Bundle of machine code to check, as that of a Python wheel [default: the one beside the program]
    #[arg(long, value_name = "FOLDER")]
    bundle: Option<PathBuf>,
}

/// The result of the checks.
#[derive(Serialize)]
struct DoctorReport {
    version: &'static str,
    backend: String,
    threads: usize,
    /// Instruction sets available to the CPU backend, best last.
    isa_available: Vec<String>,
    isa_used: String,
    memory: Option<memory::Memory>,
    roofline: Rates,
    gpu: gpu::Gpu,
    bundle: gpu::Bundle,
    model: Model,
}

/// A roofline, in units of 10⁹ per second.
#[derive(Serialize)]
struct Rates {
    gigabytes_per_second: f64,
    gigaflops_per_second: f64,
}

/// The default model folder of `generate`.
#[derive(Serialize)]
struct Model {
    folder: Option<PathBuf>,
    /// Missing files; empty if the model is complete.
    missing: Vec<&'static str>,
}

/// Runs the checks and formats the report.
pub(crate) fn run(arguments: &DoctorArgs) -> Result<String> {
    let report = DoctorReport::collect(arguments);
    if arguments.json {
        return Ok(serde_json::to_string_pretty(&report).into_diagnostic()? + "\n");
    }
    Ok(report.to_string())
}

impl DoctorReport {
    fn collect(arguments: &DoctorArgs) -> Self {
        let cpu = Cpu::new();
        let roofline = cpu.measure_roofline();
        let folder = crate::model_files::shipped();
        let exists = |file: &str| folder.as_ref().is_some_and(|folder| folder.join(file).is_file());
        let missing = MODEL_FILES.into_iter().filter(|file| !exists(file)).collect();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            backend: cpu.describe(),
            threads: cpu.threads(),
            isa_available: Isa::available().iter().map(Isa::to_string).collect(),
            isa_used: cpu.isa().to_string(),
            memory: memory::find(),
            roofline: Rates {
                gigabytes_per_second: roofline.bytes_per_second / 1e9,
                gigaflops_per_second: roofline.flops_per_second / 1e9,
            },
            gpu: gpu::find(),
            bundle: gpu::find_bundle(arguments.bundle.as_deref()),
            model: Model { folder, missing },
        }
    }
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, text: &dyn fmt::Display| writeln!(f, "{name:14}{text}");
        row("tilewright", &self.version)?;
        row("backend", &self.backend)?;
        row("threads", &self.threads)?;
        row("instructions", &format_args!("{}; {} is used", self.isa_available.join(", "), self.isa_used))?;
        match &self.memory {
            Some(memory) => row("memory", memory)?,
            None => row("memory", &"unknown on this system")?,
        }
        let Rates { gigabytes_per_second: bytes, gigaflops_per_second: flops } = self.roofline;
        row("roofline", &format_args!("{bytes:.1} GB/s read, {flops:.1} GFLOP/s in f32, measured now"))?;
        row("GPU", &self.gpu)?;
        row("kernels", &self.gpu.cache())?;
        row("bundle", &self.bundle)?;
        row("checks", &gpu::checks())?;
        row("model", &self.model)
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(folder) = &self.folder else {
            return f.write_str("the one that ships with tilewright is not here; `generate` needs --model");
        };
        write!(f, "{}", folder.display())?;
        match self.missing.len() {
            0 => Ok(()),
            _ => write!(f, " is not complete: no {}", self.missing.join(", no ")),
        }
    }
}
