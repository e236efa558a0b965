//! Where things are: the arguments of one attention call, the parts of a worker's scratch, the rows of an item and
//! the places of their keys.

use super::{
    Simd,
    shared::{Shared, SharedRows},
};
use crate::{
    View,
    attention::{KvSource, Plan, Request, WorkItem},
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
    pub(crate) q: View<'a>,
    pub(crate) k: (View<'a>, KvStrides),
    pub(crate) v: (View<'a>, KvStrides),
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
    pub(super) logits: usize,
    pub(super) keys: usize,
    pub(super) values: usize,
    pub(super) max: usize,
    pub(super) sums: usize,
    /// Elements in all.
    pub(crate) len: usize,
}

impl Layout {
    /// For tiles of `rows` rows.
    pub(crate) fn new(rows: usize, (qk, vo): (usize, usize)) -> Self {
        let vo_padded = vo.next_multiple_of(ALIGN);
        let mut len = (rows * qk).next_multiple_of(ALIGN);
        let mut take = |count: usize| {
            let start = len;
            len += count.next_multiple_of(ALIGN);
            start
        };
        let o = take(rows * vo_padded);
        let logits = take(6 * KV_TOKENS);
        let keys = take(qk * KV_TOKENS);
        let values = take(KV_TOKENS * vo_padded);
        let max = take(rows);
        let sums = take(rows * ALIGN);
        Self { vo: vo_padded, o, logits, keys, values, max, sums, len }
    }
}

/// Which rows a tile has, and where its keys are.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) item: &'a WorkItem,
    pub(super) request: &'a Request,
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

    /// Whether a KV head's rows are one strip, and its values whole registers: then nobody reads them a second time.
    #[inline(always)]
    pub(super) fn reads_values_once<S: Simd>(&self) -> bool {
        self.rows_per_head() <= S::TILE_ROWS && self.call.plan.problem.head_dim().vo.is_multiple_of(S::LANES)
    }

    /// The factor from `q · k` to logits in base 2.
    #[inline(always)]
    pub(super) fn scale(&self) -> f32 {
        self.call.plan.problem.scale() * std::f32::consts::LOG2_E
    }

    /// How many of `tokens` keys from `start` on row `r` sees.
    #[inline(always)]
    pub(super) fn visible(&self, r: usize, start: usize, tokens: usize) -> usize {
        let seen = self.request.visible(&self.call.plan.problem, self.row(r).0);
        seen.saturating_sub(start).min(tokens)
    }

    /// K and V from the item's KV head `head` on.
    #[inline(always)]
    pub(super) fn heads_from(&self, head: usize) -> (Data<'_>, Data<'_>) {
        let head = self.item.kv_heads.start as usize + head;
        let ((k, k_strides), (v, v_strides)) = (self.call.k, self.call.v);
        (k.data().skip(head * k_strides.head), v.data().skip(head * v_strides.head))
    }

    /// Where the keys and values of the KV tile at `start` are, of KV head 0; none from `end` on.
    #[inline(always)]
    pub(super) fn locate(&self, start: usize, end: usize) -> Located {
        let tokens = KV_TOKENS.min(end.saturating_sub(start));
        let mut located = Located { k: [0; KV_TOKENS], v: [0; KV_TOKENS], tokens };
        let ((_, k), (_, v)) = (self.call.k, self.call.v);
        let offset =
            |strides: KvStrides, page: usize, slot: usize| page * strides.page + slot * strides.token;
        match &self.call.plan.requests.source {
            KvSource::Paged { indices, page_size, .. } => {
                let (mut entry, mut slot) = (self.request.kv_start + start / page_size, start % page_size);
                for token in 0..tokens {
                    let page = indices[entry] as usize;
                    (located.k[token], located.v[token]) = (offset(k, page, slot), offset(v, page, slot));
                    slot += 1;
                    if slot == *page_size {
                        (entry, slot) = (entry + 1, 0);
                    }
                }
            }
            KvSource::Ragged { .. } => {
                for token in 0..tokens {
                    let at = self.request.kv_start + start + token;
                    (located.k[token], located.v[token]) = (offset(k, 0, at), offset(v, 0, at));
                }
            }
        }
        located
    }
}

/// Offsets of a KV tile's rows in K and V, of KV head 0.
pub(super) struct Located {
    pub(super) k: [usize; KV_TOKENS],
    pub(super) v: [usize; KV_TOKENS],
    pub(super) tokens: usize,
}
