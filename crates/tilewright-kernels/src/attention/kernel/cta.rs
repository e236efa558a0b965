//! State shared by all threads of a CTA, and the loop over its work items.

use super::{
    CtaLayout, QueryHead, RowHooks, SWIZZLE_ALIGN, ThreadGroup,
    merge::{
        arrival,
        pair::{self, PairPart},
        partial_states,
    },
    page_scales,
};
use crate::{
    attention::{AttentionParamRegs, KvLayout, Wait, WorkItem, WorkItemRegs, params::KernelKind},
    tile::{halves::halves, number::narrow},
};
use std::f32::consts::LOG2_E;
use tilewright::{Dtype, attention::variant::Hook};
use tilewright_ptx::{Builder, Elements, Shared, Value, Var, isa::types::Scalar};

/// Offset of the word of completed merges.
const COMPLETED_OFFSET: usize = 112;
/// Offset of the item in the control words, in bytes.
const ITEM_OFFSET: usize = 128;
/// Offset of the next item in the control words, in bytes.
const NEXT_ITEM_OFFSET: usize = ITEM_OFFSET + WorkItem::BYTES;
/// Offset of the item index, the end of this CTA's items, and the first row of the current tile.
const CURSOR_OFFSET: usize = 116;

/// Parameters, layout and shared memory of a CTA.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MmaCta<'k> {
    pub(crate) k: &'k Builder,
    pub(crate) layout: CtaLayout,
    pub(crate) elements: Elements,
    /// Threads per CTA.
    pub(crate) threads: usize,
    pub(crate) params: AttentionParamRegs<'k>,
    /// The dtype of queries.
    pub(crate) q: Dtype,
    /// The dtype of the cache.
    pub(crate) kv: Dtype,
    /// The dtype of outputs: that of products, or e4m3.
    pub(crate) out: Dtype,
    pub(crate) arch: u32,
    /// The named barrier of [`MmaCta::sync`], if not all threads of the CTA take part.
    pub(crate) barrier: Option<u32>,
    /// CTAs that share an item, each with rows of its own.
    pub(crate) ctas_per_item: u32,
    arena: Shared<'k, u32>,
}

/// The current work item. It is kept in shared memory, and fields that the innermost loop does not use are reloaded at their
/// point of use to reduce register pressure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CurrentItem<'k> {
    pub(crate) cta: MmaCta<'k>,
    words: Shared<'k, u32>,
    /// One past the last key; the innermost loop uses it.
    pub(crate) kv_end: Value<'k, u32>,
    /// The factor from `Q · Kᵀ`, or from the results of the logits hook, to base-2 logits.
    pub(crate) scale: Value<'k, f32>,
    /// The factor from `Q · Kᵀ` to the arguments of the logits hook.
    pub(crate) product_scale: Value<'k, f32>,
    /// The item after it, in kernels that load it ahead.
    next: Option<NextItem<'k>>,
}

/// The item after the current one.
#[derive(Debug, Clone, Copy)]
struct NextItem<'k> {
    /// Its words, then 1 if it exists, otherwise 0.
    words: Shared<'k, u32>,
    loaded: LoadedItem<'k>,
    /// The numbers of the merges of the current item.
    merges: Var<'k, u32>,
}

/// An item in registers: thread `i` has word `i`; the next thread has 1 if it exists.
#[derive(Debug, Clone, Copy)]
struct LoadedItem<'k>(Var<'k, u32>);

impl<'k> LoadedItem<'k> {
    fn store(self, k: &'k Builder, to: Shared<'k, u32>) {
        k.when(k.thread().le(WorkItem::WORDS as u32), || to.at(k.thread()).store(self.0.get()));
    }
}

impl<'k> MmaCta<'k> {
    /// Declares the parameters of a kernel of this kind and shared memory.
    pub(crate) fn new(
        k: &'k Builder,
        arch: u32,
        [q, o, kv, out]: [Dtype; 4],
        kind: KernelKind,
        layout: CtaLayout,
    ) -> Self {
        let elements = if o == Dtype::F16 { Elements::F16 } else { Elements::Bf16 };
        let params = AttentionParamRegs::declare(k, kind);
        let align = if layout.k.box_rows.is_some() { SWIZZLE_ALIGN } else { 128 };
        let arena = k.shared("arena", layout.bytes / 4, align);
        Self {
            k,
            layout,
            elements,
            threads: k.threads_per_cta() as usize,
            params,
            q,
            kv,
            out,
            arch,
            barrier: None,
            ctas_per_item: 1,
            arena,
        }
    }

    /// The CTA without threads from `threads` on, which do other work; named barrier `barrier` is for [`MmaCta::sync`].
    pub(crate) fn with_threads(self, threads: u32, barrier: u32) -> Self {
        Self { threads: threads as usize, barrier: Some(barrier), ..self }
    }

    /// The CTA if `count` CTAs share each item: a source of a merge is complete when all of them have arrived.
    pub(crate) fn with_ctas_per_item(self, count: u32) -> Self {
        Self { ctas_per_item: count, ..self }
    }

    /// The CTA with another dtype of products and outputs.
    pub(crate) fn with_elements(self, elements: Elements) -> Self {
        Self { elements, ..self }
    }

    /// Widens four elements of 8 bits to two words of the dtype of products.
    pub(crate) fn halves(&self, from: Dtype, word: Value<'k, u32>) -> [Value<'k, u32>; 2] {
        let to = if self.elements == Elements::F16 { Dtype::F16 } else { Dtype::Bf16 };
        halves(from, to, self.arch, word)
    }

    /// The CTA's threads that process items.
    #[track_caller]
    pub(crate) fn thread_group(&self) -> ThreadGroup<'k> {
        ThreadGroup { index: self.k.thread(), count: self.threads }
    }

    /// Barrier of the CTA's threads that process items.
    #[track_caller]
    pub(crate) fn sync(&self) {
        match self.barrier {
            None => self.k.sync_threads(),
            Some(barrier) => self.k.sync_named(barrier, self.threads as u32),
        }
    }

    /// Executes the items of this CTA, each with `body`, which calls [`CurrentItem::store_next`] and then
    /// [`fetch_merges`](Self::fetch_merges) after its first copies. The first item, which no kernel writes, is loaded before the
    /// previous kernel has completed.
    ///
    /// The last item comes first, then the others in order. Balanced plans cut units between CTAs, so that the first and the last
    /// item of a CTA are pieces and need a merge: it overlaps with the uncut items that follow.
    pub(crate) fn run(&self, hooks: &RowHooks<'k, '_>, body: impl FnOnce(&CurrentItem<'k>)) {
        let (k, indptr) = (self.k, self.params.plan.worker_indptr.at(self.k.cta()));
        let words = self.at(self.layout.control + ITEM_OFFSET);
        let next_words = self.at(self.layout.control + NEXT_ITEM_OFFSET);
        let scale = k.var("scale_of_item", 0.0);
        let [at, end] = [0, 1].map(|word| self.at::<u32>(self.layout.control + CURSOR_OFFSET).plus(word));
        let (first, last) = (indptr.load(), indptr.plus(1).load());
        self.load_item(last - 1, first.lt(last)).store(k, words);
        k.when(k.thread().eq(0), || {
            at.store(first);
            end.store(last);
        });
        // programmatic dependent launch: wait for the writes of the previous kernel
        match self.params.own.wait {
            Some(wait) => {
                k.when(wait.eq(Wait::AtStart as u32), || k.wait_for_prerequisites());
                // the next kernel takes the SMs that have no items
                k.when(wait.eq(Wait::AtEnd as u32), || k.launch_dependents());
            }
            None => k.wait_for_prerequisites(),
        }
        k.sync_threads();
        k.loop_(|| {
            let index = at.load();
            k.break_if(index.ge(end.load()));
            let current = CurrentItem::new(self, hooks, words, scale);
            // the number of items begun is one more than `index - first`, and the last one was begun first
            let loaded = self.load_item(index, (index + 1).lt(end.load()));
            let merges = current.load_merges();
            let next = NextItem { words: next_words, loaded, merges };
            let current = CurrentItem { next: Some(next), ..current };
            body(&current);
            // other kernels would compete for the SMs earlier: products prefetch their weights
            // loaded again, because `index` would occupy a register in `body`
            k.when((at.load() + 1).ge(end.load()), || k.launch_dependents());
            self.arrive_and_merge(&current, hooks);
            // the next item reuses the shared memory
            k.sync_threads();
            k.when(k.thread().lt(32), || {
                k.when(k.thread().lt(WorkItem::WORDS as u32), || {
                    words.at(k.thread()).store(next_words.at(k.thread()).load());
                });
                let index = at.load() + 1;
                k.sync_warp();
                k.when(k.thread().eq(0), || at.store(index));
            });
            k.sync_threads();
        });
        if let Some(wait) = self.params.own.wait {
            // the next kernel waits for this one alone
            k.when(wait.ne(Wait::AtStart as u32) & k.cta().eq(0), || k.wait_for_prerequisites());
        }
    }

    /// Loads an item, if it exists.
    fn load_item(&self, index: Value<'k, u32>, exists: Value<'k, bool>) -> LoadedItem<'k> {
        let (k, thread) = (self.k, self.k.thread());
        let word = k.var("item_word", exists.select::<u32>(1, 0));
        let item = self.params.plan.items.at_wide(index.to_u64() * WorkItem::WORDS as u64);
        k.when(exists & thread.lt(WorkItem::WORDS as u32), || word.set(item.at(thread).load()));
        LoadedItem(word)
    }

    /// Fetches the records of merges for [`arrive_and_merge`](Self::arrive_and_merge).
    pub(crate) fn fetch_merges(&self, current: &CurrentItem<'k>) {
        match current.next {
            Some(next) => arrival::fetch_records(self, next.merges),
            None => arrival::fetch_records(self, current.load_merges()),
        }
    }

    /// Arrives at the merges that depend on an item, and performs those that it completes.
    pub(crate) fn arrive_and_merge(&self, current: &CurrentItem<'k>, hooks: &RowHooks<'k, '_>) {
        arrival::arrive_and_merge(
            self,
            || current.load(),
            self.completed_word(),
            |merge, source| partial_states::merge(self, hooks, merge, source),
        );
    }

    /// Claims the merge of an item, if it is that of a pair; then [`arrive_and_merge`](Self::arrive_and_merge) is not called.
    pub(crate) fn claim_pair(&self, item: &WorkItemRegs<'k>) -> PairPart<'k> {
        pair::claim(self, item, self.completed_word())
    }

    #[track_caller]
    fn completed_word(&self) -> Shared<'k, u32> {
        self.at(self.layout.control + COMPLETED_OFFSET)
    }

    /// Shared memory at a byte offset of the layout.
    #[track_caller]
    pub(crate) fn at<T: Scalar>(&self, byte: usize) -> Shared<'k, T> {
        self.arena.plus(byte / 4).cast()
    }

    /// Rounds two numbers to the dtype of queries and packs them.
    #[track_caller]
    pub(crate) fn round_pair(&self, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u32> {
        match self.elements {
            Elements::F16 => self.k.f16x2(low, high).reinterpret(),
            _ => self.k.bf16x2(low, high).reinterpret(),
        }
    }

    /// Whether outputs have 8 bits.
    pub(crate) fn has_fp8_outputs(&self) -> bool {
        self.out.size() == 1
    }

    /// Rounds two numbers to e4m3 and packs them; those out of range become the largest.
    #[track_caller]
    pub(crate) fn round_to_e4m3(&self, low: Value<'k, f32>, high: Value<'k, f32>) -> Value<'k, u16> {
        // architectures before sm_89 have no conversion instruction
        match self.arch >= 89 {
            true => self.k.e4m3x2(low, high).reinterpret(),
            false => narrow(Dtype::E4m3, &[low, high]).low(),
        }
    }

    /// The token and query head of row `row` of an item.
    #[track_caller]
    pub(crate) fn query_head(&self, item: &WorkItemRegs<'k>, row: Value<'k, u32>) -> QueryHead<'k> {
        QueryHead::of_row(&self.params, item.qo_begin, item.kv_head, row)
    }

    /// Whether key positions may have gaps (block-sparse).
    #[track_caller]
    pub(crate) fn is_blocks(&self) -> Value<'k, bool> {
        self.params.has_layout(KvLayout::Blocks)
    }

    /// New accumulators, all 0.
    #[track_caller]
    pub(crate) fn zeros(&self, name: &str, count: usize) -> Vec<[Var<'k, f32>; 4]> {
        (0..count).map(|_| std::array::from_fn(|_| self.k.var(name, 0.0))).collect()
    }
}

impl<'k> CurrentItem<'k> {
    /// The item whose words are at `words`. `scale` keeps a scale during the item.
    pub(crate) fn new(
        cta: &MmaCta<'k>,
        hooks: &RowHooks<'k, '_>,
        words: Shared<'k, u32>,
        scale: Var<'k, f32>,
    ) -> Self {
        let (k, params) = (cta.k, &cta.params);
        let head = words.plus(2).load();
        let k_scale = page_scales::item_scale(cta, params.k_scale, head);
        let has_logits_hook = hooks.is_live(Hook::Logits);
        let to_logits = if has_logits_hook { params.scale } else { params.scale * LOG2_E };
        scale.set(to_logits * k_scale);
        let product_scale = scale.get();
        let scale = if has_logits_hook { k.constant(LOG2_E) } else { product_scale };
        let kv_end = WorkItemRegs::load_shared(k, words).kv_end;
        Self { cta: *cta, words, kv_end, scale, product_scale, next: None }
    }

    /// Loads the numbers of the merges that depend on the item.
    fn load_merges(&self) -> Var<'k, u32> {
        let item = self.load();
        arrival::load_numbers(&self.cta, item.merge_deps_begin, item.merge_deps_end)
    }

    /// Writes the next item to shared memory; valid after a barrier.
    pub(crate) fn store_next(&self) {
        if let Some(next) = self.next {
            next.loaded.store(self.cta.k, next.words);
        }
    }

    /// The words of the next item.
    pub(crate) fn next_words(&self) -> Shared<'k, u32> {
        self.words.plus(WorkItem::WORDS)
    }

    /// Whether there is a next item, after [`store_next`](Self::store_next) and a barrier.
    pub(crate) fn has_next(&self) -> Value<'k, bool> {
        self.next_words().plus(WorkItem::WORDS).load().ne(0)
    }

    /// Loads the item from shared memory.
    #[track_caller]
    pub(crate) fn load(&self) -> WorkItemRegs<'k> {
        WorkItemRegs::load_shared(self.cta.k, self.words)
    }

    /// The first row of the current tile, in shared memory.
    pub(crate) fn first_row(&self) -> Shared<'k, u32> {
        self.cta.at::<u32>(self.cta.layout.control + CURSOR_OFFSET).plus(2)
    }

    /// Calls `tile` with the first key of each KV tile of `keys` keys.
    pub(crate) fn for_each_tile(&self, keys: usize, tile: impl FnOnce(Value<'k, u32>)) {
        let k = self.cta.k;
        let next = k.var("first_key", self.load().kv_begin);
        k.loop_(|| {
            let first = next.get();
            k.break_if(first.ge(self.kv_end));
            tile(first);
            next.set(next.get() + keys as u32);
        });
    }

    /// Query rows: tokens times heads of the group; the heads of a token are adjacent.
    #[track_caller]
    pub(crate) fn rows(&self) -> Value<'k, u32> {
        self.load().qo_len * self.cta.params.group.by
    }
}
