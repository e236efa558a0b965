//! The simulator: executes a kernel on the CPU with the GPU's own hazards, and explains what is wrong with it.
//!
//! | | |
//! |---|---|
//! | [`Launch`], [`Report`], [`Arg`] | a kernel with its arguments, run once; what it did |
//! | [`Memory`] | device memory |
//! | [`Fault`], [`FaultKind`] | what a kernel did wrong, and at which line |
//! | [`matrix`], [`tensor`] | arithmetic of fragments; boxes of tensors |
//!
//! Inside: `lower` makes flat code of a kernel; `grid` chooses who runs and when asynchronous operations complete, `exec` runs
//! a slice of one `warp`; `access`, `lanes`, `sync`, `barrier`, `mbarrier`, `order`, `copies`, `bulk`, `fragments` and `wgmma` are the
//! instructions; `flight` holds copies on their way. `clock` and `shadow` find what nothing orders; `stuck` explains why nothing
//! goes on; `traffic` counts.
//!
//! Whatever the hardware leaves open is chosen by the seed: which warp runs and for how long, which of its diverged lanes, when
//! and in what order asynchronous operations complete, the order of atomics, which lane is elected. Accesses that nothing
//! orders are faults even where they come out right with this seed, as are accesses to what an asynchronous operation has in
//! hand, until it was waited for.

mod access;
mod barrier;
mod bulk;
mod clock;
mod copies;
mod exec;
mod fault;
mod flight;
mod fragments;
mod grid;
mod lanes;
mod lower;
pub mod matrix;
mod mbarrier;
mod memory;
mod order;
mod rng;
mod shadow;
mod stuck;
mod sync;
pub mod tensor;
mod traffic;
mod warp;
mod wgmma;
mod world;

pub use fault::{Fault, FaultKind};
pub use memory::Memory;

use crate::ir::Kernel;
use tensor::TensorMap;

/// An argument of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub enum Arg {
    /// A 32-bit number.
    U32(u32),
    /// A 32-bit number with a sign.
    I32(i32),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit number, such as an address.
    U64(u64),
    /// A tensor map.
    TensorMap(TensorMap),
}

/// A kernel with its arguments, to be run once.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// CTAs; x is a multiple of the kernel's cluster.
    pub grid: [u32; 3],
    /// One for each parameter.
    pub args: &'a [Arg],
    /// What decides whatever the hardware leaves open.
    pub seed: u64,
}

/// What a launch did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// Instructions, counted once for each lane.
    pub thread_instructions: u64,
    /// Instructions, counted once for each group of lanes that executes them together.
    pub warp_instructions: u64,
    /// `mma` and `wgmma`, once for each warp.
    pub matrix_instructions: u64,
    /// Asynchronous copies that were started; `cp.async` once for each warp.
    pub async_copies: u64,
    /// Wavefronts on shared memory beyond one for each access.
    pub bank_conflicts: u64,
    /// Sectors of 32 bytes of global memory that loads and stores touch.
    pub global_sectors: u64,
    /// As many as would have done.
    pub global_sectors_ideal: u64,
}

impl Launch<'_> {
    /// Runs the kernel to its end.
    ///
    /// # Errors
    /// The first mistake of the kernel or of the launch that shows with this seed. Memory is then as it was at that moment.
    pub fn run(&self, memory: &mut Memory) -> Result<Report, Fault> {
        grid::Grid::new(self, memory)?.run()
    }
}
