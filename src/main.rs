//! The `tilewright` command line: one module per subcommand. miette reports all errors.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod doctor;
mod generate;
mod kernels;
mod model_files;
mod plan;
mod progress;
mod text_error;

use clap::{Parser, Subcommand};
use miette::{Context, IntoDiagnostic, Result};
use std::{
    io::{ErrorKind, Write},
    process::ExitCode,
};

/// Attention for LLM inference, in Rust from end to end.
#[derive(Parser)]
#[command(name = "tilewright", version, arg_required_else_help = true, propagate_version = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Generate(generate::GenerateArgs),
    Bench(bench::BenchArgs),
    Plan(plan::PlanArgs),
    #[command(subcommand)]
    Kernels(kernels::KernelsCommand),
    Doctor(doctor::DoctorArgs),
}

fn main() -> ExitCode {
    text_error::install_handler();
    let result = match CommandLine::parse().command {
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments).and_then(|report| print(&report)),
        Command::Kernels(command) => kernels::run(&command).and_then(|report| print(&report)),
        Command::Doctor(arguments) => doctor::run(&arguments).and_then(|report| print(&report)),
    };
    match result {
        Ok(code) => code,
        Err(report) => {
            eprintln!("{report:?}");
            text_error::exit_code(&report)
        }
    }
}

/// Writes a report to standard output. A closed pipe, as with `head`, is not an error.
fn print(report: &str) -> Result<ExitCode> {
    match std::io::stdout().lock().write_all(report.as_bytes()) {
        Err(why) if why.kind() != ErrorKind::BrokenPipe => {
            Err(why).into_diagnostic().wrap_err("cannot write the report")
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
