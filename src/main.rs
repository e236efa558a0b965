//! The tilewright command line.

mod generate;
mod model_folder;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Generate(generate::GenerateArgs),
}

fn main() -> miette::Result<()> {
    match Cli::parse().command {
        Command::Generate(args) => generate::run(&args),
    }
}
