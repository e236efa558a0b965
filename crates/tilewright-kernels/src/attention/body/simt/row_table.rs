//! Row table of a block: indices, visible range and softmax state of each row.

use super::block::SimtCta;
use crate::attention::kernel::{QueryHead, QueryRow, visible::window};
use tilewright_ptx::{Builder, Shared, Value};

/// The row table in shared memory, `[rows]` each.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimtRowTable<'k> {
    token: Shared<'k, u32>,
    qo_head: Shared<'k, u32>,
    request: Shared<'k, u32>,
    position: Shared<'k, i32>,
    /// See [`SimtRowTable::visible_range`].
    low: Shared<'k, i32>,
    high: Shared<'k, i32>,
    /// The running maximum of logits, before the conversion to base 2.
    pub(super) max: Shared<'k, f32>,
    /// `Σ 2^(logit - max)`
    pub(super) sum: Shared<'k, f32>,
    /// The rescale factor of the accumulators.
    pub(super) rescale: Shared<'k, f32>,
}

impl<'k> SimtRowTable<'k> {
    pub(super) fn new(k: &'k Builder, rows: u32) -> Self {
        let rows = rows as usize;
        Self {
            token: k.shared("row_token", rows, 4),
            qo_head: k.shared("row_head", rows, 4),
            request: k.shared("row_request", rows, 4),
            position: k.shared("row_position", rows, 4),
            low: k.shared("row_low", rows, 4),
            high: k.shared("row_high", rows, 4),
            max: k.shared("row_max", rows, 4),
            sum: k.shared("row_sum", rows, 4),
            rescale: k.shared("row_factor", rows, 4),
        }
    }

    /// Row `r` of the block.
    #[track_caller]
    pub(super) fn row(&self, r: Value<'k, u32>, kv_head: Value<'k, u32>) -> QueryRow<'k> {
        let (token, qo_head) = (self.token.at(r).load(), self.qo_head.at(r).load());
        QueryRow {
            head: QueryHead { token, qo_head, kv_head },
            request: self.request.at(r).load(),
            position: self.position.at(r).load(),
        }
    }

    /// The first position that row `r` sees, and one past the last.
    #[track_caller]
    pub(super) fn visible_range(&self, r: Value<'k, u32>) -> (Value<'k, i32>, Value<'k, i32>) {
        (self.low.at(r).load(), self.high.at(r).load())
    }
}

impl<'k> SimtCta<'k, '_> {
    /// Writes the indices and visible range of row `r` of the block, and resets its state.
    #[track_caller]
    pub(super) fn init_row(&self, r: Value<'k, u32>, row: &QueryRow<'k>) {
        let (k, rows, params) = (self.k, &self.rows, &self.params);
        rows.token.at(r).store(row.head.token);
        rows.qo_head.at(r).store(row.head.qo_head);
        rows.request.at(r).store(row.request);
        rows.position.at(r).store(row.position);
        let (min, max) = (i64::from(i32::MIN), i64::from(i32::MAX));
        let (low, high) = window(params, row.position.to_i64(), |at| at.max(min).min(max));
        rows.low.at(r).store(low);
        rows.high.at(r).store(high);
        rows.max.at(r).store(k.constant(f32::NEG_INFINITY));
        rows.sum.at(r).store(k.constant(0.0_f32));
    }
}
