//! Matrix products.
//!
//! [`Product`] says what is multiplied, and [`Product::choose`] which kernel does it:
//!
//! | | x and weight | for |
//! |---|---|---|
//! | [`dot`] | any dtypes, any alignment | up to 8 rows: waits for the weight's bytes |
//! | [`skinny`] | of one 16-bit dtype, aligned | up to 32 rows, on tensor cores: likewise |
//! | [`sm80`] | of one 16-bit dtype, aligned | many rows, on tensor cores |
//! | [`tiles`] | any dtypes, any alignment | many rows, in f32 |
//! | [`sm90`] | bf16, aligned | many rows, by `wgmma`; chosen by name only |

mod args;
pub mod dot;
mod params;
pub mod skinny;
pub mod sm80;
pub mod sm90;
pub mod tiles;

pub use params::{Epilogue, GemmKernel, GemmParams, Groups, Matrix};
