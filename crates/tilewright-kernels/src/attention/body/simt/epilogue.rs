//! Epilogue of a row: normalizes the accumulators and writes the output or a partial state.

use super::{RowBlock, SimtCta, elements};
use crate::{
    attention::{items::NONE, kernel::query_row::QueryRow},
    variant::elementary::{exp2, log2},
};
use std::f32::consts::{LN_2, LOG2_E};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::Value;

/// Final softmax statistics of a row: the maximum base-2 logit, and `Σ 2^(logit - max)`. The tensor-core kernels have
/// [`SoftmaxStats`](crate::attention::kernel::epilogue::SoftmaxStats), whose approximate logarithm and reciprocal would change
/// the bits of this body.
#[derive(Clone, Copy)]
pub(super) struct ExactSoftmaxStats<'k> {
    pub(super) max: Value<'k, f32>,
    pub(super) sum: Value<'k, f32>,
}

impl<'k> ExactSoftmaxStats<'k> {
    /// The LSE in base 2; -inf for a row without visible keys.
    #[track_caller]
    fn lse(&self) -> Value<'k, f32> {
        (self.max + log2(self.sum)).unless(self.sum.eq(0.0), f32::NEG_INFINITY)
    }
}

impl<'k> SimtCta<'k, '_> {
    /// Writes all rows of this warp.
    #[track_caller]
    pub(super) fn finish_rows(&self, block: &RowBlock<'k>) {
        let (k, item) = (self.k, &block.item);
        self.for_each_row(block, |r| {
            let max = self.rows.max.at(r).load() * self.scale_to_base_2();
            let state = ExactSoftmaxStats { max, sum: self.rows.sum.at(r).load() };
            let o = |dim| self.o.at(r * self.config.o_stride() + dim).load();
            k.when_else(
                item.partial.eq(NONE),
                || self.write_output(&self.rows.row(r, item.kv_head), state, o),
                || self.write_partial(item.partial + block.first + r, state, o),
            );
        });
    }

    /// Writes partial row `partial`: `partial_o [partial_rows, head_dim_vo]` and `partial_stats [partial_rows, 2]`.
    #[track_caller]
    fn write_partial(
        &self,
        partial: Value<'k, u32>,
        state: ExactSoftmaxStats<'k>,
        o: impl FnOnce(Value<'k, u32>) -> Value<'k, f32>,
    ) {
        let (k, vo) = (self.k, self.config.head_dim.vo as u32);
        let to = self.params.partial_o.at_wide(partial.to_u64() * u64::from(vo));
        k.repeat_rolled((self.lane, vo), 32, |dim| to.at(dim).store(o(dim)));
        k.when(self.lane.eq(0), || {
            let stats = self.params.partial_stats.at_wide(partial.to_u64() * 2);
            stats.store(state.max.unless(state.sum.eq(0.0), f32::NEG_INFINITY));
            stats.plus(1).store(state.sum);
        });
    }

    /// Writes a row's output `[head_dim_vo]` and LSE, after the update and output hooks.
    #[track_caller]
    pub(super) fn write_output(
        &self,
        row: &QueryRow<'k>,
        state: ExactSoftmaxStats<'k>,
        o: impl FnOnce(Value<'k, u32>) -> Value<'k, f32>,
    ) {
        let (k, params, vo) = (self.k, &self.params, self.config.head_dim.vo as u32);
        let (state, rescale) = self.apply_update(row, state);
        let normalizer = self.normalizer(state.sum, rescale);
        let dtype = self.config.dtype_o;
        let to = elements::address_of(dtype, params.o.address, row.head.offset_in(&params.o));
        let hook = self.hooks.output.bind(&|input| row.input(input));
        k.repeat_rolled((self.lane, vo), 32, |dim| {
            let at = |input| (input == Input::Dim).then(|| dim.to_f32());
            let x = hook.output(&at, o(dim) * normalizer);
            elements::store(k, dtype, elements::address_of(dtype, to, dim.to_u64()), x);
        });
        k.when(self.lane.eq(0) & params.has_lse(), || {
            row.head.lse_in(params).store(state.lse());
        });
    }

    /// The normalization factor of O: `factor / sum`, 0 for a row without visible keys; 1 without softmax.
    #[track_caller]
    fn normalizer(&self, sum: Value<'k, f32>, rescale: Value<'k, f32>) -> Value<'k, f32> {
        if !self.hooks.hooks().softmax() {
            return self.k.constant(1.0);
        }
        (rescale / sum).unless(sum.eq(0.0), 0.0)
    }

    /// The state after the update hook, and the rescale factor of the accumulators.
    #[track_caller]
    fn apply_update(
        &self,
        row: &QueryRow<'k>,
        state: ExactSoftmaxStats<'k>,
    ) -> (ExactSoftmaxStats<'k>, Value<'k, f32>) {
        let one = self.k.constant(1.0);
        if !self.hooks.hooks().is_live(Hook::Update) {
            return (state, one);
        }
        let hook = &self.hooks.update;
        let (max, sum) = hook.update(&|input| row.input(input), state.max * LN_2, state.sum);
        let updated = ExactSoftmaxStats { max: max * LOG2_E, sum };
        let rescale = exp2(state.max - updated.max);
        // a row without visible keys has nothing to rescale
        (updated, rescale.unless(state.sum.eq(0.0), 0.0))
    }
}
