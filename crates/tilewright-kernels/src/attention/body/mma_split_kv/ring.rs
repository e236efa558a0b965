//! The ring of a warp, which is filled across work items: stages of the next item are copied while this one is processed.

use crate::attention::{
    body::MAX_SPLIT_KV_ROWS,
    items::WorkItemRegs,
    kernel::cta::{CurrentItem, ITEM_STRIDE, MmaCta},
};
use tilewright_ptx::build::{Builder, Value, Var};

/// Positions of a warp in its ring, which outlive an item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingCursors<'k> {
    /// Byte offset from the current item to the one whose keys are copied next: that, or the item after it.
    item: Var<'k, u32>,
    /// The first key of the next stage to copy.
    pub(super) first_key: Var<'k, u32>,
    /// This lane's page of it.
    pub(super) page: Var<'k, u32>,
    /// Byte offsets of the next stage to read and the next stage to write.
    pub(super) read: Var<'k, u32>,
    pub(super) write: Var<'k, u32>,
}

impl<'k> RingCursors<'k> {
    pub(crate) fn new(k: &'k Builder) -> Self {
        let [item, first_key, page, read, write] =
            ["fill_item", "fill_key", "pending_page", "reads", "fills"].map(|name| k.var(name, 0));
        Self { item, first_key, page, read, write }
    }

    /// Makes the ring empty, after another body has used its memory.
    pub(crate) fn reset(&self) {
        [self.item, self.first_key, self.page, self.read, self.write].iter().for_each(|var| var.set(0));
    }

    /// Begins an item, of whose stages the last item may have copied some.
    pub(super) fn begin(&self, first_key: Value<'k, u32>) {
        self.first_key.set(self.item.get().eq(0).select(first_key, self.first_key.get()));
        self.item.set(0);
    }

    /// The item whose keys are copied next.
    pub(super) fn item(&self, k: &'k Builder, current: &CurrentItem<'k>) -> WorkItemRegs<'k> {
        WorkItemRegs::load_shared(k, current.words().byte(self.item.get()))
    }

    /// Goes on to the next stage, `stride` keys further, of `item`, or to the first stage of the next item. An item of more than
    /// `max_rows` rows ends with an empty ring.
    pub(super) fn advance(
        &self,
        (cta, current): (&MmaCta<'k>, &CurrentItem<'k>),
        item: &WorkItemRegs<'k>,
        (stride, in_group, max_rows): (u32, Value<'k, u32>, usize),
    ) {
        let k = cta.k;
        self.first_key.set(self.first_key.get() + stride);
        k.when(self.first_key.get().ge(item.kv_end) & self.item.get().eq(0) & current.has_next(), || {
            let next = WorkItemRegs::load_shared(k, current.words().plus(ITEM_STRIDE / 4));
            let few_rows = (next.qo_len * cta.params.group.by).le(MAX_SPLIT_KV_ROWS as u32);
            let fits = if max_rows < MAX_SPLIT_KV_ROWS {
                few_rows & current.rows().le(max_rows as u32)
            } else {
                few_rows
            };
            k.when(fits, || {
                self.item.set(ITEM_STRIDE as u32);
                self.first_key.set(next.kv_begin + in_group);
            });
        });
    }
}
