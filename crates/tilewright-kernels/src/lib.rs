//! GPU kernels, written in the kernel language.
//!
//! | | |
//! |---|---|
//! | [`tile`] | the nouns and verbs: fragments, tiles, rings, rows of vectors |
//! | [`attention`] | attention, and merging its states |
//! | [`append`] | new keys and values into pages |
//! | [`norm`], [`rope`], [`activation`] | what a layer does beside attention and products |
//! | [`softmax`] | probabilities of logits |
//! | [`variant`] | hooks of attention variants, recorded into kernels |
//! | [`gemm`] | matrix products |
//! | [`all`] | every kernel in every configuration |
//!
//! Kernels know shapes and variants, no driver and no device.
#![forbid(unsafe_code)]

pub mod activation;
mod all;
pub mod append;
pub mod attention;
pub mod gemm;
pub mod norm;
pub mod rope;
pub mod softmax;
pub mod tile;
pub mod variant;

pub use all::{Configured, all, golden_texts};
