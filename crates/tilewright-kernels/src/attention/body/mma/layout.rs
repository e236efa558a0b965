//! Shared memory layout of a CTA of the `mma` bodies: the common part, then that of the item's body.
//!
//! ```text
//! split_q    key entries · visible masks · sums · nonfinite masks | queries | dequantized tile | stages, each the K or V of a KV tile
//! split_kv   per warp, key entries or nonfinite masks | queries | per warp, units: the K or V of 16 or 32 keys
//! ```

use super::config::{KV_TOKENS, MmaConfig};
use crate::attention::{
    body::{Bodies, MAX_SPLIT_KV_ROWS},
    kernel::{BLOCK_ROWS, CtaLayout, MAX_ROWS, MAX_STAGES, RowFormat, SWIZZLE_ALIGN, SharedAllocator, WARPS},
};

/// The layout of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmaLayout {
    pub(crate) cta: CtaLayout,
    /// Row tiles of 16 rows per warp in `split_q`.
    pub(crate) row_tiles: usize,
    pub(crate) split_q: SplitQLayout,
    pub(crate) split_kv: SplitKvLayout,
}

/// Layout of the `split_q` body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Layout of the `split_kv` body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SplitKvLayout {
    /// Row tiles of 16 rows, which each warp multiplies with its keys.
    pub(crate) row_tiles: usize,
    /// Keys per stage: 32, which shorten the chain of dependent instructions per key, or 16.
    pub(crate) stage_keys: usize,
    /// Per warp `[2][stage_keys]` entries of 16 bytes, or, when the copies of a stage have started, `[stage_keys][chunks]` u16: masks of
    /// non-finite values.
    pub(crate) entries: usize,
    /// Bytes of a warp's entries or masks.
    pub(crate) entry_bytes: usize,
    /// `[4 warps][16][2]` f32: maxima and sums of the warps' rows of a row tile, then per warp the byte offset of its O in the rings.
    pub(crate) states: usize,
    pub(crate) q: usize,
    /// `[rows]` f32: factors of the logits of rows whose queries were scaled, if the cache has 8 bits.
    pub(crate) row_factors: usize,
    /// The rings of the warps, one after the other.
    pub(crate) rings: usize,
    pub(crate) ring_bytes: usize,
    /// Bytes of a unit: the K or the V of a stage. The units of a ring are K and V in turns.
    pub(crate) unit_bytes: usize,
    pub(crate) num_units: usize,
    /// Offset from a unit to the scales of its keys or values, `[stage_keys]` f32, if the cache has 8 bits.
    pub(crate) scales: usize,
    /// Row stride, in f32 elements, of a warp's O, which overwrites free units of its ring at the end, or all of them.
    pub(crate) sums_stride: usize,
}

impl SplitKvLayout {
    /// Minimum units: one to read, and two to fill.
    const MIN_UNITS: usize = 3;

    /// Maximum rows of an item.
    pub(crate) fn rows(&self) -> usize {
        MAX_SPLIT_KV_ROWS * self.row_tiles
    }

    /// Keys between the stages of a warp.
    pub(crate) fn stride(&self) -> u32 {
        (WARPS * self.stage_keys) as u32
    }

    /// Bytes from the states to the offsets that follow them.
    pub(crate) const STATES_BYTES: usize = WARPS * MAX_SPLIT_KV_ROWS * 8;

    /// Stages whose copies are in flight while another one is processed.
    pub(crate) fn stages_ahead(&self) -> usize {
        (self.num_units - 1) / 2
    }

    /// Whether K and V of a stage are copied and awaited together: an even number of units is a ring of stages. Otherwise V is copied
    /// when the keys of the current stage have been read, over these.
    pub(crate) fn has_whole_stages(&self) -> bool {
        self.num_units.is_multiple_of(2)
    }

    /// Units that are copied together, and are free after a stage.
    pub(crate) fn units_at_once(&self) -> usize {
        1 + usize::from(self.has_whole_stages())
    }

    /// Rows of O that fit into the adjacent units that are free after a stage.
    pub(crate) fn rows_in_free_units(&self) -> usize {
        self.units_at_once() * self.unit_bytes / (4 * self.sums_stride)
    }
}

/// The common part, after which either body's part begins.
struct LayoutPrefix {
    cta: CtaLayout,
    taken: SharedAllocator,
}

impl LayoutPrefix {
    /// Whether the cache has 8 bits.
    fn is_8_bit(&self) -> bool {
        self.cta.stored_k.size == 1
    }

    /// Whether TMA loads keys and values.
    fn has_boxes(&self) -> bool {
        self.cta.k.box_rows.is_some()
    }

    /// The layout of `split_kv`, and its end, with 32 keys per stage if heads leave enough registers and shared memory.
    fn split_kv(&self, row_tiles: usize, budget: usize) -> (SplitKvLayout, usize) {
        // pairs of row tiles of an 8-bit cache also keep converted operands
        let dims = self.cta.q.dim.max(self.cta.v.dim) * if self.is_8_bit() { row_tiles } else { 1 };
        let has_registers = dims <= 128;
        let of_32 = has_registers.then(|| self.split_kv_of(row_tiles, 32, budget));
        of_32
            .filter(|(layout, _)| layout.num_units >= SplitKvLayout::MIN_UNITS)
            .unwrap_or_else(|| self.split_kv_of(row_tiles, 16, budget))
    }

    /// Bytes of the nonfinite masks.
    fn nonfinite_masks(&self, keys: usize) -> usize {
        keys * self.cta.v.chunks * 2
    }

    /// Bytes of the scales of keys and values.
    fn scales(&self, keys: usize) -> usize {
        if self.is_8_bit() { 2 * 4 * keys } else { 0 }
    }

    /// The layout of `split_q`, and its end.
    fn split_q(&self, row_tiles: usize, budget: usize) -> (SplitQLayout, usize) {
        let mut allocator = SharedAllocator(self.taken.0);
        let entries = allocator.take(2 * 2 * KV_TOKENS * 16);
        let (visible, sums) = (allocator.take(MAX_ROWS * 8), allocator.take(128 * 16));
        let nonfinite_masks = allocator.take(self.nonfinite_masks(KV_TOKENS));
        let q = allocator.take(64 * row_tiles * self.cta.q.stride);
        let dequantized_keys = if self.is_8_bit() { KV_TOKENS } else { 0 };
        let dequantized = allocator.take(dequantized_keys * self.cta.q.stride.max(self.cta.v.stride));
        let scales = KV_TOKENS * self.cta.stored_k.stride.max(self.cta.stored_v.stride);
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

    /// The same with `stage_keys` keys per stage.
    fn split_kv_of(&self, row_tiles: usize, stage_keys: usize, budget: usize) -> (SplitKvLayout, usize) {
        let rows = MAX_SPLIT_KV_ROWS * row_tiles;
        let mut allocator = SharedAllocator(self.taken.0);
        let entry_bytes = (2 * stage_keys * 16).max(self.nonfinite_masks(stage_keys));
        let entries = allocator.take(WARPS * entry_bytes);
        let states = allocator.take(SplitKvLayout::STATES_BYTES + WARPS * 4);
        let q = allocator.take(rows * self.cta.q.stride);
        let row_factors = allocator.take(if self.is_8_bit() { rows * 4 } else { 0 });
        let [k, v] = [self.cta.stored_k, self.cta.stored_v];
        let scales = stage_keys / BLOCK_ROWS * k.block_bytes().max(v.block_bytes());
        let unit_bytes = scales + self.scales(stage_keys) / 2;
        // the barriers of units follow the layout
        let (barriers, align) =
            if self.has_boxes() { (WARPS * 2 * MAX_STAGES * 8, SWIZZLE_ALIGN) } else { (0, 1) };
        let budget = budget.saturating_sub(barriers);
        allocator.0 = allocator.0.next_multiple_of(align);
        let fitting = (budget.saturating_sub(allocator.0) / (WARPS * unit_bytes)).min(2 * MAX_STAGES);
        // whole stages need fewer waits
        let num_units = if fitting > SplitKvLayout::MIN_UNITS { fitting & !1 } else { fitting };
        let sums_stride = self.cta.v.steps() * 16 + 8;
        let ring_bytes = (num_units * unit_bytes).max(MAX_SPLIT_KV_ROWS * sums_stride * 4);
        let ring_bytes = ring_bytes.next_multiple_of(align);
        let rings = allocator.take(WARPS * ring_bytes);
        let split_kv = SplitKvLayout {
            row_tiles,
            stage_keys,
            entries,
            entry_bytes,
            states,
            q,
            row_factors,
            rings,
            ring_bytes,
            unit_bytes,
            num_units,
            scales,
            sums_stride,
        };
        (split_kv, allocator.0)
    }
}

impl MmaLayout {
    /// The layout with the maximum number of stages that fit into `budget` bytes; `None` if a ring has too few.
    pub(super) fn new(config: &MmaConfig, row_tiles: usize, budget: usize) -> Option<Self> {
        let (dim, size) = (config.head_dim, config.kv.size());
        let [q, v] = [dim.qk, dim.vo].map(|dim| RowFormat::new(dim, 2));
        let stored = [dim.qk, dim.vo].map(|dim| RowFormat::new(dim, size));
        let (mut cta, taken) = CtaLayout::new(q, v, stored);
        if let Some(keys) = config.bodies.box_keys() {
            let [k, v] = [dim.qk, dim.vo].map(|dim| RowFormat::of_boxes(dim, keys));
            cta = CtaLayout { k, v, stored_k: k, stored_v: v, ..cta };
        }
        let prefix = LayoutPrefix { cta, taken };
        let (split_q, split_q_end) = prefix.split_q(row_tiles, budget);
        let (split_kv, split_kv_end) =
            prefix.split_kv(1 + usize::from(config.bodies == Bodies::SplitKvPairs), budget);
        let bytes = match config.bodies {
            Bodies::Both => split_kv_end.max(split_q_end),
            _ => split_kv_end,
        };
        let cta = CtaLayout { bytes, ..cta };
        let fits_split_q = config.bodies != Bodies::Both || split_q.num_stages >= 2;
        let fits = fits_split_q && split_kv.num_units >= SplitKvLayout::MIN_UNITS && bytes <= budget;
        fits.then_some(Self { cta, row_tiles, split_q, split_kv })
    }
}
