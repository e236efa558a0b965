//! Where things are: the arguments of one attention call, the parts of a worker's scratch, the rows of an item and
//! the places of their keys.

use super::{
    Simd,
    dots::{self, Dots},
    hooks::{Live, RowAt},
    shared::{Shared, SharedRows},
};
use crate::{
    attention::{Inputs, KvSource, Plan, Segment, WorkItem},
    cpu::Isa,
    kv::layout::KvStrides,
    tensor::Data,
};

/// Keys of one KV tile.
pub(crate) const KV_TOKENS: usize = 64;
/// Parts and row strides of scratch are multiples of the widest register, which is a cache line.
pub(crate) const ALIGN: usize = 16;

/// One attention call, as all workers see it.
pub(crate) struct Call<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) inputs: &'a Inputs<'a>,
    /// For the hooks of the variant.
    pub(crate) isa: Isa,
    /// Which of them do anything.
    pub(crate) live: Live,
    /// Whether what a row sees has to be asked for key by key, and is kept for all rows of a tile.
    pub(crate) by_key: bool,
    /// What multiplies tiles of bf16 that nobody has to widen.
    pub(crate) dots: Option<Dots>,
    pub(crate) o: SharedRows<'a>,
    pub(crate) lse: Option<Shared<'a, f32>>,
    /// `[partial_rows, head_dim_vo]`
    pub(crate) partial_o: Shared<'a, f32>,
    /// `[partial_rows]`
    pub(crate) partial_lse: Shared<'a, f32>,
}

/// Where each part of a worker's scratch begins, in f32 elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Row stride of O and V: head_dim_vo rounded up.
    pub(super) vo: usize,
    pub(super) o: usize,
    /// Of a strip of rows.
    pub(super) logits: usize,
    /// Weights of a strip in bf16, two in an element.
    pub(super) weights: usize,
    /// O of a strip that is not whole.
    pub(super) strip: usize,
    pub(super) keys: usize,
    pub(super) values: usize,
    pub(super) max: usize,
    pub(super) sums: usize,
    /// For each row, 64 bits in two elements: which keys of the KV tile it sees.
    pub(super) seen: usize,
    /// For each key of the KV tile, the scales of K and of V.
    pub(super) scales: usize,
    /// Elements in all.
    pub(crate) len: usize,
}

impl Layout {
    /// For tiles of `rows` rows.
    pub(crate) fn new(rows: usize, (qk, vo): (usize, usize)) -> Self {
        let vo_padded = vo.next_multiple_of(ALIGN);
        // a whole strip of bf16 rows can be read from any row on
        let mut len = (rows.max(dots::STRIP / 2) * qk).next_multiple_of(ALIGN);
        let mut take = |count: usize| {
            let start = len;
            len += count.next_multiple_of(ALIGN);
            start
        };
        let o = take(rows * vo_padded);
        let logits = take(dots::STRIP * KV_TOKENS);
        let weights = take(dots::STRIP * KV_TOKENS / 2);
        let strip = take(dots::STRIP * vo_padded);
        let keys = take(qk * KV_TOKENS);
        let values = take(KV_TOKENS * vo_padded);
        let max = take(rows);
        let sums = take(rows * ALIGN);
        let seen = take(2 * rows);
        let scales = take(2 * KV_TOKENS);
        Self { vo: vo_padded, o, logits, weights, strip, keys, values, max, sums, seen, scales, len }
    }
}

/// Which rows a tile has, and where its keys are.
pub(super) struct Place<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) item: &'a WorkItem,
    pub(super) segment: &'a Segment,
    pub(super) layout: Layout,
    /// Query rows, ordered `[KV head, token, head of the group]`.
    pub(super) rows: usize,
}

impl Place<'_> {
    /// Token (of the batch) and query head of row `r`.
    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> (usize, usize) {
        let group = self.call.plan.problem.heads().group();
        let kv_head = self.item.kv_heads.start as usize + r / self.rows_per_head();
        let r = r % self.rows_per_head();
        (self.item.qo.start as usize + r / group, kv_head * group + r % group)
    }

    /// Rows of one KV head.
    #[inline(always)]
    pub(super) fn rows_per_head(&self) -> usize {
        self.item.qo.len() * self.call.plan.problem.heads().group()
    }

    /// What multiplies the item's tiles as they are: not worth its while for the few rows of a decode step, which wait for
    /// memory, and read what they have to widen only once.
    #[inline(always)]
    pub(super) fn dots<S: Simd>(&self) -> Option<Dots> {
        self.call.dots.filter(|_| self.rows_per_head() > S::TILE_ROWS)
    }

    /// Whether a KV head's rows are one strip, its values whole registers and no hook changes them: then nobody reads them
    /// a second time.
    #[inline(always)]
    pub(super) fn reads_values_once<S: Simd>(&self) -> bool {
        self.rows_per_head() <= S::TILE_ROWS
            && self.call.plan.problem.head_dim().vo.is_multiple_of(S::LANES)
            && !self.call.live.value
    }

    /// The factor from what the softmax gets to logits in base 2: a logits hook has applied the problem's scale.
    #[inline(always)]
    pub(super) fn scale(&self) -> f32 {
        let scale = if self.call.live.logits { 1.0 } else { self.call.plan.problem.scale() };
        scale * std::f32::consts::LOG2_E
    }

    /// What a variant's hooks know of row `r`.
    #[inline(always)]
    pub(super) fn row_at(&self, r: usize) -> RowAt {
        let (token, head) = self.row(r);
        let row = self.call.plan.requests.row(self.segment, token);
        RowAt {
            request: row.request,
            qo: row.position,
            qo_head: head as u32,
            kv_head: (head / self.call.plan.problem.heads().group()) as u32,
        }
    }

    /// Which of `tokens` keys from `start` on row `r` sees, as bits, before the variant's mask.
    #[inline(always)]
    pub(super) fn seen(&self, r: usize, (start, tokens): (usize, usize)) -> u64 {
        let plan = self.call.plan;
        plan.requests.visible_bits(plan.problem.mask(), self.segment, self.row(r).0, (start, tokens))
    }

    /// The positions of the keys of the KV tile at `start`; NaN beyond its `tokens`, where nothing may be stored.
    pub(super) fn key_positions(&self, start: usize, tokens: usize) -> [f32; KV_TOKENS] {
        let requests = &self.call.plan.requests;
        let known = |at| requests.key_position(self.segment, start + at) as f32;
        let position = |at| if at < tokens { known(at) } else { f32::NAN };
        std::array::from_fn(position)
    }

    /// K and V from the item's KV head `head` on.
    #[inline(always)]
    pub(super) fn heads_from(&self, head: usize) -> (Data<'_>, Data<'_>) {
        let head = self.item.kv_heads.start as usize + head;
        let ((k, k_strides), (v, v_strides)) = (self.call.inputs.k, self.call.inputs.v);
        (k.data().skip(head * k_strides.head), v.data().skip(head * v_strides.head))
    }

    /// Where the keys and values of the KV tile at `start` are, of KV head 0; none from `end` on.
    #[inline(always)]
    pub(super) fn locate(&self, start: usize, end: usize) -> Located {
        let tokens = KV_TOKENS.min(end.saturating_sub(start));
        let none = [0; KV_TOKENS];
        let mut located = Located { k: none, v: none, pe: none, page: [0; KV_TOKENS], tokens };
        let (k, v, pe) = (self.call.inputs.k.1, self.call.inputs.v.1, self.call.inputs.k_pe.map(|pe| pe.1));
        let mut put = |token: usize, page: usize, slot: usize| {
            let offset = |strides: KvStrides| page * strides.page + slot * strides.token;
            (located.k[token], located.v[token]) = (offset(k), offset(v));
            if let Some(pe) = pe {
                located.pe[token] = offset(pe);
            }
            located.page[token] = page as u32;
        };
        match &self.call.plan.requests.source {
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
                let requests = &self.call.plan.requests;
                (0..tokens)
                    .for_each(|token| put(token, 0, requests.key_position(self.segment, start + token)));
            }
        }
        located
    }
}

/// A KV tile's rows in K and V.
pub(super) struct Located {
    /// Offsets, of KV head 0.
    pub(super) k: [usize; KV_TOKENS],
    pub(super) v: [usize; KV_TOKENS],
    /// Offsets of the second part of keys that come in two tensors.
    pub(super) pe: [usize; KV_TOKENS],
    /// Pages of a paged cache.
    pub(super) page: [u32; KV_TOKENS],
    pub(super) tokens: usize,
}
