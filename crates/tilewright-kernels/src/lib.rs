//! GPU kernels, written in the kernel language.
//!
//! | | |
//! |---|---|
//! | [`tile`] | the nouns and verbs: fragments, tiles, rings |
//! | [`attention`] | attention |
//! | [`gemm`] | matrix products |
//! | [`all`] | every kernel in every configuration |
//!
//! Kernels know shapes and variants, no driver and no device.
#![forbid(unsafe_code)]

mod all;
pub mod attention;
pub mod gemm;
pub mod tile;

pub use all::{Configured, all, golden_texts};
