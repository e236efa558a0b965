//! Parameters of one attention call, layout of a worker's scratch, and the rows and KV locations of a work item.

use super::{Bf16Mma, HookSet, Hooks, Shared, SharedRows, Simd, bf16};
use crate::{
    Data, HeadDim, Plan,
    attention::{Inputs, KvSource, KvTensor, Segment, WorkItem, variant::QueryRow},
    cpu::Isa,
};
use std::ops::Range;

/// Keys per KV tile.
pub(crate) const KV_TOKENS: usize = 64;
/// Alignment of scratch parts and row strides, in f32 elements: the widest register, which is one cache line.
pub(crate) const ALIGN: usize = 16;

/// Parameters of one attention call, shared by all workers.
pub(crate) struct AttentionParams<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) inputs: &'a Inputs<'a>,
    /// Instruction set for the hooks of the variant.
    pub(crate) isa: Isa,
    pub(crate) variant: &'a dyn Hooks,
    pub(crate) hooks: HookSet,
    /// Whether visible masks are computed per key, once per KV tile, and stored in scratch.
    pub(crate) per_key_mask: bool,
    /// Multiplies bf16 tiles without widening, if the call and the machine support it.
    pub(crate) bf16_mma: Option<Bf16Mma>,
    pub(crate) o: SharedRows<'a>,
    pub(crate) lse: Option<Shared<'a, f32>>,
    /// `[partial_rows, head_dim_vo]`
    pub(crate) partial_o: Shared<'a, f32>,
    /// `[partial_rows, 2]`: the maximum base-2 logit, and the sum of weights relative to it. An LSE in their place would round
    /// the weight of a state when logits are large.
    pub(crate) partial_stats: Shared<'a, f32>,
}

/// Offsets of the parts of a worker's scratch, in f32 elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScratchLayout {
    /// Row stride of O and V: head_dim_vo rounded up.
    pub(super) vo: usize,
    pub(super) o: usize,
    /// Logits of a strip of rows.
    pub(super) logits: usize,
    /// bf16 weights of a strip, two per element.
    pub(super) weights: usize,
    /// O of a partial strip.
    pub(super) strip: usize,
    pub(super) keys: usize,
    pub(super) values: usize,
    pub(super) max: usize,
    pub(super) sums: usize,
    /// Visible mask of each row for the KV tile: 64 bits in two elements.
    pub(super) visible: usize,
    /// Scales of K, then of V, for each key of the KV tile.
    pub(super) scales: usize,
    /// Total elements.
    pub(crate) len: usize,
}

impl ScratchLayout {
    /// Layout for items of at most `rows` rows.
    pub(crate) fn new(rows: usize, dim: HeadDim) -> Self {
        let HeadDim { qk, vo } = dim;
        let vo_padded = vo.next_multiple_of(ALIGN);
        // a full strip of bf16 rows is readable from any row on
        let mut len = (rows.max(bf16::STRIP / 2) * qk).next_multiple_of(ALIGN);
        let mut take = |count: usize| {
            let start = len;
            len += count.next_multiple_of(ALIGN);
            start
        };
        let o = take(rows * vo_padded);
        let logits = take(bf16::STRIP * KV_TOKENS);
        let weights = take(bf16::STRIP * KV_TOKENS / 2);
        let strip = take(bf16::STRIP * vo_padded);
        let keys = take(qk * KV_TOKENS);
        let values = take(KV_TOKENS * vo_padded);
        let max = take(rows);
        let sums = take(rows * ALIGN);
        let visible = take(2 * rows);
        let scales = take(2 * KV_TOKENS);
        Self { vo: vo_padded, o, logits, weights, strip, keys, values, max, sums, visible, scales, len }
    }
}

/// A work item with its segment and scratch layout.
pub(super) struct ItemContext<'a> {
    pub(super) params: &'a AttentionParams<'a>,
    pub(super) item: &'a WorkItem,
    pub(super) segment: &'a Segment,
    pub(super) layout: ScratchLayout,
    /// Query rows, ordered `[KV head, token, head of the group]`.
    pub(super) rows: usize,
}

impl ItemContext<'_> {
    /// Token (of the batch) and query head of row `r`.
    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> (usize, usize) {
        let group = self.params.plan.problem.heads().group();
        let kv_head = self.item.kv_heads.start as usize + r / self.rows_per_head();
        let r = r % self.rows_per_head();
        (self.item.qo.start as usize + r / group, kv_head * group + r % group)
    }

    /// Rows of one KV head.
    #[inline(always)]
    pub(super) fn rows_per_head(&self) -> usize {
        self.item.qo.len() * self.params.plan.problem.heads().group()
    }

    /// The bf16 multiplier, unless the item has few rows: decoding is memory-bound and widens each value once.
    #[inline(always)]
    pub(super) fn bf16_mma<S: Simd>(&self) -> Option<Bf16Mma> {
        self.params.bf16_mma.filter(|_| self.rows_per_head() > S::TILE_ROWS)
    }

    /// Whether each value is read once: the rows of a KV head are one strip, values are whole registers and no hook changes
    /// them.
    #[inline(always)]
    pub(super) fn reads_values_once<S: Simd>(&self) -> bool {
        self.rows_per_head() <= S::TILE_ROWS
            && self.params.plan.problem.head_dim().vo.is_multiple_of(S::LANES)
            && !self.params.hooks.value
    }

    /// The factor from softmax inputs to base-2 logits. A logits hook has already applied the problem's scale.
    #[inline(always)]
    pub(super) fn scale(&self) -> f32 {
        let scale = if self.params.hooks.logits { 1.0 } else { self.params.inputs.problem.scale() };
        scale * std::f32::consts::LOG2_E
    }

    /// Coordinates of row `r` for hooks.
    #[inline(always)]
    pub(super) fn row_at(&self, r: usize) -> QueryRow {
        let (token, head) = self.row(r);
        let row = self.params.plan.requests.row(self.segment, token);
        QueryRow {
            request: row.request,
            qo: row.position,
            qo_head: head as u32,
            kv_head: (head / self.params.plan.problem.heads().group()) as u32,
        }
    }

    /// Bitmask of the keys of a tile that the problem's mask shows to row `r`.
    #[inline(always)]
    pub(super) fn visible(&self, r: usize, tile: Range<usize>) -> u64 {
        let plan = self.params.plan;
        plan.requests.visible_bits(self.params.inputs.problem.mask(), self.segment, self.row(r).0, tile)
    }

    /// Positions of the keys of the KV tile at `start`. NaN after its `tokens`, so that hooks store nothing there.
    pub(super) fn key_positions(&self, start: usize, tokens: usize) -> [f32; KV_TOKENS] {
        let requests = &self.params.plan.requests;
        let known = |at| requests.key_position(self.segment, start + at) as f32;
        let position = |at| if at < tokens { known(at) } else { f32::NAN };
        std::array::from_fn(position)
    }

    /// K and V, offset to KV head `head` of the item.
    #[inline(always)]
    pub(super) fn heads_from(&self, head: usize) -> (Data<'_>, Data<'_>) {
        let head = self.item.kv_heads.start as usize + head;
        let Inputs { k, v, .. } = self.params.inputs;
        (k.view.data().skip(head * k.strides.head), v.view.data().skip(head * v.strides.head))
    }

    /// Location of the keys in `start..end` that fall in the KV tile at `start`, for KV head 0.
    #[inline(always)]
    pub(super) fn locate(&self, start: usize, end: usize) -> KvLocation {
        let tokens = KV_TOKENS.min(end.saturating_sub(start));
        let none = [0; KV_TOKENS];
        let mut location = KvLocation { k: none, v: none, pe: none, page: [0; KV_TOKENS], tokens };
        let Inputs { k, v, k_pe, .. } = *self.params.inputs;
        let mut put = |token: usize, page: usize, slot: usize| {
            let offset = |KvTensor { strides, .. }: KvTensor<'_>| page * strides.page + slot * strides.token;
            (location.k[token], location.v[token]) = (offset(k), offset(v));
            if let Some(pe) = k_pe {
                location.pe[token] = offset(pe);
            }
            location.page[token] = page as u32;
        };
        match &self.params.plan.requests.source {
            KvSource::Paged { indices, page_size, .. } => {
                let (mut entry, mut slot) = (self.segment.kv_start + start / page_size, start % page_size);
                for token in 0..tokens {
                    put(token, indices[entry] as usize, slot);
                    slot += 1;
                    if slot == *page_size {
                        (entry, slot) = (entry + 1, 0);
                    }
                }
            }
            KvSource::Ragged { .. } => {
                (0..tokens).for_each(|token| put(token, 0, self.segment.kv_start + start + token));
            }
            KvSource::Blocks { .. } => {
                let requests = &self.params.plan.requests;
                (0..tokens)
                    .for_each(|token| put(token, 0, requests.key_position(self.segment, start + token)));
            }
        }
        location
    }
}

/// Offsets of a KV tile's rows in K and V.
pub(super) struct KvLocation {
    /// Offsets for KV head 0.
    pub(super) k: [usize; KV_TOKENS],
    pub(super) v: [usize; KV_TOKENS],
    /// Offsets of the second part of keys stored in two tensors.
    pub(super) pe: [usize; KV_TOKENS],
    /// Pages of a paged cache.
    pub(super) page: [u32; KV_TOKENS],
    pub(super) tokens: usize,
}
