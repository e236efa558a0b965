//! Semantics of the matrix instructions as stateless functions of registers and bytes.
//!
//! - [`mma`]: MMA of fragments in registers, the core of `mma.sync` and `wgmma`.
//! - [`wgmma`]: MMA of a warpgroup.
//! - [`Descriptor`]: the layout of a `wgmma` operand in shared memory.
//! - [`ldmatrix`], [`stmatrix`]: 8 × 8 matrices between shared memory and registers.
//!
//! A [`Row`] is 32 bytes for every element type: the K extent of one MMA, for a row of A or a column of B.

mod descriptor;
mod ldmatrix;
mod product;

pub use descriptor::Descriptor;
pub use ldmatrix::{ldmatrix, stmatrix};
pub use product::{Row, columns_of, mma, rows_of, wgmma};
