//! Shared memory layout of a CTA.
//!
//! Rows of elements are chunks of 16 bytes. The row stride is an odd number of chunks, so that the same column of eight rows is
//! in different banks, and every location is a constant offset from one address per lane.
//!
//! ```text
//! always     positions and visible ranges of the tile's rows, control words
//! split_q    key entries · visible masks · sums · nonfinite masks | queries | dequantized tile | stages, each the K or V of a KV tile
//! split_kv   key entries · nonfinite masks | queries | dequantized tiles | per warp, stages of 16 keys and their values
//! ```

use crate::attention::body::mma::{Bodies, KV_TOKENS, MAX_SPLIT_KV_ROWS, MmaConfig};

/// Warps per CTA.
pub(crate) const WARPS: usize = 4;
/// Bytes of the control words: row limits per warp, the unmasked range of each of up to 8 warps, warps that found non-finite
/// values, completed merges, item counters, and the item.
pub(crate) const CONTROL_BYTES: usize = 192;
/// Keys per stage of a warp in `split_kv`.
pub(crate) const STAGE_KEYS: usize = 16;
/// Maximum rows per tile.
const MAX_ROWS: usize = 128;
/// Maximum stages of a ring; more do not help.
const MAX_STAGES: usize = 8;

/// Format of a head's rows in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowFormat {
    /// Elements of a row; padding is 0.
    pub(crate) dim: usize,
    /// Bytes per element.
    pub(crate) size: usize,
    /// Chunks of 16 bytes, padded to steps of 16 elements.
    pub(crate) chunks: usize,
    /// Row stride in bytes.
    pub(crate) stride: usize,
}

impl RowFormat {
    pub(crate) fn new(dim: usize, size: usize) -> Self {
        let chunks = dim.div_ceil(16) * size;
        Self { dim, size, chunks, stride: (chunks | 1) * 16 }
    }

    /// Steps of 16 elements.
    pub(crate) fn steps(self) -> usize {
        self.dim.div_ceil(16)
    }
}

/// Byte offsets, and numbers of stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedLayout {
    pub(crate) q: RowFormat,
    /// Keys and values as MMA operands, in 16 bits.
    pub(crate) k: RowFormat,
    pub(crate) v: RowFormat,
    /// Keys and values as stored in the cache.
    pub(crate) stored_k: RowFormat,
    pub(crate) stored_v: RowFormat,
    /// Row tiles of 16 rows per warp.
    pub(crate) row_tiles: usize,
    /// `[3][128]` i32: positions, first visible keys and ends of visible keys of the rows.
    pub(crate) rows: usize,
    /// The control words.
    pub(crate) control: usize,
    /// `[4 warps][4]` words: the running scale, if the cache has 8 bits.
    pub(crate) running_scales: usize,
    pub(crate) split_q: SplitQLayout,
    pub(crate) split_kv: SplitKvLayout,
    /// Bytes of the whole layout.
    pub(crate) bytes: usize,
}

/// Layout of the `split_q` body; default in a kernel without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SplitQLayout {
    /// `[2][2][64]` entries of 16 bytes: keys and values of two KV tiles.
    pub(crate) entries: usize,
    /// `[128]` u64: the visible keys of the KV tile per row.
    pub(crate) visible: usize,
    /// `[128][4]` f32: sums of weights per thread.
    pub(crate) sums: usize,
    /// `[64][chunks]` u16: masks of non-finite values.
    pub(crate) nonfinite_masks: usize,
    pub(crate) q: usize,
    /// The dequantized K or V tile, if the cache has 8 bits.
    pub(crate) dequantized: usize,
    pub(crate) stages: usize,
    pub(crate) stage_bytes: usize,
    pub(crate) num_stages: usize,
    /// Offset from a stage to the scales of its keys and values, `[2][64]` f32, if the cache has 8 bits.
    pub(crate) scales: usize,
}

/// Layout of the `split_kv` body; default in a kernel without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SplitKvLayout {
    /// `[4 warps][2][16]` entries of 16 bytes.
    pub(crate) entries: usize,
    /// `[4 warps][16][chunks]` u16: masks of non-finite values.
    pub(crate) nonfinite_masks: usize,
    pub(crate) q: usize,
    /// The dequantized K or V of a stage, per warp, if the cache has 8 bits.
    pub(crate) dequantized: usize,
    pub(crate) dequantized_bytes: usize,
    /// The rings of the warps, one after the other.
    pub(crate) rings: usize,
    pub(crate) ring_bytes: usize,
    pub(crate) stage_bytes: usize,
    pub(crate) num_stages: usize,
    /// Offset from a stage to the scales of its keys and values, `[2][16]` f32, if the cache has 8 bits.
    pub(crate) scales: usize,
    /// Row stride, in f32 elements, of a warp's O, which overwrites its ring at the end.
    pub(crate) sums_stride: usize,
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

/// The parts of the layout that both bodies share.
struct CommonLayout {
    q: RowFormat,
    v: RowFormat,
    stored: [RowFormat; 2],
    /// Bytes of the nonfinite masks.
    nonfinite_masks: usize,
    /// Whether the cache has 8 bits.
    is_8_bit: bool,
    taken: SharedAllocator,
}

impl CommonLayout {
    /// Bytes of dequantized keys or values.
    fn dequantized(&self, keys: usize) -> usize {
        if self.is_8_bit { keys * self.q.stride.max(self.v.stride) } else { 0 }
    }

    /// Bytes of the scales of keys and values.
    fn scales(&self, keys: usize) -> usize {
        if self.is_8_bit { 2 * 4 * keys } else { 0 }
    }

    /// The layout of `split_q`, and its end.
    fn split_q(&self, row_tiles: usize, budget: usize) -> (SplitQLayout, usize) {
        let mut allocator = SharedAllocator(self.taken.0);
        let entries = allocator.take(2 * 2 * KV_TOKENS * 16);
        let (visible, sums) = (allocator.take(MAX_ROWS * 8), allocator.take(128 * 16));
        let (nonfinite_masks, q) =
            (allocator.take(self.nonfinite_masks), allocator.take(64 * row_tiles * self.q.stride));
        let dequantized = allocator.take(self.dequantized(KV_TOKENS));
        let scales = KV_TOKENS * self.stored[0].stride.max(self.stored[1].stride);
        let stage_bytes = scales + self.scales(KV_TOKENS);
        let num_stages = (budget.saturating_sub(allocator.0) / stage_bytes).min(MAX_STAGES);
        let stages = allocator.take(num_stages * stage_bytes);
        let split_q = SplitQLayout {
            entries,
            visible,
            sums,
            nonfinite_masks,
            q,
            dequantized,
            stages,
            stage_bytes,
            num_stages,
            scales,
        };
        (split_q, allocator.0)
    }

    /// The layout of `split_kv`, and its end.
    fn split_kv(&self, budget: usize) -> (SplitKvLayout, usize) {
        let mut allocator = SharedAllocator(self.taken.0);
        let entries = allocator.take(WARPS * 2 * STAGE_KEYS * 16);
        let (nonfinite_masks, q) =
            (allocator.take(self.nonfinite_masks), allocator.take(MAX_SPLIT_KV_ROWS * self.q.stride));
        let dequantized_bytes = self.dequantized(STAGE_KEYS);
        let dequantized = allocator.take(WARPS * dequantized_bytes);
        let scales = STAGE_KEYS * (self.stored[0].stride + self.stored[1].stride);
        let stage_bytes = scales + self.scales(STAGE_KEYS);
        let num_stages = (budget.saturating_sub(allocator.0) / (WARPS * stage_bytes)).min(MAX_STAGES);
        let sums_stride = self.v.steps() * 16 + 8;
        let ring_bytes = (num_stages * stage_bytes).max(MAX_SPLIT_KV_ROWS * sums_stride * 4);
        let rings = allocator.take(WARPS * ring_bytes);
        let split_kv = SplitKvLayout {
            entries,
            nonfinite_masks,
            q,
            dequantized,
            dequantized_bytes,
            rings,
            ring_bytes,
            stage_bytes,
            num_stages,
            scales,
            sums_stride,
        };
        (split_kv, allocator.0)
    }
}

impl SharedLayout {
    /// The layout with the maximum number of stages that fit into `budget` bytes; `None` if a ring has fewer than two.
    pub(crate) fn new(config: &MmaConfig, row_tiles: usize, budget: usize) -> Option<Self> {
        let (dim, size) = (config.head_dim, config.kv.size());
        let (q, v) = (RowFormat::new(dim.qk, 2), RowFormat::new(dim.vo, 2));
        let stored = [RowFormat::new(dim.qk, size), RowFormat::new(dim.vo, size)];
        let (nonfinite_masks, is_8_bit) = (KV_TOKENS * v.steps() * 2 * 2, size == 1);
        let mut taken = SharedAllocator(0);
        let (rows, control) = (taken.take(3 * MAX_ROWS * 4), taken.take(CONTROL_BYTES));
        let running_scales = taken.take(if is_8_bit { WARPS * 16 } else { 0 });
        let common = CommonLayout { q, v, stored, nonfinite_masks, is_8_bit, taken };
        let ((split_q, split_q_end), (split_kv, split_kv_end)) =
            (common.split_q(row_tiles, budget), common.split_kv(budget));
        let (bytes, fits) = match config.bodies {
            Bodies::SplitKv => (split_kv_end, split_kv.num_stages >= 2),
            Bodies::Both => {
                (split_kv_end.max(split_q_end), split_kv.num_stages >= 2 && split_q.num_stages >= 2)
            }
        };
        let fits = fits && bytes <= budget;
        let [stored_k, stored_v] = stored;
        fits.then_some(Self {
            q,
            k: q,
            v,
            stored_k,
            stored_v,
            row_tiles,
            rows,
            control,
            running_scales,
            split_q,
            split_kv,
            bytes,
        })
    }
}
