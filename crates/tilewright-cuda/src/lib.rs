//! The device: the engine's backend for NVIDIA GPUs, with nothing to install but their driver.
//!
//! A binary that links this starts with and without a driver: [`Context::open`] says which of the two it is. From there: streams
//! (own, or the caller's as they are), memory, kernels, graphs.
//!
//! | | |
//! |---|---|
//! | [`Gpu`] | the backend: the engine's operators, written once for a GPU and for its simulator |
//! | [`machine`] | what operators need of either: [`Card`], [`Simulator`] |
//! | [`Context`], [`Stream`], [`Graph`] | the driver |
//! | [`cache`] | machine code of kernels: bundles, a folder that processes share, the assembler |

/// Its examples are of the CPU and of a GPU, and this crate is the lowest that knows both.
#[doc = include_str!("../../../README.md")]
#[cfg(doctest)]
mod readme {}

pub mod cache;
#[allow(unsafe_code, reason = "the one room that calls the driver; each call has its SAFETY")]
mod driver;

mod backend;
mod card;
pub mod machine;
mod simulator;

pub use backend::{DeviceBatch, Gpu};
pub use card::Card;
pub use driver::{
    Assembled, Buffer, Capture, Context, Error, ErrorKind, Event, Executable, Function, Graph, Limits,
    Memory, Resources, Result, Stopwatch, Stream, assemble, assemble_with_log, load,
};
pub use simulator::Simulator;

/// The backend on a GPU.
pub type Cuda = Gpu<Card>;

/// The backend in the simulator.
pub type Simulated = Gpu<Simulator>;
