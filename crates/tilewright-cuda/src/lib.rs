//! The device: finds the NVIDIA driver at run time, makes machine code of kernels and launches them.
//!
//! A binary that links this starts with and without a driver: [`Device::open`] says which of the two it is. So far this is what
//! tests and benches of kernels need; the backend of the engine will stand on it.

pub mod cache;
#[allow(unsafe_code, reason = "the one room that calls the driver; each call has its SAFETY")]
mod driver;

pub use driver::{Argument, Buffer, Device, Error, Function, Result, Stopwatch};
