//! Epilogue of a row: normalizes the accumulators and writes the output or a partial state.

use super::{
    block::{Block, Cta},
    elements,
};
use crate::{
    attention::{items::NONE, row::Row},
    variant::elementary::{exp2, log2},
};
use std::f32::consts::{LN_2, LOG2_E};
use tilewright::attention::variant::{Hook, Input};
use tilewright_ptx::build::Value;

/// The softmax state of a row: the maximum base-2 logit, and `Σ 2^(logit - max)`.
#[derive(Clone, Copy)]
pub(super) struct State<'k> {
    pub(super) max: Value<'k, f32>,
    pub(super) sum: Value<'k, f32>,
}

impl<'k> State<'k> {
    /// The LSE in base 2; -inf for a row without visible keys.
    #[track_caller]
    fn lse(&self) -> Value<'k, f32> {
        (self.max + log2(self.sum)).unless(self.sum.eq(0.0), f32::NEG_INFINITY)
    }
}

impl<'k> Cta<'k, '_> {
    /// Writes all rows of this warp.
    #[track_caller]
    pub(super) fn finish_rows(&self, block: &Block<'k>) {
        let (k, item) = (self.k, &block.item);
        self.each_row(block, |r| {
            let max = self.rows.max.at(r).load() * self.scale_to_base_2();
            let state = State { max, sum: self.rows.sum.at(r).load() };
            let o = |dim| self.o.at(r * self.config.o_stride() + dim).load();
            k.when_else(
                item.partial.eq(NONE),
                || self.write_output(&self.rows.row(r, item.kv_head), state, o),
                || self.write_partial(item.partial + block.first + r, state, o),
            );
        });
    }

    /// Writes partial row `partial`, normalized, so that its LSE is its whole weight.
    #[track_caller]
    fn write_partial(
        &self,
        partial: Value<'k, u32>,
        state: State<'k>,
        o: impl FnOnce(Value<'k, u32>) -> Value<'k, f32>,
    ) {
        let (k, vo) = (self.k, self.config.head_dim.1);
        let normalizer = self.normalizer(state.sum, k.constant(1.0));
        let to = self.params.partial_o.at_wide(partial.to_u64() * u64::from(vo));
        k.repeat((self.lane, vo), 32, |dim| to.at(dim).store(o(dim) * normalizer));
        k.when(self.lane.eq(0), || {
            self.params.partial_lse.at_wide(partial.to_u64()).store(state.lse());
        });
    }

    /// Writes a row's output and LSE, after the update and output hooks.
    #[track_caller]
    pub(super) fn write_output(
        &self,
        row: &Row<'k>,
        state: State<'k>,
        o: impl FnOnce(Value<'k, u32>) -> Value<'k, f32>,
    ) {
        let (k, params, vo) = (self.k, &self.params, self.config.head_dim.1);
        let (state, factor) = self.updated(row, state);
        let normalizer = self.normalizer(state.sum, factor);
        let (token, head) = (row.token.to_u64(), row.qo_head.to_u64());
        let dtype = self.config.dtype_qo;
        let to = elements::place(dtype, params.o.address, token * params.o.row + head * params.o.head);
        let hook = self.hooks.output.further(&|input| row.input(input));
        k.repeat((self.lane, vo), 32, |dim| {
            let at = |input| (input == Input::Dim).then(|| dim.to_f32());
            let x = hook.output(&at, o(dim) * normalizer);
            elements::store(k, dtype, elements::place(dtype, to, dim.to_u64()), x);
        });
        k.when(self.lane.eq(0) & params.has_lse(), || {
            params.lse.at_wide(token * params.qo_heads.to_u64() + head).store(state.lse());
        });
    }

    /// The normalization factor of O: `factor / sum`, 0 for a row without visible keys; 1 without softmax.
    #[track_caller]
    fn normalizer(&self, sum: Value<'k, f32>, factor: Value<'k, f32>) -> Value<'k, f32> {
        if !self.hooks.is().softmax() {
            return self.k.constant(1.0);
        }
        (factor / sum).unless(sum.eq(0.0), 0.0)
    }

    /// The state after the update hook, and the rescale factor of the accumulators.
    #[track_caller]
    fn updated(&self, row: &Row<'k>, state: State<'k>) -> (State<'k>, Value<'k, f32>) {
        let one = self.k.constant(1.0);
        if !self.hooks.is().is_live(Hook::Update) {
            return (state, one);
        }
        let hook = &self.hooks.update;
        let (max, sum) = hook.update(&|input| row.input(input), (state.max * LN_2, state.sum));
        let updated = State { max: max * LOG2_E, sum };
        let factor = exp2(state.max - updated.max);
        // a row without visible keys has nothing to rescale
        (updated, factor.unless(state.sum.eq(0.0), 0.0))
    }
}
