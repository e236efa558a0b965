//! The ring of a warp, which is filled across work items: stages of the next item are copied while this one is processed.

use crate::attention::{
    body::MAX_SPLIT_KV_ROWS,
    items::WorkItemRegs,
    kernel::{
        cta::{CurrentItem, MmaCta},
        page_lookup::KvSource,
    },
};
use tilewright_ptx::build::{Builder, Value, Var};

/// Positions of a warp in its ring, which outlive an item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingCursors<'k> {
    /// Whether keys of the next item are copied.
    is_next: Var<'k, u32>,
    /// Where the keys are that are copied next: start, end and head of [`KvSource`].
    from: [Var<'k, u32>; 3],
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
        let var = |name| k.var(name, 0);
        Self {
            is_next: var("fills_next"),
            from: ["fill_start", "fill_end", "fill_head"].map(var),
            first_key: var("fill_key"),
            page: var("pending_page"),
            read: var("reads"),
            write: var("fills"),
        }
    }

    /// Makes the ring empty, after another body has used its memory.
    pub(crate) fn reset(&self) {
        let others = [self.is_next, self.first_key, self.page, self.read, self.write];
        others.iter().chain(&self.from).for_each(|var| var.set(0));
    }

    /// Begins an item, of whose stages the last item may have copied some.
    pub(super) fn begin(&self, item: &WorkItemRegs<'k>, first_key: Value<'k, u32>) {
        let has_begun = self.is_next.get().ne(0);
        self.first_key.set(self.first_key.get().unless(!has_begun, first_key));
        self.set_source(KvSource::from(item));
        self.is_next.set(0);
    }

    fn set_source(&self, from: KvSource<'k>) {
        self.from.iter().zip([from.start, from.end, from.head]).for_each(|(var, value)| var.set(value));
    }

    /// Where the keys are that are copied next.
    pub(super) fn source(&self) -> KvSource<'k> {
        let [start, end, head] = self.from.map(|var| var.get());
        KvSource { start, end, head }
    }

    /// Goes on to the next stage, `stride` keys further, or to the first stage of the next item, `in_group` keys after its first.
    /// An item of more than `max_rows` rows ends with an empty ring.
    pub(super) fn advance(
        &self,
        (cta, current): (&MmaCta<'k>, &CurrentItem<'k>),
        (stride, in_group, max_rows): (u32, Value<'k, u32>, usize),
    ) {
        self.first_key.set(self.first_key.get() + stride);
        let is_last = self.first_key.get().ge(self.source().end) & self.is_next.get().eq(0);
        cta.k.when(is_last, || {
            let next = WorkItemRegs::load_shared(cta.k, current.next_words());
            let few_rows = (next.qo_len * cta.params.group.by).le(MAX_SPLIT_KV_ROWS as u32);
            let fits = if max_rows < MAX_SPLIT_KV_ROWS {
                few_rows & current.rows().le(max_rows as u32)
            } else {
                few_rows
            };
            cta.k.when(fits & current.has_next(), || {
                self.is_next.set(1);
                self.set_source(KvSource::from(&next));
                self.first_key.set(next.kv_begin + in_group);
            });
        });
    }
}
