//! Tests of the kernel language: every instruction against an independent definition, and the simulator's fault reports.

mod divide;
mod instructions;
mod mutate;
mod sim;
mod text;
mod units;
mod verify;

// modules of the library that tests include use `crate::` paths
use tilewright_ptx::{
    build::Builder,
    ir::{self, Kernel},
    isa,
};

/// Records a kernel.
fn kernel(threads: u32, body: impl FnOnce(&Builder)) -> Kernel {
    Builder::kernel("test", threads, body).unwrap_or_else(|error| panic!("{error}"))
}
