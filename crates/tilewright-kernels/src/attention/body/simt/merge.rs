//! Merge of partial states by the last CTA to arrive, in the plan's order of sources, so that results are deterministic.

use super::{THREADS, block::SimtCta, epilogue::SoftmaxState};
use crate::{
    attention::{
        items::{MergeItemRegs, MergeSourceRegs, NONE, WorkItemRegs},
        kernel::query_row::QueryRow,
    },
    variant::elementary::exp2_of_negative,
};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::{
    build::Value,
    isa::memory::{AtomicOp, Order, Scope},
};

impl<'k> SimtCta<'k, '_> {
    /// Arrives at the merges that depend on `item`, and performs those that it completes. All threads of the CTA have written and
    /// synchronized.
    #[track_caller]
    pub(super) fn arrive_at_merges(&self, item: &WorkItemRegs<'k>) {
        let (k, params) = (self.k, &self.params);
        k.repeat((item.merge_deps_begin, item.merge_deps_end), 1, |feed| {
            let number = params.merge_deps.at_wide(feed.to_u64()).load();
            let merge = MergeItemRegs::load(k, params.merges, number);
            let counter = params.arrival_counters.at_wide(number.to_u64());
            k.when(k.thread().eq(0), || {
                // acquire-release: orders this CTA's writes before the count, and those of the others before the merge
                let before = counter.atomic(AtomicOp::AddU32, 1, (Order::AcqRel, Scope::Gpu));
                let last = (before + 1).eq(merge.source_end - merge.source_begin);
                k.when(last, || counter.store(0));
                self.word.store(last.select(1, 0));
            });
            k.sync_threads();
            k.when(self.word.load().ne(0), || self.merge(&merge));
            // the next merge overwrites the word
            k.sync_threads();
        });
    }

    /// Merges all rows, every fourth per warp.
    #[track_caller]
    fn merge(&self, merge: &MergeItemRegs<'k>) {
        let (k, params) = (self.k, &self.params);
        let reads = |input| {
            [Hook::Update, Hook::Output].into_iter().any(|hook| self.hooks.hooks().reads(hook, input))
        };
        // skip the lookup if no hook uses the result
        let request = if reads(Input::Request) || reads(Input::Qo) { NONE } else { 0 };
        let known = (k.constant(request), k.constant(0));
        k.repeat((self.warp, merge.qo_len * params.group.by), THREADS / 32, |packed| {
            let row = self.row_of((merge.qo_begin, merge.kv_head), packed, known);
            let state = self.merged_state(merge, &row);
            self.write_output(&row, state, |dim| self.merged_element(merge, (&row, state), dim));
        });
    }

    /// Runs `body` for the partial rows of a row.
    #[track_caller]
    fn for_each_partial(
        &self,
        merge: &MergeItemRegs<'k>,
        row: &QueryRow<'k>,
        body: impl FnOnce(Value<'k, u64>),
    ) {
        let (k, params) = (self.k, &self.params);
        k.repeat((merge.source_begin, merge.source_end), 1, |source| {
            let source = MergeSourceRegs::load(k, params.sources, source);
            let in_group = row.qo_head - row.kv_head * params.group.by;
            let partial = source.partial + (row.token - source.qo_begin) * params.group.by + in_group;
            body(partial.to_u64());
        });
    }

    /// The maximum LSE, or NaN if one is; and the sum of weights.
    #[track_caller]
    fn merged_state(&self, merge: &MergeItemRegs<'k>, row: &QueryRow<'k>) -> SoftmaxState<'k> {
        let k = self.k;
        if !self.hooks.hooks().softmax() {
            return SoftmaxState { max: k.constant(f32::NEG_INFINITY), sum: k.constant(0.0) };
        }
        let (max, sum) = (k.var("max", f32::NEG_INFINITY), k.var("sum", 0.0));
        self.for_each_partial(merge, row, |partial| {
            let lse = self.params.partial_lse.at_wide(partial).load();
            // comparisons with NaN are false, so a NaN is taken and kept
            let hoisted_nodes = max.get().is_nan() | lse.le(max.get());
            max.set(hoisted_nodes.select(max.get(), lse));
        });
        self.for_each_partial(merge, row, |partial| sum.set(sum.get() + self.weight(partial, max.get())));
        SoftmaxState { max: max.get(), sum: sum.get() }
    }

    /// The weight of a partial state.
    #[track_caller]
    fn weight(&self, partial: Value<'k, u64>, max: Value<'k, f32>) -> Value<'k, f32> {
        if !self.hooks.hooks().softmax() {
            return self.k.constant(1.0);
        }
        // a row without visible keys subtracts 0: (-inf) - (-inf) would be NaN
        let reference = max.unless(max.eq(f32::NEG_INFINITY), 0.0);
        exp2_of_negative(self.params.partial_lse.at_wide(partial).load() - reference)
    }

    #[track_caller]
    fn merged_element(
        &self,
        merge: &MergeItemRegs<'k>,
        (row, state): (&QueryRow<'k>, SoftmaxState<'k>),
        dim: Value<'k, u32>,
    ) -> Value<'k, f32> {
        let (k, vo) = (self.k, u64::from(self.config.head_dim.1));
        let sum = k.var("o_sum", 0.0);
        self.for_each_partial(merge, row, |partial| {
            let weight = self.weight(partial, state.max);
            let o = self.params.partial_o.at_wide(partial * vo).at(dim).load();
            // an empty state must not contribute, even if its values are NaN
            let added = weight.mul_add(o, sum.get());
            sum.set(weight.eq(0.0).select(sum.get(), added));
        });
        sum.get()
    }
}
