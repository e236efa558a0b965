//! The nouns and verbs of kernels: what lies where in shared memory and in registers, and who waits for whom.
//!
//! - [`SharedTile`]: rows of 16-bit elements in shared memory, swizzled, with the descriptors by which `wgmma` reads them.
//! - [`Sums`]: the f32 fragment of 64 rows that a warpgroup accumulates.
//! - [`Ring`] and [`Cursor`]: stages that a producer fills and consumers empty.
//! - [`chunk`]: neighbours of any dtype, computed with in f32.
//! - [`Rows`]: how rows of chunks are dealt to threads.
//! - [`Shares`]: how tokens are.
//! - [`Strided`]: rows of two outer axes.
//! - [`reduce`]: sums and maxima over lanes and warps.

pub mod chunk;
mod float;
pub mod halves;
pub mod number;
mod ring;
mod row_partition;
mod shared;
mod strided;
pub mod sums;
mod token_partition;

pub mod reduce;

pub use chunk::{Chunk, Elements};
pub use float::Float;
pub use ring::{Cursor, Ring};
pub use row_partition::{ChunkPlace, RowPartition, RowPlace};
pub use shared::{SharedTile, panel_map};
pub use strided::{Strided, StridedRows};
pub use sums::{FragmentPosition, Sums};
pub use token_partition::TokenPartition;
