//! Arrival at merges: the last CTA to arrive performs the merge.
//!
//! Each work item increments the arrival counters of the merges that depend on it. The CTA that completes a counter finds all
//! sources written and adds them in plan order, so the result is deterministic.
//!
//! Merge records are fetched to shared memory while the item is processed, so that an arrival is a single access to memory. The
//! sources of the first merge are loaded while the arrivals are counted.

use crate::attention::{
    items::{MergeItem, MergeItemRegs, MergeSourceRegs, NONE, WorkItemRegs},
    kernel::cta::MmaCta,
    params::AttentionParamRegs,
};
use tilewright_ptx::{
    build::{Global, Shared, Value, Var},
    isa::memory::{AtomicOp, Order, Scope},
};

/// Merges that are counted together; their records are in shared memory.
pub(crate) const RECORDS: usize = 8;
/// Words of a list of large merges before the first index.
pub(crate) const LARGE_MERGES_HEADER: usize = 2;

/// States of heads of `dim` elements that one CTA merges, if there is a kernel for larger merges: 256 KiB.
pub fn max_fused_states(dim: usize) -> usize {
    (256 << 10) / (4 * dim)
}

/// The word of a record that holds the number of its merge.
const NUMBER: usize = 7;

/// This lane's state among the 32 of a merge from `first` on; that of the last source in lanes beyond it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneSource<'k> {
    partial: Var<'k, u32>,
    qo_begin: Var<'k, u32>,
}

impl<'k> LaneSource<'k> {
    pub(crate) fn declare(cta: &MmaCta<'k>) -> Self {
        Self { partial: cta.k.var("source_partial", 0), qo_begin: cta.k.var("source_row", 0) }
    }

    /// Loads the source.
    pub(crate) fn load(self, cta: &MmaCta<'k>, merge: &MergeItemRegs<'k>, first: Value<'k, u32>) {
        let at = (first + cta.k.lane()).min(merge.source_end - 1);
        let source = MergeSourceRegs::load(cta.k, cta.params.plan.sources, at);
        self.partial.set(source.partial);
        self.qo_begin.set(source.qo_begin);
    }

    /// The partial row of a query head.
    pub(crate) fn partial_row(
        self,
        params: &AttentionParamRegs<'k>,
        token: Value<'k, u32>,
        in_group: Value<'k, u32>,
    ) -> Value<'k, u32> {
        self.partial.get() + (token - self.qo_begin.get()) * params.group.by + in_group
    }
}

/// Loads the numbers of the merges from `first` on that depend on an item, one per thread.
pub(crate) fn load_numbers<'k>(cta: &MmaCta<'k>, first: Value<'k, u32>, end: Value<'k, u32>) -> Var<'k, u32> {
    let (k, thread) = (cta.k, cta.k.thread());
    let number = k.var("merge", NONE);
    k.when(thread.lt(RECORDS as u32) & (first + thread).lt(end), || {
        number.set(cta.params.plan.merge_deps.at(first + thread).load());
    });
    number
}

/// Fetches the records of these merges.
pub(crate) fn fetch_records<'k>(cta: &MmaCta<'k>, number: Var<'k, u32>) {
    let (k, number) = (cta.k, number.get());
    k.when(number.ne(NONE), || fetch_record(cta, number));
}

/// Fetches the record of merge `number`.
fn fetch_record<'k>(cta: &MmaCta<'k>, number: Value<'k, u32>) {
    let k = cta.k;
    let merge = MergeItemRegs::load(k, cta.params.plan.merges, number);
    let record = record(cta, k.thread());
    record.store_vector([merge.kv_head, merge.qo_begin, merge.qo_len, merge.source_begin]);
    record.plus(4).store_vector([merge.source_end, merge.arrivals, merge.is_pair, number]);
}

/// Arrives at the merges that depend on an item, and calls `merge` with each that it completes and its first 32 sources. The first
/// records have been fetched. `complete` is a word of shared memory. `item` is called at each point of use, because bodies that
/// lack registers load it there.
pub(crate) fn arrive_and_merge<'k>(
    cta: &MmaCta<'k>,
    item: impl Fn() -> WorkItemRegs<'k>,
    complete: Shared<'k, u32>,
    merge: impl FnOnce(MergeItemRegs<'k>, LaneSource<'k>),
) {
    let (k, of_item) = (cta.k, item());
    k.when(of_item.merge_deps_begin.lt(of_item.merge_deps_end), || {
        let item = item();
        // the increments release what all threads wrote before this barrier: fences of each thread would delay them by 0.3 us
        cta.sync();
        let source = LaneSource::declare(cta);
        let load_source = |at: Value<'k, u32>| {
            let merge = MergeItemRegs::load_shared(k, record(cta, at));
            source.load(cta, &merge, merge.source_begin);
        };
        k.repeat_rolled((item.merge_deps_begin, item.merge_deps_end), RECORDS as u32, |first| {
            k.when(first.ne(item.merge_deps_begin), || {
                fetch_records(cta, load_numbers(cta, first, item.merge_deps_end));
                cta.sync();
            });
            load_source(k.constant(0));
            k.when(k.thread().lt(32), || {
                let is_last = k.var::<bool>("is_last", false);
                k.when(k.lane().lt(RECORDS as u32) & (first + k.lane()).lt(item.merge_deps_end), || {
                    let record = record(cta, k.lane());
                    is_last.set(arrive(cta, record));
                    is_last.set(is_last.get() & !append_if_large(cta, record, is_last.get()));
                });
                let lanes = k.ballot(is_last.get());
                k.when(k.lane().eq(0), || complete.store(lanes));
            });
            cta.sync();
            let left = k.var("left", complete.load());
            k.loop_(|| {
                k.break_if(left.get().eq(0));
                let lowest = left.get() & (k.constant(0) - left.get());
                left.set(left.get() ^ lowest);
                let at = k.constant(31) - lowest.leading_zeros();
                k.when(at.ne(0), || load_source(at));
                merge(MergeItemRegs::load_shared(k, record(cta, at)), source);
            });
            cta.sync();
        });
    });
}

/// The `at`th fetched record.
pub(super) fn record<'k>(cta: &MmaCta<'k>, at: Value<'k, u32>) -> Shared<'k, u32> {
    cta.at::<u32>(cta.layout.merges).at(at * MergeItem::WORDS as u32)
}

/// Arrives at a merge; returns whether this was the last source. The counter wraps to 0 then.
fn arrive<'k>(cta: &MmaCta<'k>, record: Shared<'k, u32>) -> Value<'k, bool> {
    let merge = MergeItemRegs::load_shared(cta.k, record);
    let last = merge.arrivals * cta.ctas_per_item - 1;
    counter(cta, record).atomic(AtomicOp::Inc, last, Order::AcqRel, Scope::Gpu).eq(last)
}

/// The arrival counter of a merge.
#[track_caller]
pub(super) fn counter<'k>(cta: &MmaCta<'k>, record: Shared<'k, u32>) -> Global<'k, u32> {
    cta.params.plan.arrival_counters.at(record.plus(NUMBER).load())
}

/// Whether a merge is left to another kernel; appends it to the list if it is complete.
fn append_if_large<'k>(
    cta: &MmaCta<'k>,
    record: Shared<'k, u32>,
    is_complete: Value<'k, bool>,
) -> Value<'k, bool> {
    let Some(list) = cta.params.own.latent.map(|latent| latent.large_merges) else {
        return cta.k.constant(false);
    };
    let merge = MergeItemRegs::load_shared(cta.k, record);
    let states = merge.qo_len * cta.params.group.by * (merge.source_end - merge.source_begin);
    let is_large = states.gt(max_fused_states(cta.layout.v.dim) as u32);
    cta.k.when(is_complete & is_large, || {
        let at = list.atomic(AtomicOp::AddU32, 1_u32, Order::Relaxed, Scope::Gpu);
        list.plus(LARGE_MERGES_HEADER).at(at).store(record.plus(NUMBER).load());
    });
    is_large
}

/// The partial row of a query head in source `at`, which must exist.
#[track_caller]
pub(crate) fn partial_row<'k>(
    params: &AttentionParamRegs<'k>,
    at: Value<'k, u32>,
    token: Value<'k, u32>,
    in_group: Value<'k, u32>,
) -> Value<'k, u32> {
    let source = MergeSourceRegs::load(at.builder(), params.plan.sources, at);
    source.partial + (token - source.qo_begin) * params.group.by + in_group
}
