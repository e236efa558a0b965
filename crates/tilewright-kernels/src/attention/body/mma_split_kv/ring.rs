//! The ring of a warp, which is filled across work items: stages of the next item are copied while this one is processed.

use super::boxes::StageBoxes;
use crate::attention::{
    body::{MAX_SPLIT_KV_ROWS, mma::layout::SplitKvLayout},
    items::WorkItemRegs,
    kernel::{CurrentItem, KvSource, MmaCta, PendingStage, StageLookup},
};
use tilewright_ptx::{CachePolicy, Eviction, Value, Var};

/// Positions of a warp in its ring, which outlive an item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingCursors<'k> {
    /// Whether keys of the next item are looked up.
    is_next: Var<'k, u32>,
    /// Start, end and head of the [`KvSource`] of the keys that are looked up next.
    from: [Var<'k, u32>; 3],
    /// The first key of the next stage to look up.
    pub(super) first_key: Var<'k, u32>,
    /// The next stage to copy, which is looked up.
    pub(super) pending: PendingStage<'k>,
    /// Byte offsets of the next unit to read and the next unit to write.
    pub(super) read: Var<'k, u32>,
    pub(super) write: Var<'k, u32>,
    /// The L2 cache policy of keys and values, which are read once.
    pub(super) policy: CachePolicy<'k>,
    /// The loads of units by TMA; `None` if they are copied by `cp.async`.
    pub(super) boxes: Option<StageBoxes<'k>>,
}

impl<'k> RingCursors<'k> {
    /// At the start of an empty ring.
    pub(crate) fn new(cta: &MmaCta<'k>, layout: &SplitKvLayout, boxes: Option<StageBoxes<'k>>) -> Self {
        let k = cta.k;
        let var = |name| k.var(name, 0);
        Self {
            is_next: var("fills_next"),
            from: ["fill_start", "fill_end", "fill_head"].map(var),
            first_key: var("fill_key"),
            pending: PendingStage::new(k, layout.stage_keys, cta.layout.stored_k),
            read: var("reads"),
            write: var("fills"),
            policy: k.cache_policy(Eviction::First),
            boxes,
        }
    }

    /// Makes the ring empty, after another body has used its memory.
    pub(crate) fn reset(&self) {
        let others = [self.is_next, self.first_key, self.read, self.write];
        others.iter().chain(&self.from).for_each(|var| var.set(0));
        self.pending.clear();
    }

    /// Begins an item, of whose stages the last item may have copied some. Returns the first key that is not copied.
    pub(super) fn begin(
        &self,
        item: &WorkItemRegs<'k>,
        first_key: Value<'k, u32>,
        stride: u32,
    ) -> Value<'k, u32> {
        let has_begun = self.is_next.get().ne(0);
        let copied = self.first_key.get() - stride;
        self.set_source(KvSource::from(item));
        self.is_next.set(0);
        copied.unless(!has_begun, first_key)
    }

    fn set_source(&self, from: KvSource<'k>) {
        self.from.iter().zip([from.start, from.end, from.head]).for_each(|(var, value)| var.set(value));
    }

    /// The source of the keys that are looked up next.
    fn source(&self) -> KvSource<'k> {
        let [start, end, head] = self.from.map(|var| var.get());
        KvSource { start, end, head }
    }

    /// Looks up the next stage, which is the first one of the next item after the last one of an item. Items of more rows than free
    /// units store end with an empty ring.
    pub(super) fn look_up(
        &self,
        layout: &SplitKvLayout,
        current: &CurrentItem<'k>,
        warp: Value<'k, u32>,
        lookup: &StageLookup<'k>,
    ) {
        let (cta, in_group) = (&current.cta, warp * layout.stage_keys as u32);
        let is_last = self.first_key.get().ge(self.source().end) & self.is_next.get().eq(0);
        cta.k.when(is_last, || {
            let next = WorkItemRegs::load_shared(cta.k, current.next_words());
            let few_rows = (next.qo_len * cta.params.group.by).le(layout.rows() as u32);
            let fits = match layout.rows_in_free_units() {
                MAX_SPLIT_KV_ROWS.. => few_rows,
                most => few_rows & current.rows().le(most as u32),
            };
            cta.k.when(fits & current.has_next(), || {
                self.is_next.set(1);
                self.set_source(KvSource::from(&next));
                self.first_key.set(next.kv_begin + in_group);
                self.pending.restart();
            });
        });
        lookup.request(self.source(), self.first_key.get(), self.pending);
        self.first_key.set(self.first_key.get() + layout.stride());
    }
}
