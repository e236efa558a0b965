//! The kernel language: GPU kernels as Rust functions.
//!
//! | | |
//! |---|---|
//! | [`isa`] | the instructions: spelling, operands, meaning |
//! | [`ir`] | a kernel as a value |
//! | [`build`] | Rust functions that record kernels |
//! | [`verify`] | what must hold of a kernel |
//! | [`text`] | PTX |
//! | [`sim`] | executes kernels on the CPU, and says what is wrong with them |
//!
//! This crate knows nothing of attention, of drivers or of devices.
#![forbid(unsafe_code)]

pub mod build;
mod decimal;
mod forms;
pub mod ir;
pub mod isa;
mod registers;
pub mod sim;
pub mod text;
pub mod verify;
