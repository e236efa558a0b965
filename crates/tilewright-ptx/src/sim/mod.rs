//! The simulator: executes a kernel on the CPU with the GPU's hazards and reports faults by source line.
//!
//! | | |
//! |---|---|
//! | [`Launch`], [`Report`], [`Arg`] | a kernel launch with its arguments; its counters |
//! | [`Memory`] | device memory |
//! | [`Fault`], [`FaultKind`] | the error of a kernel, and its source line |
//! | [`matrix`], [`tensor`] | MMA and matrix layouts; tensor maps |
//!
//! Structure:
//!
//! 1. `lower` converts a kernel to flat code, `slots` assigns its registers. `grid` schedules warps and asynchronous operations; `exec` runs a slice of a `warp`.
//! 2. `access`, `lanes`, `sync`, `barrier`, `mbarrier`, `order`, `copies`, `bulk`, `fragments` and `wgmma` implement the
//!    instructions. `flight` holds copies in flight.
//! 3. `clock` and `shadow` detect races, `deadlock` explains deadlocks, `traffic` counts bank conflicts and sectors.
//!
//! The seed determines all unspecified hardware behavior: the choice and length of warp slices, the order of diverged lanes, the
//! time and order of asynchronous completions, the order of atomics, the elected lane. Unordered accesses are faults even if the
//! result is right with this seed. So are accesses to memory of an asynchronous operation before its wait.

mod access;
mod barrier;
mod bulk;
mod clock;
mod copies;
mod deadlock;
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
mod slots;
pub mod tensor;
mod traffic;
mod warp;
mod wgmma;
mod world;

pub use fault::{Fault, FaultKind};
pub use memory::Memory;
pub use tensor::{Swizzle, TensorMap};

use crate::ir::Kernel;
use barrier::{ClusterBarrier, NamedBarrier};
use clock::{Clock, WarpClocks};
use exec::{Exec, Next};
use fault::FaultCause;
use flight::{AsyncCopy, CopyBatch, CopyChunk, CopyKind};
use lower::{Arrays, Code, Program, Range, SHARED_BASE};
use matrix::{Descriptor, Row};
use mbarrier::Mbarrier;
use memory::{GARBAGE, GlobalLocation};
use rng::Rng;
use shadow::{Actor, Conflict, Mark, Shadow};
use warp::{FULL, FenceRelease, Group, Wait, Warp};
use wgmma::Warpgroup;
use world::{Agent, Cluster, Cta, Flag, MemoryLocation, MemoryRange, World};

/// A kernel argument.
#[derive(Debug, Clone, PartialEq)]
pub enum Arg {
    /// A `u32`.
    U32(u32),
    /// An `i32`.
    I32(i32),
    /// An `f32`.
    F32(f32),
    /// A `u64`, such as an address.
    U64(u64),
    /// A tensor map, boxed so that the many other arguments stay small.
    TensorMap(Box<TensorMap>),
}

/// A kernel launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The grid size in CTAs; x is a multiple of the cluster size.
    pub grid: [u32; 3],
    /// One argument per parameter.
    pub args: &'a [Arg],
    /// The seed for unspecified hardware behavior.
    pub seed: u64,
}

/// The counters of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// Instructions, counted per lane.
    pub thread_instructions: u64,
    /// Instructions, counted per converged group of lanes.
    pub warp_instructions: u64,
    /// `mma` and `wgmma`, counted per warp.
    pub matrix_instructions: u64,
    /// Issued asynchronous copies; `cp.async` counted per warp.
    pub async_copies: u64,
    /// Shared-memory wavefronts in excess of one per access.
    pub bank_conflicts: u64,
    /// 32-byte global-memory sectors accessed by loads and stores.
    pub global_sectors: u64,
    /// The minimum number of sectors for these accesses.
    pub global_sectors_ideal: u64,
}

impl Launch<'_> {
    /// Runs the kernel to completion.
    ///
    /// # Errors
    /// The first fault of the kernel or launch with this seed. Memory keeps its state at the fault.
    pub fn run(&self, memory: &mut Memory) -> Result<Report, Fault> {
        #[cfg(feature = "mutation")]
        if let Some(mutant) = crate::mutate::hook::mutant(self.kernel) {
            return grid::Grid::new(&Launch { kernel: &mutant, ..*self }, memory)?.run();
        }
        grid::Grid::new(self, memory)?.run()
    }
}
