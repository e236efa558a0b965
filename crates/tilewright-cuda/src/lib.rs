//! The CUDA backend: the engine's operators on NVIDIA GPUs. It requires only the NVIDIA driver, loaded at run time.
//!
//! A binary that links this crate also starts without a driver; [`Context::open`] then returns an error.
//!
//! | | |
//! |---|---|
//! | [`Gpu`] | the backend: the engine's operators, generic over a GPU and its simulator |
//! | [`Staged`] | the same for tensors on the host |
//! | [`machine`] | the interface that operators need, implemented by [`Device`] and [`Simulator`] |
//! | [`Context`], [`Stream`], [`Graph`] | the driver API |
//! | `CudarcSlice`, `Stream::from_cudarc` | streams and slices of cudarc's safe API (feature `cudarc`) |
//! | [`cache`] | the kernel cache: bundles, a folder that processes share, the assembler |

/// The examples use the CPU and a GPU; this crate is the lowest one that depends on both.
#[doc = include_str!("../README.md")]
#[cfg(doctest)]
mod readme {}

/// The GPU page has an example for a GPU that falls back to the CPU.
#[doc = include_str!("../docs/gpu.md")]
#[cfg(doctest)]
mod gpu_page {}

/// The page for engines has examples with slices and with cudarc.
#[doc = include_str!("../docs/rust-engines.md")]
#[cfg(all(doctest, feature = "cudarc"))]
mod engines_page {}

pub mod cache;
#[allow(unsafe_code, reason = "the only module that calls the driver; each call has a SAFETY note")]
mod driver;

mod backend;
mod checks;
mod device;
pub mod machine;
mod simulator;
mod staged;

pub use backend::Gpu;
pub use checks::{CHECK_VARIABLE, checks_from_environment};
pub use device::Device;
pub use driver::{
    AssembledKernel, Buffer, Capture, Context, DeviceProperties, DriverError, ErrorKind, Event, Executable,
    Function, Graph, Memory, Resources, Result, Stopwatch, Stream, assemble, assemble_with_log, load,
};
#[cfg(feature = "cudarc")]
pub use driver::{CudarcSlice, CudarcSliceMut};
pub use simulator::Simulator;
pub use staged::Staged;

/// The backend on a GPU.
pub type Cuda = Gpu<Device>;

/// The backend in the simulator.
pub type Simulated = Gpu<Simulator>;
