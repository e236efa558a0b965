//! `tilewright kernels`: machine code of GPU kernels, what there is of it, and making it ahead of time.

mod bundle;
mod chosen;
mod clear;
mod device;
mod inspect;
mod list;
mod progress;
mod times;
mod warm;

use clap::Subcommand;
use miette::{IntoDiagnostic, Result, miette};
use std::path::Path;
use tilewright_cuda::cache::{Cache, Settings, VARIABLE};

/// See, warm, bundle and clear the machine code of GPU kernels
///
/// Kernels are made machine code by the GPU's driver when they are first used, and kept in
/// ~/.cache/tilewright/kernels. The environment variable TILEWRIGHT_CACHE names another folder, `read-only`,
/// `read-only:FOLDER`, or `off`.
#[derive(Subcommand)]
pub(crate) enum Command {
    List(list::Arguments),
    Warm(warm::Arguments),
    Inspect(inspect::Arguments),
    Bundle(bundle::Arguments),
    Clear(clear::Arguments),
}

pub(crate) fn run(command: &Command) -> Result<String> {
    match command {
        Command::List(arguments) => list::run(arguments),
        Command::Warm(arguments) => warm::run(arguments),
        Command::Inspect(arguments) => inspect::run(arguments),
        Command::Bundle(arguments) => bundle::run(arguments),
        Command::Clear(arguments) => clear::run(arguments),
    }
}

/// The cache that every other command uses.
fn cache() -> Result<Cache> {
    Cache::open(Settings::from_environment().into_diagnostic()?).into_diagnostic()
}

/// The folder of a cache, for commands that are about it.
fn folder(cache: &Cache) -> Result<&Path> {
    cache.settings().folder().ok_or_else(|| {
        miette!(
            help = format!("let {VARIABLE} name a folder"),
            "kernels: the cache is off, or there is no home folder"
        )
    })
}

/// Bytes for people, in units of 1,000.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// `1 kernel`, `2 kernels`.
fn counted(number: usize) -> String {
    format!("{number} kernel{}", if number == 1 { "" } else { "s" })
}

/// `sm_80, sm_90`.
fn targets(archs: &[u32]) -> String {
    archs.iter().map(|arch| format!("sm_{arch}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_have_the_unit_that_fits() {
        assert_eq!([999, 1_000, 999_949, 1_000_000].map(size), ["999 B", "1.0 kB", "999.9 kB", "1.0 MB"]);
    }
}
