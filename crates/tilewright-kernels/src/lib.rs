//! GPU kernels, written in the kernel language.
//!
//! Kernels depend on shapes and variants only, not on a driver or a device. [`all()`] returns every kernel in every tested
//! configuration.
//!
//! [`write_a_kernel`] explains one kernel line by line; [`tiles`] shows the memory and register layouts.
#![forbid(unsafe_code)]

// Only rustdoc and doctests include the pages.
#[cfg(any(doc, doctest))]
#[doc = include_str!("../docs/write-a-kernel.md")]
pub mod write_a_kernel {}

#[cfg(any(doc, doctest))]
#[doc = include_str!("../docs/tiles.md")]
pub mod tiles {}

pub mod activation;
mod all;
pub mod append;
pub mod attention;
pub mod bits;
pub mod elementwise;
pub mod gemm;
pub mod norm;
pub mod params;
pub mod quantization;
pub mod rope;
pub mod rows;
pub mod sampling;
pub mod tile;
pub mod variant;

pub use all::{KernelEntry, all, common, golden_texts};
