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

use super::config::{Config, FEW_ROWS, Items, KV_TOKENS};

/// Warps per CTA.
pub(super) const WARPS: usize = 4;
/// Bytes of the control words: row limits per warp, the unmasked range of each of up to 8 warps, warps that found non-finite
/// values, completed merges, item counters, and the item.
pub(super) const WORDS: usize = 192;
/// Keys per stage of a warp in `split_kv`.
pub(super) const STAGE_KEYS: usize = 16;
/// Maximum rows per tile.
const MOST_ROWS: usize = 128;
/// Maximum stages of a ring; more do not help.
const MOST_BUFFERS: usize = 8;

/// Format of a head's rows in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowFormat {
    /// Elements of a row; padding is 0.
    pub(super) dim: usize,
    /// Bytes per element.
    pub(super) size: usize,
    /// Chunks of 16 bytes, padded to steps of 16 elements.
    pub(super) chunks: usize,
    /// Row stride in bytes.
    pub(super) stride: usize,
}

impl RowFormat {
    pub(super) fn new(dim: usize, size: usize) -> Self {
        let chunks = dim.div_ceil(16) * size;
        Self { dim, size, chunks, stride: (chunks | 1) * 16 }
    }

    /// Steps of 16 elements.
    pub(super) fn steps(self) -> usize {
        self.dim.div_ceil(16)
    }
}

/// Byte offsets, and numbers of stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) q: RowFormat,
    /// Keys and values as MMA operands, in 16 bits.
    pub(super) k: RowFormat,
    pub(super) v: RowFormat,
    /// Keys and values as stored in the cache.
    pub(super) stored_k: RowFormat,
    pub(super) stored_v: RowFormat,
    /// Row tiles of 16 rows per warp.
    pub(super) row_tiles: usize,
    /// `[3][128]` i32: positions, first visible keys and ends of visible keys of the rows.
    pub(super) rows: usize,
    /// The control words.
    pub(super) words: usize,
    /// `[4 warps][4]` words: the running scale, if the cache has 8 bits.
    pub(super) references: usize,
    pub(super) many: Many,
    pub(super) few: Few,
    /// Bytes of the whole layout.
    pub(super) bytes: usize,
}

/// Layout of the `split_q` body; default in a kernel without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Many {
    /// `[2][2][64]` entries of 16 bytes: keys and values of two KV tiles.
    pub(super) entries: usize,
    /// `[128]` u64: the visible keys of the KV tile per row.
    pub(super) seen: usize,
    /// `[128][4]` f32: sums of weights per thread.
    pub(super) sums: usize,
    /// `[64][chunks]` u16: masks of non-finite values.
    pub(super) codes: usize,
    pub(super) q: usize,
    /// The dequantized K or V tile, if the cache has 8 bits.
    pub(super) wide: usize,
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
    pub(super) num_slots: usize,
    /// Offset from a stage to the scales of its keys and values, `[2][64]` f32, if the cache has 8 bits.
    pub(super) factors: usize,
}

/// Layout of the `split_kv` body; default in a kernel without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Few {
    /// `[4 warps][2][16]` entries of 16 bytes.
    pub(super) entries: usize,
    /// `[4 warps][16][chunks]` u16: masks of non-finite values.
    pub(super) codes: usize,
    pub(super) q: usize,
    /// The dequantized K or V of a stage, per warp, if the cache has 8 bits.
    pub(super) wide: usize,
    pub(super) wide_bytes: usize,
    /// The rings of the warps, one after the other.
    pub(super) rings: usize,
    pub(super) ring_bytes: usize,
    pub(super) stage_bytes: usize,
    pub(super) num_stages: usize,
    /// Offset from a stage to the scales of its keys and values, `[2][16]` f32, if the cache has 8 bits.
    pub(super) factors: usize,
    /// Row stride, in f32 elements, of a warp's O, which overwrites its ring at the end.
    pub(super) sums_stride: usize,
}

/// Bump allocator of shared memory offsets.
pub(super) struct Pieces(pub(super) usize);

impl Pieces {
    pub(super) fn take(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 += bytes.next_multiple_of(16);
        at
    }
}

/// The parts of the layout that both bodies share.
struct Common {
    q: RowFormat,
    v: RowFormat,
    stored: [RowFormat; 2],
    /// Bytes of the nonfinite masks.
    codes: usize,
    /// Whether the cache has 8 bits.
    bytes: bool,
    taken: Pieces,
}

impl Common {
    /// Bytes of dequantized keys or values.
    fn wide(&self, keys: usize) -> usize {
        if self.bytes { keys * self.q.stride.max(self.v.stride) } else { 0 }
    }

    /// Bytes of the scales of keys and values.
    fn factors(&self, keys: usize) -> usize {
        if self.bytes { 2 * 4 * keys } else { 0 }
    }

    /// The layout of `split_q`, and its end.
    fn many(&self, row_tiles: usize, budget: usize) -> (Many, usize) {
        let mut pieces = Pieces(self.taken.0);
        let entries = pieces.take(2 * 2 * KV_TOKENS * 16);
        let (seen, sums) = (pieces.take(MOST_ROWS * 8), pieces.take(128 * 16));
        let (codes, q) = (pieces.take(self.codes), pieces.take(64 * row_tiles * self.q.stride));
        let wide = pieces.take(self.wide(KV_TOKENS));
        let factors = KV_TOKENS * self.stored[0].stride.max(self.stored[1].stride);
        let slot_bytes = factors + self.factors(KV_TOKENS);
        let num_slots = (budget.saturating_sub(pieces.0) / slot_bytes).min(MOST_BUFFERS);
        let slots = pieces.take(num_slots * slot_bytes);
        let many = Many { entries, seen, sums, codes, q, wide, slots, slot_bytes, num_slots, factors };
        (many, pieces.0)
    }

    /// The layout of `split_kv`, and its end.
    fn few(&self, budget: usize) -> (Few, usize) {
        let mut pieces = Pieces(self.taken.0);
        let entries = pieces.take(WARPS * 2 * STAGE_KEYS * 16);
        let (codes, q) = (pieces.take(self.codes), pieces.take(FEW_ROWS * self.q.stride));
        let wide_bytes = self.wide(STAGE_KEYS);
        let wide = pieces.take(WARPS * wide_bytes);
        let factors = STAGE_KEYS * (self.stored[0].stride + self.stored[1].stride);
        let stage_bytes = factors + self.factors(STAGE_KEYS);
        let num_stages = (budget.saturating_sub(pieces.0) / (WARPS * stage_bytes)).min(MOST_BUFFERS);
        let sums_stride = self.v.steps() * 16 + 8;
        let ring_bytes = (num_stages * stage_bytes).max(FEW_ROWS * sums_stride * 4);
        let rings = pieces.take(WARPS * ring_bytes);
        let few = Few {
            entries,
            codes,
            q,
            wide,
            wide_bytes,
            rings,
            ring_bytes,
            stage_bytes,
            num_stages,
            factors,
            sums_stride,
        };
        (few, pieces.0)
    }
}

impl Layout {
    /// The layout with the maximum number of stages that fit into `budget` bytes; `None` if a ring has fewer than two.
    pub(super) fn new(config: &Config, row_tiles: usize, budget: usize) -> Option<Self> {
        let (dim, size) = (config.head_dim, config.kv.size());
        let (q, v) = (RowFormat::new(dim.qk, 2), RowFormat::new(dim.vo, 2));
        let stored = [RowFormat::new(dim.qk, size), RowFormat::new(dim.vo, size)];
        let (codes, bytes) = (KV_TOKENS * v.steps() * 2 * 2, size == 1);
        let mut taken = Pieces(0);
        let (rows, words) = (taken.take(3 * MOST_ROWS * 4), taken.take(WORDS));
        let references = taken.take(if bytes { WARPS * 16 } else { 0 });
        let common = Common { q, v, stored, codes, bytes, taken };
        let ((many, end_of_many), (few, end_of_few)) = (common.many(row_tiles, budget), common.few(budget));
        let (bytes, fits) = match config.items {
            Items::Few => (end_of_few, few.num_stages >= 2),
            Items::Any => (end_of_few.max(end_of_many), few.num_stages >= 2 && many.num_slots >= 2),
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
            words,
            references,
            many,
            few,
            bytes,
        })
    }
}
