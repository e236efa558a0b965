//! Merge of partial states in exact arithmetic, one warp per row.
//!
//! `kernel/merge/partial_states.rs` has the same steps for the tensor-core kernels, with approximate exponentials and vectors of
//! four elements: sharing them would round the results of one of the two kernels differently.

use super::{THREADS, block::SimtCta, epilogue::ExactSoftmaxStats};
use crate::{
    attention::{
        items::{KnownRequest, MergeItemRegs, NONE, WorkItemRegs},
        kernel::{QueryHead, QueryRow, merge::arrival::partial_row, softmax::finite_max},
    },
    variant::elementary::exp2_of_negative,
};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::{AtomicOp, Order, Scope, Shared, Value};

impl<'k> SimtCta<'k, '_> {
    /// Arrives at the merges that depend on `item`, and performs those that it completes. All threads of the CTA have written and
    /// synchronized. The version of `kernel/merge/arrival.rs`, or its `arrive` alone, costs this body 20 registers on sm_80.
    #[track_caller]
    pub(super) fn arrive_and_merge(&self, item: &WorkItemRegs<'k>) {
        let (k, params) = (self.k, &self.params);
        k.repeat_rolled((item.merge_deps_begin, item.merge_deps_end), 1, |at| {
            let index = params.plan.merge_deps.at_wide(at.to_u64()).load();
            let merge = MergeItemRegs::load(k, params.plan.merges, index);
            let counter = params.plan.arrival_counters.at_wide(index.to_u64());
            k.when(k.thread().eq(0), || {
                // acquire-release: orders this CTA's writes before the count, and those of the others before the merge
                let before = counter.atomic(AtomicOp::AddU32, 1, Order::AcqRel, Scope::Gpu);
                let last = (before + 1).eq(merge.arrivals);
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
        let look_up = reads(Input::Request) || reads(Input::Qo);
        let unknown = KnownRequest { request: k.constant(NONE), offset: k.constant(0) };
        k.repeat_rolled((self.warp, merge.qo_len * params.group.by), THREADS / 32, |packed| {
            let head = QueryHead::of_row(params, merge.qo_begin, merge.kv_head, packed);
            let row = QueryRow::new(params, head, unknown, look_up);
            let state = self.merged_state(merge, &row);
            let o = self.o.at(self.warp * self.config.o_stride());
            self.merge_elements(merge, &row, state, o);
            self.write_output(&row, state, |dim| o.at(dim).load());
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
        self.k.repeat((merge.source_begin, merge.source_end), 1, |source| {
            let in_group = row.head.qo_head - row.head.kv_head * self.params.group.by;
            body(partial_row(&self.params, source, row.head.token, in_group).to_u64());
        });
    }

    /// The maximum logit of all states, or NaN if one is; and the sum of weights.
    #[track_caller]
    fn merged_state(&self, merge: &MergeItemRegs<'k>, row: &QueryRow<'k>) -> ExactSoftmaxStats<'k> {
        let k = self.k;
        if !self.hooks.hooks().softmax() {
            return ExactSoftmaxStats { max: k.constant(f32::NEG_INFINITY), sum: k.constant(0.0) };
        }
        let (max, sum) = (k.var("max", f32::NEG_INFINITY), k.var("sum", 0.0));
        self.for_each_partial(merge, row, |partial| {
            let of_state = self.params.partial_stats.at_wide(partial * 2).load();
            // comparisons with NaN are false, so a NaN is taken and kept
            let keeps = max.get().is_nan() | of_state.le(max.get());
            max.set(keeps.select(max.get(), of_state));
        });
        self.for_each_partial(merge, row, |partial| {
            let sum_of_state = self.params.partial_stats.at_wide(partial * 2).plus(1).load();
            sum.set(self.weight(partial, max.get()).mul_add(sum_of_state, sum.get()));
        });
        ExactSoftmaxStats { max: max.get(), sum: sum.get() }
    }

    /// The weight of a partial state.
    #[track_caller]
    fn weight(&self, partial: Value<'k, u64>, max: Value<'k, f32>) -> Value<'k, f32> {
        if !self.hooks.hooks().softmax() {
            return self.k.constant(1.0);
        }
        exp2_of_negative(self.params.partial_stats.at_wide(partial * 2).load() - finite_max(max))
    }

    /// Adds the elements of all states, by their weights, in a row `[head_dim_vo]` of shared memory that no other warp uses.
    #[track_caller]
    fn merge_elements(
        &self,
        merge: &MergeItemRegs<'k>,
        row: &QueryRow<'k>,
        state: ExactSoftmaxStats<'k>,
        o: Shared<'k, f32>,
    ) {
        let (k, vo) = (self.k, self.config.head_dim.vo as u32);
        k.repeat_rolled((self.lane, vo), 32, |dim| o.at(dim).store(0.0));
        self.for_each_partial(merge, row, |partial| {
            let weight = self.weight(partial, state.max);
            let of_state = self.params.partial_o.at_wide(partial * u64::from(vo));
            k.repeat((self.lane, vo), 32, |dim| {
                let sum = o.at(dim).load();
                // an empty state must not contribute, even if its values are NaN
                let added = weight.mul_add(of_state.at(dim).load(), sum);
                o.at(dim).store(weight.eq(0.0).select(sum, added));
            });
        });
    }
}
