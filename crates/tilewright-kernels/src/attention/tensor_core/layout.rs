//! What lies where in the shared memory of a CTA.
//!
//! Rows of elements are chunks of 16 bytes. A row has an odd number of them, so that eight rows' chunks of one column lie in
//! different banks, and so that every place is a constant behind an address that each lane computes once.
//!
//! ```text
//! always        positions and ranges of the tile's rows, a few words
//! many rows     places of keys · seen words · sums · codes | queries | wide | slots, each a KV tile's keys or values, in turn
//! few rows      places of keys · codes | queries | wide | for each warp stages of 16 keys with their values
//! ```

use super::config::{Config, FEW_ROWS, Items, KV_TOKENS};

/// Warps of a CTA.
pub(super) const WARPS: usize = 4;
/// Keys that a warp of few rows takes at once.
pub(super) const STAGE_KEYS: usize = 16;
/// Rows of the longest tile.
const MOST_ROWS: usize = 128;
/// More slots or stages than this are no use.
const MOST_BUFFERS: usize = 8;

/// How rows of a head lie in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowFormat {
    /// Elements that there are; those behind them are 0.
    pub(super) dim: usize,
    /// Bytes of an element.
    pub(super) size: usize,
    /// Chunks of 16 bytes, for whole steps of 16 elements.
    pub(super) chunks: usize,
    /// Bytes from row to row.
    pub(super) stride: usize,
}

impl RowFormat {
    fn new(dim: usize, size: usize) -> Self {
        let chunks = dim.div_ceil(16) * size;
        Self { dim, size, chunks, stride: (chunks | 1) * 16 }
    }

    /// Steps of 16 elements.
    pub(super) fn steps(self) -> usize {
        self.dim.div_ceil(16)
    }
}

/// Byte offsets, and how many slots and stages there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) q: RowFormat,
    /// Keys and values as products take them, in 16 bits.
    pub(super) k: RowFormat,
    pub(super) v: RowFormat,
    /// The same as they arrive.
    pub(super) stored_k: RowFormat,
    pub(super) stored_v: RowFormat,
    /// Tiles of 16 rows of a warp.
    pub(super) row_tiles: usize,
    /// `[3][128]` i32: positions, first keys, ends of keys of rows.
    pub(super) rows: usize,
    /// Words that warps tell each other, and the item.
    pub(super) words: usize,
    pub(super) many: Many,
    pub(super) few: Few,
    /// All together.
    pub(super) bytes: usize,
}

/// The layout for many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Many {
    /// `[2][2][64]` entries of 16 bytes: keys and values of two tiles.
    pub(super) entries: usize,
    /// `[128]` u64: the keys of the tile that a row sees.
    pub(super) seen: usize,
    /// `[128][4]` f32: sums of weights of each thread.
    pub(super) sums: usize,
    /// `[64][chunks]` u16: values that are not finite.
    pub(super) codes: usize,
    pub(super) q: usize,
    /// Keys or values of a tile made 16 bits, if they are 8.
    pub(super) wide: usize,
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
    pub(super) num_slots: usize,
    /// From a slot to the factors of its keys and their values, `[2][64]` f32, if elements have 8 bits.
    pub(super) factors: usize,
}

/// The layout for few rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Few {
    /// `[4 warps][2][16]` entries of 16 bytes.
    pub(super) entries: usize,
    /// `[4 warps][16][chunks]` u16.
    pub(super) codes: usize,
    pub(super) q: usize,
    /// For each warp, keys or values of a stage made 16 bits, if they are 8.
    pub(super) wide: usize,
    pub(super) wide_bytes: usize,
    /// The rings of the warps, one behind the other.
    pub(super) rings: usize,
    pub(super) ring_bytes: usize,
    pub(super) stage_bytes: usize,
    pub(super) num_stages: usize,
    /// From a stage to the factors of its keys and values, `[2][16]` f32, if elements have 8 bits.
    pub(super) factors: usize,
    /// f32 elements from row to row of a warp's sums, which come into its ring at the end.
    pub(super) sums_stride: usize,
}

/// Takes pieces off a stretch of memory.
struct Pieces(usize);

impl Pieces {
    fn take(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 += bytes.next_multiple_of(16);
        at
    }
}

impl Layout {
    /// The layout with as many slots and stages as fit into `budget` bytes; `None` if not two of each do.
    pub(super) fn new(config: &Config, budget: usize) -> Option<Self> {
        let (dim, size) = (config.head_dim, config.kv.size());
        let (q, v) = (RowFormat::new(dim.qk, 2), RowFormat::new(dim.vo, 2));
        let stored = [RowFormat::new(dim.qk, size), RowFormat::new(dim.vo, size)];
        let codes = KV_TOKENS * v.steps() * 2 * 2;
        let mut pieces = Pieces(0);
        let (rows, words) = (pieces.take(3 * MOST_ROWS * 4), pieces.take(48 * 4));
        let row_tiles = config.row_tiles();
        // what only elements of 8 bits need: bytes of so many keys, and of their factors
        let wide_bytes = |keys: usize| if size > 1 { 0 } else { keys * q.stride.max(v.stride) };
        let factor_bytes = |keys: usize| if size > 1 { 0 } else { 2 * 4 * keys };

        let mut of_many = Pieces(pieces.0);
        let entries = of_many.take(2 * 2 * KV_TOKENS * 16);
        let (seen, sums) = (of_many.take(MOST_ROWS * 8), of_many.take(128 * 16));
        let (codes_at, q_at) = (of_many.take(codes), of_many.take(64 * row_tiles * q.stride));
        let wide = of_many.take(wide_bytes(KV_TOKENS));
        let factors = KV_TOKENS * stored[0].stride.max(stored[1].stride);
        let slot_bytes = factors + factor_bytes(KV_TOKENS);
        let num_slots = (budget.saturating_sub(of_many.0) / slot_bytes).min(MOST_BUFFERS);
        let slots = of_many.take(num_slots * slot_bytes);
        let many = Many {
            entries,
            seen,
            sums,
            codes: codes_at,
            q: q_at,
            wide,
            slots,
            slot_bytes,
            num_slots,
            factors,
        };

        let mut of_few = Pieces(pieces.0);
        let entries = of_few.take(WARPS * 2 * STAGE_KEYS * 16);
        let (codes_at, q_at) = (of_few.take(codes), of_few.take(FEW_ROWS * q.stride));
        let wide_bytes = wide_bytes(STAGE_KEYS);
        let wide = of_few.take(WARPS * wide_bytes);
        let factors = STAGE_KEYS * (stored[0].stride + stored[1].stride);
        let stage_bytes = factors + factor_bytes(STAGE_KEYS);
        let num_stages = (budget.saturating_sub(of_few.0) / (WARPS * stage_bytes)).min(MOST_BUFFERS);
        let sums_stride = v.steps() * 16 + 8;
        let ring_bytes = (num_stages * stage_bytes).max(FEW_ROWS * sums_stride * 4);
        let rings = of_few.take(WARPS * ring_bytes);
        let few = Few {
            entries,
            codes: codes_at,
            q: q_at,
            wide,
            wide_bytes,
            rings,
            ring_bytes,
            stage_bytes,
            num_stages,
            factors,
            sums_stride,
        };

        let (bytes, fits) = match config.items {
            Items::Few => (of_few.0, num_stages >= 2),
            Items::Any => (of_few.0.max(of_many.0), num_stages >= 2 && num_slots >= 2),
        };
        let fits = fits && bytes <= budget;
        let [stored_k, stored_v] = stored;
        fits.then_some(Self { q, k: q, v, stored_k, stored_v, row_tiles, rows, words, many, few, bytes })
    }
}
