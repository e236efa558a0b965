//! The `--threads` argument: the CPU backend with this number of threads.

use miette::{IntoDiagnostic, Result};
use tilewright::Cpu;

/// The CPU backend with `threads` threads, by default one per core.
pub(crate) fn cpu(threads: Option<u16>) -> Result<Cpu> {
    threads.map_or_else(|| Ok(Cpu::new()), |threads| Cpu::with_threads(threads.into())).into_diagnostic()
}

/// Same, to run or measure on this machine; warns on standard error if it has fewer cores, unless `quiet`.
pub(crate) fn cpu_of_this_machine(threads: Option<u16>, quiet: bool) -> Result<Cpu> {
    let requested = threads.map_or(0, usize::from);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if requested > cores && !quiet {
        let s = if cores == 1 { "" } else { "s" };
        eprintln!("warning: --threads {requested} is above the {cores} core{s} of this machine");
    }
    cpu(threads)
}
