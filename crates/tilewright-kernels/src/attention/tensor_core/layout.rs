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
/// Bytes of words that warps tell each other, and of the item: limits of rows by warp, what each of up to 8 warps sees in full,
/// which found values that are not finite, what merges are complete, counters, and the item.
pub(super) const WORDS: usize = 192;
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
    pub(super) fn new(dim: usize, size: usize) -> Self {
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
    /// `[4 warps][4]` words: what factors of pages are brought to, if elements have 8 bits.
    pub(super) references: usize,
    pub(super) many: Many,
    pub(super) few: Few,
    /// All together.
    pub(super) bytes: usize,
}

/// The layout for many rows; nothing where a kernel has no such body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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

/// The layout for few rows; nothing where a kernel has no such body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
pub(super) struct Pieces(pub(super) usize);

impl Pieces {
    pub(super) fn take(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 += bytes.next_multiple_of(16);
        at
    }
}

/// Rows of queries, keys and values, and what of shared memory all items need.
struct Common {
    q: RowFormat,
    v: RowFormat,
    stored: [RowFormat; 2],
    /// Bytes of the codes of values.
    codes: usize,
    /// Whether elements have 8 bits.
    bytes: bool,
    taken: Pieces,
}

impl Common {
    /// Bytes of keys or values made 16 bits.
    fn wide(&self, keys: usize) -> usize {
        if self.bytes { keys * self.q.stride.max(self.v.stride) } else { 0 }
    }

    /// Bytes of the factors of keys and their values.
    fn factors(&self, keys: usize) -> usize {
        if self.bytes { 2 * 4 * keys } else { 0 }
    }

    /// The layout for many rows, and its end.
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

    /// The layout for few rows, and its end.
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
    /// The layout with as many slots and stages as fit into `budget` bytes; `None` if not two of each do.
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
