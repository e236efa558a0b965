//! The kernel skeleton: steps of attention that all bodies share.
//!
//! Grid: `[workers, 1, 1]`, persistent. A CTA executes its work items in order; an item is a tile of packed query rows of one KV
//! head against a range of keys. Keys that a row does not see never contribute to it, even if they are NaN.
//!
//! 1. Work item loop and shared memory: `cta`, `layout`.
//! 2. Packed rows, with positions and visible ranges: `query_row`, `row_table`, `row_hooks`.
//! 3. Page-table lookup and `cp.async` copies of KV tiles: `page_lookup`, `stage_lookup`, `tile_loader`, `queries`; their division
//!    among threads: `partition`; conversion of 8-bit caches: `dequant`, `page_scales`.
//! 4. `S = Q · Kᵀ` and `O += P · V` as `mma.sync` fragments: `fragments`.
//! 5. Visible masks of one 64-bit word per row and KV tile: `visible`. Tiles that all rows see in full are not masked.
//! 6. Online softmax: `softmax`.
//! 7. Non-finite V elements of masked tiles, replaced by 0 and added back to the rows that see them: `nonfinite`, because 0 × NaN
//!    is NaN; those of 8-bit caches: `nonfinite_bytes`.
//! 8. Output or partial state: `epilogue`, `epilogue_hooks`.
//! 9. Merge by the last CTA to arrive, and the merge operators: [`merge`].
//!
//! Departures from the paper:
//!
//! 1. 8-bit K and V are converted to 16 bits after they arrive: in shared memory for many rows, in registers for few. Per-page
//!    scales are applied to S and P, relative to a running scale.
//! 2. O is rescaled only if a row has a new maximum, which is rare in later tiles.
//! 3. Per-row values of hooks are computed once per row tile.
//! 4. The exact arithmetic of the `simt` body keeps its own softmax, epilogue and merge sums: with these steps its bits would
//!    change, or the `mma` bodies would need more registers.

pub(crate) mod cta;
pub(crate) mod dequant;
pub(crate) mod epilogue;
pub(crate) mod epilogue_hooks;
pub(crate) mod fragments;
pub(crate) mod layout;
pub mod merge;
pub(crate) mod nonfinite;
pub(crate) mod nonfinite_bytes;
pub(crate) mod page_lookup;
pub(crate) mod page_scales;
pub(crate) mod partition;
pub(crate) mod queries;
pub(crate) mod query_row;
pub(crate) mod row_hooks;
pub(crate) mod row_table;
pub(crate) mod softmax;
pub(crate) mod stage_lookup;
pub(crate) mod tile_loader;
pub(crate) mod visible;

pub(crate) use cta::{CurrentItem, MmaCta};
pub(crate) use dequant::{Dequantizer, TileHalf};
pub(crate) use epilogue::{SoftmaxStats, TilePosition};
pub(crate) use fragments::{AccFragment, Columns, FragmentLoader, RowTile, ThreadScalar};
pub(crate) use layout::{
    BLOCK_ROWS, CtaLayout, MAX_ROWS, MAX_STAGES, RowFormat, SWIZZLE_ALIGN, SharedAllocator, WARPS,
};
pub(crate) use nonfinite::{ElementKind, NonfiniteFlags, NonfiniteMasks};
pub(crate) use page_lookup::{KvSource, PageLookup};
pub(crate) use page_scales::{PageRescale, PageScales};
pub(crate) use partition::{PartitionedRows, ThreadGroup, ThreadPartition};
pub(crate) use queries::{F16Factor, LoadedQueries, SharedQueries};
pub(crate) use query_row::{QueryHead, QueryRow};
pub(crate) use row_hooks::{RowHooks, TileLogits};
pub(crate) use row_table::RowTable;
pub(crate) use stage_lookup::{BoxCorner, PendingStage, StageLookup};
pub(crate) use tile_loader::TileLoader;
pub(crate) use visible::KeyRange;
