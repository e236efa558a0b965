//! Row table of a block: indices, visible range and softmax state of each row.

use super::block::SimtCta;
use crate::attention::{items::look_up_request, kernel::query_row::QueryRow};
use tilewright_ptx::build::{Builder, Shared, Value};

/// The row table in shared memory, `[rows]` each.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockRows<'k> {
    token: Shared<'k, u32>,
    qo_head: Shared<'k, u32>,
    request: Shared<'k, u32>,
    position: Shared<'k, i32>,
    /// See [`BlockRows::visible_range`].
    low: Shared<'k, i32>,
    high: Shared<'k, i32>,
    /// The running maximum of logits, before the conversion to base 2.
    pub(super) max: Shared<'k, f32>,
    /// `Σ 2^(logit - max)`
    pub(super) sum: Shared<'k, f32>,
    /// The rescale factor of the accumulators.
    pub(super) rescale: Shared<'k, f32>,
}

impl<'k> BlockRows<'k> {
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
        QueryRow {
            token: self.token.at(r).load(),
            qo_head: self.qo_head.at(r).load(),
            kv_head,
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
    /// A row by its packed index in an item or a merge; its request is `known` or [`NONE`](crate::attention::items::NONE).
    #[track_caller]
    pub(super) fn row_of(
        &self,
        (qo_begin, kv_head): (Value<'k, u32>, Value<'k, u32>),
        packed: Value<'k, u32>,
        known: (Value<'k, u32>, Value<'k, i32>),
    ) -> QueryRow<'k> {
        let (k, params) = (self.k, &self.params);
        let (token, in_group) = params.group.divide(packed);
        let token = qo_begin + token;
        let (request, offset) = (k.var::<u32>("request", known.0), k.var::<i32>("offset", known.1));
        let requests = (params.requests, params.num_requests);
        look_up_request(k, requests, (token, known.0), (Some(request), offset));
        QueryRow {
            token,
            qo_head: kv_head * params.group.by + in_group,
            kv_head,
            request: request.get(),
            position: token.reinterpret::<i32>() + offset.get(),
        }
    }

    /// Writes the indices and visible range of row `r` of the block, and resets its state.
    #[track_caller]
    pub(super) fn init_row(&self, r: Value<'k, u32>, row: &QueryRow<'k>) {
        let (k, rows, params) = (self.k, &self.rows, &self.params);
        rows.token.at(r).store(row.token);
        rows.qo_head.at(r).store(row.qo_head);
        rows.request.at(r).store(row.request);
        rows.position.at(r).store(row.position);
        // no limit exceeds all 32-bit positions
        let to_i64 = |x: Value<'k, u32>| x.to_u64().reinterpret::<i64>();
        let position = row.position.to_i64();
        let clamp = |x: Value<'k, i64>| {
            x.max(i64::from(i32::MIN))
                .min(i64::from(i32::MAX))
                .reinterpret::<u64>()
                .low()
                .reinterpret::<i32>()
        };
        rows.low.at(r).store(clamp(position - to_i64(params.left)));
        rows.high.at(r).store(clamp(position + to_i64(params.right) + 1));
        rows.max.at(r).store(k.constant(f32::NEG_INFINITY));
        rows.sum.at(r).store(k.constant(0.0_f32));
    }
}
