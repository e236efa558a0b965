//! `tilewright kernels`: the cache of compiled GPU kernels, and ahead-of-time compilation.

mod assembling;
mod bundle;
mod inspect;
mod list;
mod selection;
mod times;
mod warm;

use crate::plan::counted;
use clap::Subcommand;
use miette::{IntoDiagnostic, Result, miette};
use std::path::Path;
use tilewright_cuda::cache::{Cache, Settings, VARIABLE};

/// List, warm, inspect, bundle and clear compiled GPU kernels
///
/// The GPU driver JIT-compiles kernels at their first use and caches them in ~/.cache/tilewright/kernels. Set
/// TILEWRIGHT_CACHE to another folder, to `read-only`, to `read-only:FOLDER`, to `off`, or to `jit`, which also ignores the bundle
/// beside the program.
#[derive(Subcommand)]
pub(crate) enum KernelsCommand {
    List(list::ListArgs),
    Warm(warm::WarmArgs),
    Inspect(inspect::InspectArgs),
    Bundle(bundle::BundleArgs),
    Clear(warm::ClearArgs),
}

pub(crate) fn run(command: &KernelsCommand) -> Result<String> {
    match command {
        KernelsCommand::List(arguments) => list::run(arguments),
        KernelsCommand::Warm(arguments) => warm::warm(arguments),
        KernelsCommand::Inspect(arguments) => inspect::run(arguments),
        KernelsCommand::Bundle(arguments) => bundle::run(arguments),
        KernelsCommand::Clear(arguments) => warm::clear(arguments),
    }
}

/// The cache selected by the environment.
fn cache() -> Result<Cache> {
    Cache::open(Settings::from_environment().into_diagnostic()?).into_diagnostic()
}

/// The folder of a cache; an error if the cache is off.
fn folder(cache: &Cache) -> Result<&Path> {
    cache.settings().folder().ok_or_else(|| {
        miette!(
            help = format!("let {VARIABLE} name a folder"),
            "kernels: the cache is off, or there is no home folder"
        )
    })
}

/// Formats bytes in units of 1,000.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// `1 kernel`, `2 kernels`.
fn kernel_count(number: usize) -> String {
    counted(number, "kernel")
}

/// An architecture: `90` or `sm_90`.
fn parse_arch(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("sm_").unwrap_or(text);
    digits.parse().map_err(|_| "expected an architecture, as in 90 or sm_90".to_owned())
}

/// `sm_80, sm_90`.
fn targets(archs: &[u32]) -> String {
    archs.iter().map(|arch| format!("sm_{arch}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::{parse_arch, size};

    #[test]
    fn architectures_have_two_spellings() {
        assert_eq!((parse_arch("90"), parse_arch("sm_90")), (Ok(90), Ok(90)));
        for text in ["", "sm_", "sm90", "-90", "90a", "hopper"] {
            assert_eq!(
                parse_arch(text).unwrap_err(),
                "expected an architecture, as in 90 or sm_90",
                "{text:?}"
            );
        }
    }

    #[test]
    fn sizes_have_a_suitable_unit() {
        assert_eq!([999, 1_000, 999_949, 1_000_000].map(size), ["999 B", "1.0 kB", "999.9 kB", "1.0 MB"]);
    }
}
