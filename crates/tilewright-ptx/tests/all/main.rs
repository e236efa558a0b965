//! Tests of the kernel language: every instruction against an independent definition, and the simulator's fault reports.

mod instructions;
mod sim;

use tilewright_ptx::{build::Builder, ir::Kernel};

/// Records a kernel.
fn kernel(threads: u32, body: impl FnOnce(&Builder)) -> Kernel {
    Builder::kernel("test", threads, body).unwrap_or_else(|error| panic!("{error}"))
}
