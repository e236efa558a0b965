//! Shared memory layout of an MLA CTA, and the division of work among its warps.
//!
//! ```text
//! positions and ranges of rows · control words · key entries · visible masks · nonfinite flags | queries | logits | KV tiles
//! ```
//!
//! A row of queries or keys is its two parts side by side, with an odd number of 16-byte chunks as stride. Logits are partial
//! sums `[dim parts][16 · groups][keys + 8]` f32. Nonfinite masks overwrite them.

use crate::attention::{
    body::Bodies,
    kernel::layout::{CtaLayout, MAX_STAGES, RowFormat, SharedAllocator},
};
use tilewright::HeadDim;

/// Warps per CTA.
pub(super) const WARPS: usize = 8;
/// Groups of 16 rows of the multi-group body, and keys per KV tile, in order of preference.
const SIZES: [(usize, usize); 3] = [(4, 32), (2, 32), (2, 16)];
/// Maximum parts of the elements of `Q · Kᵀ`; head dims are multiples of 16 times this.
const MAX_DIM_PARTS: usize = 4;

/// The whole layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MlaLayout {
    /// The part that all tensor-core bodies have.
    pub(super) cta: CtaLayout,
    /// Keys per KV tile.
    pub(super) keys: usize,
    /// Formats of the compressed and the positional part of a row.
    pub(super) parts: [RowFormat; 2],
    /// `[2][2][keys]` entries of 16 bytes: both parts of the keys of two KV tiles.
    pub(super) entries: usize,
    /// `[64]` u64: the visible keys of the KV tile per row.
    pub(super) visible: usize,
    /// `[8]` words: flags of warps that found non-finite values.
    pub(super) nonfinite_warps: usize,
    /// The body for items of up to 16 rows.
    pub(super) single_group: MlaBodyLayout,
    /// The body for larger items.
    pub(super) multi_group: MlaBodyLayout,
}

/// Division of rows among warps, and shared memory of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct MlaBodyLayout {
    /// Groups of 16 rows.
    pub(super) groups: usize,
    /// Number of parts of the elements of `Q · Kᵀ`, one part per warp.
    pub(super) dim_parts: usize,
    pub(super) q: usize,
    pub(super) logits: usize,
    pub(super) stages: usize,
    pub(super) num_stages: usize,
}

impl MlaBodyLayout {
    /// Warps per group of rows, which divide the elements of O.
    pub(super) fn columns(self) -> usize {
        WARPS / self.groups
    }

    /// The body with the maximum number of stages after `taken`, and its end.
    fn new(
        groups: usize,
        keys: usize,
        stride: usize,
        mut taken: SharedAllocator,
        budget: usize,
    ) -> (Self, usize) {
        let dim_parts = (WARPS / groups / (keys / 16)).min(MAX_DIM_PARTS);
        let (q, rows) = (taken.take(16 * groups * stride), 16 * groups * dim_parts);
        // nonfinite masks take no more: 16 bits for each of at most 64 chunks per key
        let logits = taken.take((rows * logits_stride(keys) * 4).max(keys * 64 * 2));
        let num_stages = (budget.saturating_sub(taken.0) / (keys * stride)).min(MAX_STAGES);
        let stages = taken.take(num_stages * keys * stride);
        (Self { groups, dim_parts, q, logits, stages, num_stages }, taken.0)
    }
}

/// Row stride of the logits; pairs of four rows are in different banks.
pub(super) fn logits_stride(keys: usize) -> usize {
    keys + 8
}

impl MlaLayout {
    /// The first of [`SIZES`] that fits into `budget` bytes, with the maximum number of stages; `None` if a ring has fewer than
    /// two. Sizes with more rows than a decode step of `heads` fills are skipped.
    pub(super) fn new(dim: HeadDim, heads: usize, bodies: Bodies, budget: usize) -> Option<Self> {
        let max_groups = if (17..=32).contains(&heads) { 2 } else { SIZES[0].0 };
        // the same size for all bodies, because one plan serves both kernels
        SIZES.into_iter().filter(|(groups, _)| *groups <= max_groups).find_map(|(groups, keys)| {
            let of_bodies = |bodies| Self::of(dim, bodies, groups, keys, budget);
            of_bodies(Bodies::Both).and_then(|_| of_bodies(bodies))
        })
    }

    fn of(dim: HeadDim, bodies: Bodies, groups: usize, keys: usize, budget: usize) -> Option<Self> {
        let k = RowFormat::new(dim.qk, 2);
        let part = |dim: usize| RowFormat { stride: k.stride, ..RowFormat::new(dim, 2) };
        let parts = [part(dim.vo), part(dim.qk - dim.vo)];
        let (cta, mut taken) = CtaLayout::new(k, parts[0], [k, parts[0]]);
        let (entries, visible) = (taken.take(2 * 2 * keys * 16), taken.take(64 * 8));
        let nonfinite_warps = taken.take(WARPS * 4);
        let body = |groups| MlaBodyLayout::new(groups, keys, k.stride, SharedAllocator(taken.0), budget);
        let ((single_group, single_group_end), (multi_group, multi_group_end)) = (body(1), body(groups));
        let (bytes, stages) = match bodies {
            Bodies::Both => {
                (single_group_end.max(multi_group_end), single_group.num_stages.min(multi_group.num_stages))
            }
            _ => (single_group_end, single_group.num_stages),
        };
        let cta = CtaLayout { bytes, ..cta };
        (stages >= 2 && bytes <= budget).then_some(Self {
            cta,
            keys,
            parts,
            entries,
            visible,
            nonfinite_warps,
            single_group,
            multi_group,
        })
    }
}
