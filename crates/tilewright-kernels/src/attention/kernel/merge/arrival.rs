//! Arrival at merges: the last CTA to arrive performs the merge.
//!
//! Each work item increments the arrival counters of the merges that depend on it. The CTA that completes a counter finds all
//! sources written and adds them in plan order, so the result is deterministic.

use crate::attention::{
    items::{MergeItem, MergeSourceRegs, WorkItemRegs},
    kernel::cta::MmaCta,
    params::AttentionParamRegs,
};
use tilewright_ptx::{
    build::{Shared, Value},
    isa::{
        memory::{AtomicOp, Order, Scope},
        sync::Fence,
    },
};

/// Arrives at the merges that depend on an item, and calls `merge` with the index of each that it completes. `complete` is a word
/// of shared memory. `item` is called at each point of use, because bodies that lack registers load it there.
pub(crate) fn arrive_and_merge<'k>(
    cta: &MmaCta<'k>,
    item: impl Fn() -> WorkItemRegs<'k>,
    complete: Shared<'k, u32>,
    merge: impl FnOnce(Value<'k, u32>),
) {
    let (k, params, of_item) = (cta.k, &cta.params, item());
    k.when(of_item.merge_deps_begin.lt(of_item.merge_deps_end), || {
        let item = item();
        // release the writes of all threads before this warp increments the counters
        k.fence(Fence::AcqRel(Scope::Gpu));
        cta.sync();
        k.repeat((item.merge_deps_begin, item.merge_deps_end), 32, |first| {
            k.when(k.thread().lt(32), || {
                let is_last = k.var::<bool>("is_last", false);
                k.when((first + k.lane()).lt(item.merge_deps_end), || {
                    let index = params.merge_deps.at(first + k.lane()).load();
                    is_last.set(arrive(params, index));
                });
                let lanes = k.ballot(is_last.get());
                k.when(k.lane().eq(0), || complete.store(lanes));
            });
            cta.sync();
            let left = k.var("left", complete.load());
            k.when(left.get().ne(0), || k.fence(Fence::AcqRel(Scope::Gpu)));
            k.loop_(|| {
                k.break_if(left.get().eq(0));
                let lowest = left.get() & (k.constant(0) - left.get());
                left.set(left.get() ^ lowest);
                let at = k.constant(31) - lowest.leading_zeros();
                merge(params.merge_deps.at(first + at).load());
            });
            cta.sync();
        });
    });
}

/// Arrives at a merge; returns whether this was the last source. The counter wraps to 0 then.
fn arrive<'k>(params: &AttentionParamRegs<'k>, index: Value<'k, u32>) -> Value<'k, bool> {
    let record = params.merges.at_wide(index.to_u64() * MergeItem::WORDS as u64);
    let [begin, end] = [3, 4].map(|word| record.plus(word).load());
    let last = end - begin - 1;
    let before = params.arrival_counters.at(index).atomic(AtomicOp::Inc, last, (Order::AcqRel, Scope::Gpu));
    before.eq(last)
}

/// The partial row of a query head in source `at`, which must exist.
#[track_caller]
pub(crate) fn partial_row<'k>(
    params: &AttentionParamRegs<'k>,
    at: Value<'k, u32>,
    (token, in_group): (Value<'k, u32>, Value<'k, u32>),
) -> Value<'k, u32> {
    let source = MergeSourceRegs::load(at.builder(), params.sources, at);
    source.partial + (token - source.qo_begin) * params.group.by + in_group
}
