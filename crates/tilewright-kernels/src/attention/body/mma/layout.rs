//! Shared memory layout of a CTA of the `mma` bodies: the common part, then that of the item's body.
//!
//! ```text
//! split_q    key entries · visible masks · sums · nonfinite masks | queries | dequantized tile | stages, each the K or V of a KV tile
//! split_kv   key entries · nonfinite masks | queries | per warp, stages of 16 or 32 keys and their values
//! ```

use super::config::{KV_TOKENS, MmaConfig};
use crate::attention::{
    body::{Bodies, MAX_SPLIT_KV_ROWS},
    kernel::layout::{CtaLayout, MAX_ROWS, MAX_STAGES, RowFormat, SharedAllocator, WARPS},
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
    /// Keys per stage: 16, or 32 of an 8-bit cache, which have the same bytes and more arithmetic to overlap.
    pub(crate) stage_keys: usize,
    /// `[4 warps][2][stage_keys]` entries of 16 bytes.
    pub(crate) entries: usize,
    /// `[4 warps][16][2]` f32: maxima and sums of the warps' rows, then per warp the byte offset of its O in the rings.
    pub(crate) states: usize,
    /// `[4 warps][stage_keys][chunks]` u16: masks of non-finite values.
    pub(crate) nonfinite_masks: usize,
    pub(crate) q: usize,
    /// `[16]` f32: factors of the logits of rows whose queries were scaled, if the cache has 8 bits.
    pub(crate) row_factors: usize,
    /// The rings of the warps, one after the other.
    pub(crate) rings: usize,
    pub(crate) ring_bytes: usize,
    pub(crate) stage_bytes: usize,
    pub(crate) num_stages: usize,
    /// Offset from a stage to the scales of its keys and values, `[2][stage_keys]` f32, if the cache has 8 bits.
    pub(crate) scales: usize,
    /// Row stride, in f32 elements, of a warp's O, which overwrites a stage of its ring at the end, or all of them.
    pub(crate) sums_stride: usize,
}

impl SplitKvLayout {
    /// Bytes from the states to the offsets that follow them.
    pub(crate) const STATES_BYTES: usize = WARPS * MAX_SPLIT_KV_ROWS * 8;

    /// Rows of O that fit into a stage.
    pub(crate) fn rows_per_stage(&self) -> usize {
        self.stage_bytes / (4 * self.sums_stride)
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

    /// Keys per stage of `split_kv`. Large heads leave too few registers for more.
    fn stage_keys(&self) -> usize {
        if self.is_8_bit() && self.cta.q.dim.max(self.cta.v.dim) <= 128 { 32 } else { 16 }
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

    /// The layout of `split_kv`, and its end.
    fn split_kv(&self, budget: usize) -> (SplitKvLayout, usize) {
        let mut allocator = SharedAllocator(self.taken.0);
        let stage_keys = self.stage_keys();
        let entries = allocator.take(WARPS * 2 * stage_keys * 16);
        let states = allocator.take(SplitKvLayout::STATES_BYTES + WARPS * 4);
        let nonfinite_masks = allocator.take(self.nonfinite_masks(WARPS * stage_keys));
        let q = allocator.take(MAX_SPLIT_KV_ROWS * self.cta.q.stride);
        let row_factors = allocator.take(if self.is_8_bit() { MAX_SPLIT_KV_ROWS * 4 } else { 0 });
        let scales = stage_keys * (self.cta.stored_k.stride + self.cta.stored_v.stride);
        let stage_bytes = scales + self.scales(stage_keys);
        let num_stages = (budget.saturating_sub(allocator.0) / (WARPS * stage_bytes)).min(MAX_STAGES);
        let sums_stride = self.cta.v.steps() * 16 + 8;
        let ring_bytes = (num_stages * stage_bytes).max(MAX_SPLIT_KV_ROWS * sums_stride * 4);
        let rings = allocator.take(WARPS * ring_bytes);
        let split_kv = SplitKvLayout {
            stage_keys,
            entries,
            states,
            nonfinite_masks,
            q,
            row_factors,
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

impl MmaLayout {
    /// The layout with the maximum number of stages that fit into `budget` bytes; `None` if a ring has fewer than two.
    pub(super) fn new(config: &MmaConfig, row_tiles: usize, budget: usize) -> Option<Self> {
        let (dim, size) = (config.head_dim, config.kv.size());
        let [q, v] = [dim.qk, dim.vo].map(|dim| RowFormat::new(dim, 2));
        let (cta, taken) = CtaLayout::new(q, v, [dim.qk, dim.vo].map(|dim| RowFormat::new(dim, size)));
        let prefix = LayoutPrefix { cta, taken };
        let (split_q, split_q_end) = prefix.split_q(row_tiles, budget);
        let (split_kv, split_kv_end) = prefix.split_kv(budget);
        let (bytes, num_stages) = match config.bodies {
            Bodies::SplitKv => (split_kv_end, split_kv.num_stages),
            Bodies::Both => (split_kv_end.max(split_q_end), split_kv.num_stages.min(split_q.num_stages)),
        };
        let cta = CtaLayout { bytes, ..cta };
        (num_stages >= 2 && bytes <= budget).then_some(Self { cta, row_tiles, split_q, split_kv })
    }
}
