//! The kernel language: GPU kernels as Rust functions.
//!
//! | | |
//! |---|---|
//! | [`isa`] | the instructions: spelling, operands, meaning |
//! | [`ir`] | a kernel as a value |
//! | [`sim`] | executes kernels on the CPU, and says what is wrong with them |
//!
//! This crate knows nothing of attention, of drivers or of devices.
#![forbid(unsafe_code)]

pub mod ir;
pub mod isa;
pub mod sim;
