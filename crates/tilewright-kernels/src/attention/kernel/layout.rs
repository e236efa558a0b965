//! Shared memory that the tensor-core bodies have in common.
//!
//! Rows of elements are chunks of 16 bytes. The row stride is an odd number of chunks, so that the same column of eight rows is
//! in different banks, and every location is a constant offset from one address per lane. Rows that TMA writes are in boxes:
//!
//! ```text
//! [box][panel of 64 elements][rows of a box][8 chunks]; chunk c of line l of 128 bytes is at chunk c ^ (l % 8): the 128-byte swizzle
//! ```
//!
//! ```text
//! positions and visible ranges of the tile's rows · control words · running scales | the body's part
//! ```

use super::merge::arrival::RECORDS;
use crate::attention::items::MergeItem;
use tilewright_ptx::Value;

/// Warps that share a row table and a running scale; also the warps per CTA of the `mma` bodies.
pub(crate) const WARPS: usize = 4;
/// Bytes of the control words: row limits per warp, the unmasked range of each of up to 8 warps, warps that found non-finite
/// values, completed merges, item counters, the item, the next item, and whether it exists.
const CONTROL_BYTES: usize = 272;
/// Maximum rows per tile.
pub(crate) const MAX_ROWS: usize = 128;
/// Maximum stages of a ring; more do not help.
pub(crate) const MAX_STAGES: usize = 8;

/// Format of a head's rows in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowFormat {
    /// Elements of a row; padding is 0.
    pub(crate) dim: usize,
    /// Bytes per element.
    pub(crate) size: usize,
    /// Chunks of 16 bytes, padded to steps of 16 elements.
    pub(crate) chunks: usize,
    /// Row stride in bytes, in a panel if rows are in boxes.
    pub(crate) stride: usize,
    /// Rows per box, if TMA writes them: a power of two.
    pub(crate) box_rows: Option<usize>,
}

/// Rows of an MMA operand of keys or values.
pub(crate) const BLOCK_ROWS: usize = 16;
/// Alignment of units of boxes, because of the swizzle.
pub(crate) const SWIZZLE_ALIGN: usize = 1024;

impl RowFormat {
    pub(crate) fn new(dim: usize, size: usize) -> Self {
        let chunks = dim.div_ceil(16) * size;
        Self { dim, size, chunks, stride: (chunks | 1) * 16, box_rows: None }
    }

    /// Rows of 16-bit elements in boxes of `rows` rows; `dim` is a multiple of 64.
    pub(crate) fn of_boxes(dim: usize, rows: usize) -> Self {
        Self { dim, size: 2, chunks: dim / 8, stride: 128, box_rows: Some(rows) }
    }

    /// Panels of 64 elements of 16 bits.
    pub(crate) fn panels(self) -> usize {
        self.dim / 64
    }

    /// The number of boxes of `rows` rows; 0 if TMA does not write them.
    pub(crate) fn boxes(self, rows: usize) -> usize {
        self.box_rows.map_or(0, |of_box| rows / of_box)
    }

    /// Bytes of a box.
    pub(crate) fn box_bytes(self) -> usize {
        self.box_rows.map_or(0, |rows| rows * self.panels() * self.stride)
    }

    /// Bytes of 16 rows.
    pub(crate) fn block_bytes(self) -> usize {
        BLOCK_ROWS * self.stride * if self.box_rows.is_some() { self.panels() } else { 1 }
    }

    /// The byte offset of a chunk of a row of 16-bit elements.
    #[track_caller]
    pub(crate) fn chunk<'k>(self, row: Value<'k, u32>, chunk: Value<'k, u32>) -> Value<'k, u32> {
        let Some(rows) = self.box_rows.map(|rows| rows as u32) else {
            return row * self.stride as u32 + (chunk << 4);
        };
        let first = (row / rows) * (rows * self.panels() as u32) + (chunk >> 3) * rows;
        let line = first + (row & (rows - 1));
        (line << 7) + (((chunk ^ line) & 7) << 4)
    }

    /// Steps of 16 elements.
    pub(crate) fn steps(self) -> usize {
        self.dim.div_ceil(16)
    }
}

/// Formats of rows, and byte offsets of the common part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CtaLayout {
    pub(crate) q: RowFormat,
    /// Keys and values as MMA operands, in 16 bits.
    pub(crate) k: RowFormat,
    pub(crate) v: RowFormat,
    /// Keys and values as stored in the cache.
    pub(crate) stored_k: RowFormat,
    pub(crate) stored_v: RowFormat,
    /// `[3][128]` i32: positions, first visible keys and ends of visible keys of the rows.
    pub(crate) rows: usize,
    /// The control words.
    pub(crate) control: usize,
    /// Records of the merges that depend on the item.
    pub(crate) merges: usize,
    /// `[4 warps][4]` words: the running scale, if the cache has 8 bits.
    pub(crate) running_scales: usize,
    /// Bytes of the whole layout, the body's part included.
    pub(crate) bytes: usize,
}

impl CtaLayout {
    /// The layout of the common part, with the allocator of the body's part.
    pub(crate) fn new(
        q: RowFormat,
        v: RowFormat,
        [stored_k, stored_v]: [RowFormat; 2],
    ) -> (Self, SharedAllocator) {
        let mut taken = SharedAllocator(0);
        let (rows, control) = (taken.take(3 * MAX_ROWS * 4), taken.take(CONTROL_BYTES));
        let merges = taken.take(RECORDS * MergeItem::BYTES);
        let running_scales = taken.take(if stored_k.size == 1 { WARPS * 16 } else { 0 });
        (
            Self { q, k: q, v, stored_k, stored_v, rows, control, merges, running_scales, bytes: taken.0 },
            taken,
        )
    }
}

/// Bump allocator of shared memory offsets.
pub(crate) struct SharedAllocator(pub(crate) usize);

impl SharedAllocator {
    pub(crate) fn take(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 += bytes.next_multiple_of(16);
        at
    }
}
