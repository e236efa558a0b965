//! The device: the engine's backend for NVIDIA GPUs, with nothing to install but their driver.
//!
//! A binary that links this starts with and without a driver: [`Device::open`] says which of the two it is.
//!
//! | | |
//! |---|---|
//! | [`Gpu`] | the backend: the engine's operators, written once for a GPU and for its simulator |
//! | [`machine`] | what operators need of either |
//! | [`Simulator`] | a GPU that is not there: kernels run on the CPU, and hazards are errors |

#[allow(unsafe_code, reason = "the one room that calls the driver; each call has its SAFETY")]
mod driver;

mod backend;
pub mod machine;
mod simulator;

pub use backend::{AppendPlaces, Gpu};
pub use driver::{Argument, Buffer, Device, Error, Function, Result, Stopwatch};
pub use simulator::Simulator;

/// The backend in the simulator.
pub type Simulated = Gpu<Simulator>;
