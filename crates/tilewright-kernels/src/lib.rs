//! GPU kernels, written in the kernel language.
//!
//! | | |
//! |---|---|
//! | [`tile`] | the nouns and verbs: fragments, tiles, rings |
//! | [`attention`] | attention |
//! | [`gemm`] | matrix products |
//!
//! Kernels know shapes and variants, no driver and no device.
#![forbid(unsafe_code)]

pub mod attention;
pub mod gemm;
pub mod tile;
