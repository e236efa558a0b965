//! The kernel language: GPU kernels as Rust functions.
//!
//! | | |
//! |---|---|
//! | [`isa`] | instructions: spelling, operands, semantics |
//! | [`ir`] | the kernel IR |
//! | [`build`] | the builder: Rust functions that record kernels |
//! | [`verify`] | the verifier: invariants of the IR |
//! | [`text`] | the PTX printer |
//! | [`sim`] | the simulator: executes kernels on the CPU and reports faults |
//!
//! The types with which kernels are recorded and launched are also at the root.
//!
//! This crate does not depend on attention, on a driver or on a device.
#![forbid(unsafe_code)]

pub mod build;
mod decimal;
pub mod ir;
pub mod isa;
pub mod mutate;
mod register_set;
pub mod sim;
pub mod text;
pub mod verify;

pub use build::{
    Arithmetic, Barrier, Bits, Builder, CachePolicy, Compare, Global, GlobalToShared, IntoOperand, LineGuard,
    Pointer, Shared, Stored, TensorBox, Value, Var, WgmmaLeft, WgmmaOperands,
};
pub use ir::Kernel;
pub use isa::{Access, AtomicOp, Elements, Eviction, Fence, Major, Op, Order, Scope, Shuffle, WarpReduction};
pub use sim::{Arg, Fault, FaultKind, Launch, Memory, Report, Swizzle, TensorMap};
pub use verify::Invalid;
