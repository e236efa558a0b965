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
