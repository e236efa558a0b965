//! Safe wrappers of the driver API, whose functions are loaded at run time.
//!
//! | | |
//! |---|---|
//! | [`Context`], [`DeviceProperties`] | a GPU with its primary context, shared by all libraries of a process; its properties |
//! | [`Stream`], [`Event`], [`Stopwatch`] | streams of our own or the caller's; events; timing |
//! | `CudarcSlice`, `CudarcSliceMut` | slices of cudarc as arguments (feature `cudarc`) |
//! | [`Memory`], [`Buffer`] | stream-ordered memory; typed memory |
//! | [`assemble`], [`load`], [`Function`] | PTX to machine code; machine code to a kernel |
//! | `CublasLt` | cuBLASLt, if available |
//! | [`Graph`], [`Executable`] | captured work that is launched as a whole |
//!
//! Each call restores the thread's current context. Calls do not block unless documented. Arguments are checked before a launch,
//! so an argument error leaves the context usable.

mod buffer;
mod capture;
mod context;
mod cublaslt;
mod current;
mod error;
mod event;
mod find;
mod function;
mod graph;
mod handle;
mod image;
use current::{CurrentContext, RelaxedCapture};
use function::Signature;
use handle::Handle;
use log::Log;
use memory::PendingFree;
use module::Module;
use retain::{DeferredFree, Retained};
use staging::{PinnedMemory, Slot, Staging};

#[cfg(feature = "cudarc")]
mod interop;
mod launch;
mod load;
mod log;
mod memory;
mod module;
mod pointer;
mod properties;
mod retain;
mod staging;
mod stream;
mod tensor_map;
#[cfg(test)]
mod tests;
mod transfer;

pub use buffer::Buffer;
pub use capture::Capture;
pub use context::Context;
pub(crate) use cublaslt::CublasLt;
pub use error::{DriverError, ErrorKind, Result};
pub use event::Event;
pub use event::Stopwatch;
pub use function::{Function, Resources};
pub use graph::{Executable, Graph};
#[cfg(feature = "cudarc")]
pub use interop::{CudarcSlice, CudarcSliceMut};
pub(crate) use load::loadable;
pub use load::{AssembledKernel, assemble, assemble_with_log, load};
pub use memory::Memory;
pub use properties::DeviceProperties;
pub use stream::Stream;
