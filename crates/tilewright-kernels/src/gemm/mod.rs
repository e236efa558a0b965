//! Matrix products.
//!
//! [`GemmParams`] describes a product; [`GemmParams::choose_kernel`] selects its kernel:
//!
//! | | x and weight | for |
//! |---|---|---|
//! | [`dot`] | any dtypes, any alignment | up to 8 rows; weight-bandwidth-bound |
//! | [`skinny`] | one 16-bit dtype, aligned | up to 32 rows, on tensor cores; weight-bandwidth-bound |
//! | [`sm80`] | one 16-bit dtype, aligned | many rows, on tensor cores |
//! | [`tiles`] | any dtypes, any alignment | many rows, in f32 |
//! | [`sm90`] | one 16-bit dtype, aligned | more than 64 rows on Hopper, by `wgmma` |

mod args;
pub mod dot;
mod params;
pub mod skinny;
pub mod sm80;
pub mod sm90;
pub mod tiles;

pub use params::{Epilogue, GemmKernel, GemmParams, Groups, Matrix};
