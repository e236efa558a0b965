//! The nouns and verbs of kernels: what lies where in shared memory and in registers, and who waits for whom.
//!
//! - [`SharedTile`]: rows of 16-bit elements in shared memory, swizzled, with the descriptors by which `wgmma` reads them.
//! - [`Sums`]: the f32 fragment of 64 rows that a warpgroup accumulates.
//! - [`Ring`] and [`Cursor`]: stages that a producer fills and consumers empty.
//! - [`Vector`]: 16 bytes of elements, computed with in f32.
//! - [`Rows`]: how rows of vectors are dealt to threads.
//! - [`Shares`]: how tokens are.
//! - [`reduce`]: sums and maxima over lanes and warps.

mod ring;
mod rows;
mod shared;
mod shares;
pub mod sums;
mod vector;

pub mod reduce;

pub use ring::{Cursor, Ring};
pub use rows::{RowPlace, Rows, VectorPlace};
pub use shared::{SharedTile, panel_map};
pub use shares::Shares;
pub use sums::{Place, Sums};
pub use vector::{Float, Packed, Vector};
