//! The device: finds the NVIDIA driver at run time, makes machine code of kernels and launches them.
//!
//! A binary that links this starts with and without a driver: [`Context::open`] says which of the two it is. From there: streams
//! (own, or the caller's as they are), memory, kernels, graphs.

pub mod cache;
#[allow(unsafe_code, reason = "the one room that calls the driver; each call has its SAFETY")]
mod driver;

pub use driver::{
    Assembled, Buffer, Capture, Context, Error, ErrorKind, Event, Executable, Function, Graph, Limits,
    Memory, Resources, Result, Stopwatch, Stream, assemble, assemble_with_log, load,
};
