//! Building blocks of kernels: register fragments, shared-memory layouts and stage pipelines.
//!
//! - [`SharedTile`]: rows of 16-bit elements in shared memory, 128-byte swizzled, with `wgmma` descriptors.
//! - [`Sums`]: the f32 `wgmma` accumulator of 64 rows.
//! - [`Ring`] and [`Cursor`]: producer-consumer pipeline of stages.
//! - [`chunk`]: vectorized loads and stores of any dtype, computed with in f32.
//! - [`RowPartition`]: partition of chunked rows among threads.
//! - [`TokenPartition`]: partition of tokens among threads.
//! - [`Strided`]: rows with two outer axes.
//! - [`reduce`]: sums and maxima over lanes and warps.

pub mod chunk;
mod float;
pub mod halves;
pub mod number;
pub mod quads;
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
