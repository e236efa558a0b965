//! What lies where in the shared memory of a CTA of latent attention, and how its warps divide the work.
//!
//! ```text
//! positions and ranges of rows · words · places of keys · seen words · which warps found something | queries | logits | KV tiles
//! ```
//!
//! A row of queries or keys is both of its parts side by side, an odd number of chunks of 16 bytes as everywhere. Logits are shares:
//! `[dim parts][16 · groups][keys + 8]` f32. Codes of values that are not finite take their place.

use crate::attention::tensor_core::{
    Items,
    layout::{self, Few, Many, Pieces, RowFormat, WORDS},
};
use tilewright::HeadDim;

/// Warps of a CTA.
pub(super) const WARPS: usize = 8;
/// Groups of 16 rows that a body for many rows may have at once, and keys of a KV tile: the first that fit.
const SIZES: [(usize, usize); 3] = [(4, 32), (2, 32), (2, 16)];
/// Parts of a product's elements, at most: head dims are as many times 16.
const MOST_DIM_PARTS: usize = 4;
/// More stages than this are no use.
const MOST_STAGES: usize = 8;

/// All of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// What other kernels of tensor cores have, too.
    pub(super) cta: layout::Layout,
    /// Keys of a KV tile.
    pub(super) keys: usize,
    /// How the latent part of a row lies, and the part beside.
    pub(super) parts: [RowFormat; 2],
    /// `[2][2][keys]` entries of 16 bytes: both parts of the keys of two KV tiles.
    pub(super) entries: usize,
    /// `[64]` u64: the keys of the tile that a row sees.
    pub(super) seen: usize,
    /// `[8]` words: which warps found values that are not finite.
    pub(super) special: usize,
    /// The body for items of up to 16 rows.
    pub(super) few: Body,
    /// The body for more.
    pub(super) many: Body,
}

/// How a body divides rows, and what is its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Body {
    /// Groups of 16 rows.
    pub(super) groups: usize,
    /// Parts that the elements of a logit's product are divided into.
    pub(super) dim_parts: usize,
    pub(super) q: usize,
    pub(super) logits: usize,
    pub(super) stages: usize,
    pub(super) num_stages: usize,
}

impl Body {
    /// Warps of a group of rows: parts of the elements of its sums.
    pub(super) fn columns(self) -> usize {
        WARPS / self.groups
    }

    /// The body with as many stages as fit behind what is `taken`, and its end.
    fn new(groups: usize, (keys, stride): (usize, usize), mut taken: Pieces, budget: usize) -> (Self, usize) {
        let dim_parts = (WARPS / groups / (keys / 16)).min(MOST_DIM_PARTS);
        let (q, rows) = (taken.take(16 * groups * stride), 16 * groups * dim_parts);
        // codes take no more: 16 bits for each of 64 chunks of a key, at most
        let logits = taken.take((rows * logits_stride(keys) * 4).max(keys * 64 * 2));
        let num_stages = (budget.saturating_sub(taken.0) / (keys * stride)).min(MOST_STAGES);
        let stages = taken.take(num_stages * keys * stride);
        (Self { groups, dim_parts, q, logits, stages, num_stages }, taken.0)
    }
}

/// Numbers from row to row of logits: pairs of four rows lie in different banks.
pub(super) fn logits_stride(keys: usize) -> usize {
    keys + 8
}

impl Layout {
    /// The first of [`SIZES`] that fits into `budget` bytes, with as many stages as fit; `None` if not two of each do. What a step of
    /// decoding has no rows for is left out, if it does not go into one group.
    pub(super) fn new((dim, heads): (HeadDim, usize), items: Items, budget: usize) -> Option<Self> {
        let most = if (17..=32).contains(&heads) { 2 } else { SIZES[0].0 };
        // the same sizes whatever the items are: plans are for both
        SIZES.into_iter().filter(|(groups, _)| *groups <= most).find_map(|size| {
            Self::of(dim, Items::Any, size, budget).and_then(|_| Self::of(dim, items, size, budget))
        })
    }

    fn of(dim: HeadDim, items: Items, (groups, keys): (usize, usize), budget: usize) -> Option<Self> {
        let k = RowFormat::new(dim.qk, 2);
        let part = |dim: usize| RowFormat { stride: k.stride, ..RowFormat::new(dim, 2) };
        let parts = [part(dim.vo), part(dim.qk - dim.vo)];
        let mut taken = Pieces(0);
        let (rows, words) = (taken.take(3 * 128 * 4), taken.take(WORDS));
        let (entries, seen) = (taken.take(2 * 2 * keys * 16), taken.take(64 * 8));
        let special = taken.take(WARPS * 4);
        let body = |groups| Body::new(groups, (keys, k.stride), Pieces(taken.0), budget);
        let ((few, end_of_few), (many, end_of_many)) = (body(1), body(groups));
        let (bytes, stages) = match items {
            Items::Few => (end_of_few, few.num_stages),
            Items::Any => (end_of_few.max(end_of_many), few.num_stages.min(many.num_stages)),
        };
        let cta = layout::Layout {
            q: k,
            k,
            v: parts[0],
            stored_k: k,
            stored_v: parts[0],
            row_tiles: 1,
            rows,
            words,
            references: 0,
            many: Many::default(),
            few: Few::default(),
            bytes,
        };
        (stages >= 2 && bytes <= budget).then_some(Self {
            cta,
            keys,
            parts,
            entries,
            seen,
            special,
            few,
            many,
        })
    }
}
