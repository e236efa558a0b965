//! The driver, called through tables that are loaded at run time.
//!
//! | | |
//! |---|---|
//! | [`Context`], [`Limits`] | a GPU, by the primary context that all libraries of a process share; what it has |
//! | [`Stream`], [`Event`], [`Stopwatch`] | work in order, own or the caller's; places in it; times between them |
//! | [`Memory`], [`Buffer`] | memory in the order of a stream; with a type |
//! | [`assemble`], [`load`], [`Function`] | PTX to machine code; machine code to a kernel that can be launched |
//! | `Products` | cuBLASLt, where there is one |
//! | [`Graph`], [`Executable`] | work that is recorded once and launched as a whole |
//!
//! Whatever a thread's current context was before a call, it is afterwards. Nothing waits but what says so. Arguments are checked
//! before anything is launched, so that an error leaves the context as it was.

mod args;
mod assemble;
mod buffer;
mod capture;
mod captured;
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
mod keep;
mod launch;
mod limits;
mod load;
mod log;
mod memory;
mod module;
mod pointer;
mod signature;
mod staging;
mod stopwatch;
mod stream;
mod tensor_map;
#[cfg(test)]
mod tests;
mod transfer;

pub(crate) use assemble::loadable;
pub use assemble::{Assembled, assemble, assemble_with_log};
pub use buffer::Buffer;
pub use capture::Capture;
pub use context::Context;
pub(crate) use cublaslt::Products;
pub use error::{Error, ErrorKind, Result};
pub use event::Event;
pub use function::{Function, Resources};
pub use graph::{Executable, Graph};
pub use limits::Limits;
pub use load::load;
pub use memory::Memory;
pub use stopwatch::Stopwatch;
pub use stream::Stream;
