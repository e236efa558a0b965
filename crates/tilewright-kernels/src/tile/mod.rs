//! Building blocks of kernels: register fragments, shared-memory layouts and stage pipelines.
//!
//! - [`SharedTile`]: rows of 16-bit elements in shared memory, 128-byte swizzled, with `wgmma` descriptors.
//! - [`Sums`]: the f32 `wgmma` accumulator of 64 rows.
//! - [`Ring`] and [`Cursor`]: producer-consumer pipeline of stages.
//! - [`RowPartition`]: partition of chunked rows among threads.
//! - [`Strided`]: rows with two outer axes.
//!
//! In this crate only:
//!
//! - `chunk`: vectorized loads and stores of any dtype, computed with in f32.
//! - `TokenPartition`: partition of tokens among threads.
//! - `reduce`: sums and maxima over lanes and warps.

pub(crate) mod chunk;
pub mod halves;
pub(crate) mod number;
pub(crate) mod quads;
mod ring;
mod row_partition;
mod shared;
mod strided;
pub mod sums;

pub(crate) mod reduce;

pub use chunk::{Chunk, Elements};
pub(crate) use number::Float;
pub(crate) use ring::release_from_warp;
pub use ring::{Cursor, Ring};
pub use row_partition::RowPartition;
pub(crate) use row_partition::TokenPartition;
pub(crate) use row_partition::{ChunkPlace, RowPlace};
pub use shared::SharedTile;
pub(crate) use shared::panel_map;
pub use strided::Strided;
pub(crate) use strided::StridedRows;
pub use sums::{FragmentPosition, Sums};
