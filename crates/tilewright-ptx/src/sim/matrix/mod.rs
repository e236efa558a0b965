//! What the matrix instructions compute: functions of registers and bytes, without state.
//!
//! - [`mma`]: products of fragments in registers; what `mma.sync` and `wgmma` share.
//! - [`wgmma`]: products of a warpgroup.
//! - [`Descriptor`]: where a `wgmma` operand's elements lie in shared memory.
//! - [`ldmatrix`], [`stmatrix`]: 8 by 8 matrices between shared memory and registers.
//!
//! One [`Row`] is 32 bytes, whatever the elements: the depth of one product of a row of A, or of a column of B.

mod descriptor;
mod ldmatrix;
mod product;

pub use descriptor::Descriptor;
pub use ldmatrix::{ldmatrix, stmatrix};
pub use product::{Row, columns_of, mma, rows_of, wgmma};
