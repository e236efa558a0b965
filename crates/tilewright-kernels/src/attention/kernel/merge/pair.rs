//! Merge of a pair of states: the CTA that is the last to claim it keeps its state in registers.
//!
//! ```text
//! claim     when the state is computed, in registers
//! first     stores its state, arrives
//! last      waits for the arrival, adds the stored state to its own, writes the output
//! counter   1 per claim and 2 for the arrival: 4 when the state is stored, then 0 again
//! ```
//!
//! A merge by the last CTA to arrive stores and loads both states. A CTA waits only for one that has claimed the merge and therefore
//! runs, so CTAs may run in any order. Both states are rounded and weighted in the same way: the result does not depend on the order
//! of claims.

use super::arrival::{counter, record};
use crate::attention::{
    items::{MergeItemRegs, MergeSourceRegs, NONE, WorkItemRegs},
    kernel::{cta::MmaCta, epilogue::SoftmaxStats, softmax::finite_max},
};
use tilewright_ptx::{
    build::{Shared, Value},
    isa::memory::{Access, AtomicOp, Order, Scope},
};

/// Added to the counter by a claim, and by the arrival.
const CLAIM: u32 = 1;
const ARRIVAL: u32 = 2;
/// The counter after both claims and the arrival.
const COMPLETE: u32 = 2 * CLAIM + ARRIVAL;
/// Bits of the counter of each CTA of an item.
const COUNTER_BITS: u32 = 8;

/// The part of this CTA in the merge of a pair; neither flag is set if the item has no such merge.
#[derive(Clone, Copy)]
pub(crate) struct PairPart<'k> {
    /// Stores its state and arrives.
    pub(crate) is_first: Value<'k, bool>,
    /// Adds the stored state to its own.
    pub(crate) is_last: Value<'k, bool>,
    record: Shared<'k, u32>,
}

/// Claims the merge of an item, if it is that of a pair. All threads must have finished with `word`, a word of shared memory; the
/// record has been fetched. Threads are synchronized.
pub(crate) fn claim<'k>(cta: &MmaCta<'k>, item: &WorkItemRegs<'k>, word: Shared<'k, u32>) -> PairPart<'k> {
    let (k, record) = (cta.k, record(cta, cta.k.constant(0)));
    let is_pair = k.var("is_pair", false);
    k.when(item.merge_deps_begin.lt(item.merge_deps_end), || {
        is_pair.set(MergeItemRegs::load_shared(k, record).is_pair.ne(0));
    });
    k.when(is_pair.get() & k.thread().eq(0), || {
        let add = k.constant(CLAIM) << shift(cta);
        let before = counter(cta, record).atomic(AtomicOp::AddU32, add, Order::Relaxed, Scope::Gpu);
        word.store(of_cta(cta, before));
    });
    cta.sync();
    let before = k.var("claims_before", NONE);
    k.when(is_pair.get(), || before.set(word.load()));
    let is_first = before.get().eq(0);
    PairPart { is_first, is_last: is_pair.get() & !is_first, record }
}

impl<'k> PairPart<'k> {
    /// Whether the item has such a merge.
    pub(crate) fn is_pair(&self) -> Value<'k, bool> {
        self.is_first | self.is_last
    }

    /// Of the first: arrives, after all threads have stored the state.
    pub(crate) fn arrive(&self, cta: &MmaCta<'k>) {
        let k = cta.k;
        cta.sync();
        k.when(k.thread().eq(0), || {
            let add = k.constant(ARRIVAL) << shift(cta);
            counter(cta, self.record).reduce(AtomicOp::AddU32, add, Order::Release, Scope::Gpu);
        });
    }

    /// Of the last: waits until the state of the first is stored, and resets the counter. Returns the first partial row of that state.
    pub(crate) fn wait(&self, cta: &MmaCta<'k>, item: &WorkItemRegs<'k>) -> Value<'k, u32> {
        let (k, counter) = (cta.k, counter(cta, self.record));
        let merge = MergeItemRegs::load_shared(k, self.record);
        let partial =
            |at: u32| MergeSourceRegs::load(k, cta.params.plan.sources, merge.source_begin + at).partial;
        let other = partial(0) + partial(1) - item.partial;
        k.when(k.thread().eq(0), || {
            k.loop_(|| {
                let count = of_cta(cta, counter.load_with(Access::Ordered(Scope::Gpu)));
                k.break_if(count.eq(COMPLETE));
            });
            let add = k.constant(0) - (k.constant(COMPLETE) << shift(cta));
            counter.reduce(AtomicOp::AddU32, add, Order::Relaxed, Scope::Gpu);
        });
        cta.sync();
        other
    }
}

/// The weights of the states of a row, and the statistics of their sum.
pub(crate) struct PairWeights<'k> {
    /// The weights of this CTA's state and of the other one.
    pub(crate) weights: [Value<'k, f32>; 2],
    pub(crate) max: Value<'k, f32>,
    pub(crate) sum: Value<'k, f32>,
}

impl<'k> PairWeights<'k> {
    /// From the statistics of both states of a row.
    #[track_caller]
    pub(crate) fn new(own: &SoftmaxStats<'k>, [other_max, other_sum]: [Value<'k, f32>; 2]) -> Self {
        let [own_max, own_sum] = own.of_partial_state();
        let max = finite_max(own_max.max(other_max));
        let weights = [own_max, other_max].map(|of_state| (of_state - max).exp2());
        Self { weights, max, sum: own_sum * weights[0] + other_sum * weights[1] }
    }
}

/// The bits of the counter that belong to this CTA of an item.
#[track_caller]
fn of_cta<'k>(cta: &MmaCta<'k>, counter: Value<'k, u32>) -> Value<'k, u32> {
    (counter >> shift(cta)) & ((1 << COUNTER_BITS) - 1)
}

/// Their position.
#[track_caller]
fn shift<'k>(cta: &MmaCta<'k>) -> Value<'k, u32> {
    (cta.k.cta() % cta.ctas_per_item) * COUNTER_BITS
}
