//! GPU kernels, written in the kernel language.
//!
//! | | |
//! |---|---|
//! | [`tile`] | the nouns and verbs: fragments, tiles, rings, rows of vectors |
//! | [`attention`] | attention, and merging its states |
//! | [`append`] | new keys and values into pages |
//! | [`norm`], [`rope`], [`activation`] | what a layer does beside attention and products |
//! | [`sampling`] | probabilities of logits; tokens |
//! | [`variant`] | hooks of attention variants, recorded into kernels |
//! | [`gemm`] | matrix products |
//! | [`all`] | every kernel in every configuration |
//!
//! Kernels know shapes and variants, no driver and no device.
//!
//! [`write_a_kernel`] goes through one line by line, [`tiles`] draws what lies where.
#![forbid(unsafe_code)]

// The pages lie outside of the package, so that only documentation and its tests ask for them.
#[cfg(any(doc, doctest))]
#[doc = include_str!("../../../docs/write-a-kernel.md")]
pub mod write_a_kernel {}

#[cfg(any(doc, doctest))]
#[doc = include_str!("../../../docs/tiles.md")]
pub mod tiles {}

pub mod activation;
mod all;
pub mod append;
pub mod attention;
pub mod bits;
pub mod gemm;
pub mod norm;
pub mod rope;
pub mod rows;
pub mod sampling;
pub mod tile;
pub mod variant;

pub use all::{Configured, all, golden_texts};
