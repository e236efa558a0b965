//! Packed query rows: the token and query head of a row, and the indices that hooks and masks read.
//!
//! The rows of a work item are its tokens times the query heads of a group, with the heads of a token adjacent: row `r` is token
//! `qo_begin + r / group` and query head `kv_head * group + r % group`. The request is that of the item, or
//! [looked up](RequestTable::look_up). The position is the token plus the request's offset.

use crate::attention::{AttentionParamRegs, KnownRequest, RequestTable, RowTensorRegs};
use tilewright::attention::variant::Input;
use tilewright_ptx::{Global, Value};

/// A token of the batch, a query head and its KV head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueryHead<'k> {
    /// The token index over the whole batch.
    pub(crate) token: Value<'k, u32>,
    pub(crate) qo_head: Value<'k, u32>,
    pub(crate) kv_head: Value<'k, u32>,
}

impl<'k> QueryHead<'k> {
    /// The head of packed row `row` of an item or a merge.
    #[track_caller]
    pub(crate) fn of_row(
        params: &AttentionParamRegs<'k>,
        qo_begin: Value<'k, u32>,
        kv_head: Value<'k, u32>,
        row: Value<'k, u32>,
    ) -> Self {
        let (token, in_group) = params.group.divide(row);
        let qo_head = kv_head * params.group.by + in_group;
        Self { token: qo_begin + token, qo_head, kv_head }
    }

    /// The offset of the head's row in a tensor, in elements.
    #[track_caller]
    pub(crate) fn offset_in(self, tensor: &RowTensorRegs<'k>) -> Value<'k, u64> {
        self.token.to_u64() * tensor.row + self.qo_head.to_u64() * tensor.head
    }

    /// The LSE of the head's row.
    #[track_caller]
    pub(crate) fn lse_in(self, params: &AttentionParamRegs<'k>) -> Global<'k, f32> {
        params.lse.at_wide(self.token.to_u64() * params.qo_heads.to_u64() + self.qo_head.to_u64())
    }
}

/// Indices of a query row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueryRow<'k> {
    pub(crate) head: QueryHead<'k>,
    pub(crate) request: Value<'k, u32>,
    /// Within its request.
    pub(crate) position: Value<'k, i32>,
}

impl<'k> QueryRow<'k> {
    /// The row of a query head. The lookup of a request that is not known is skipped if `look_up` is false.
    #[track_caller]
    pub(crate) fn new(
        params: &AttentionParamRegs<'k>,
        head: QueryHead<'k>,
        known: KnownRequest<'k>,
        look_up: bool,
    ) -> Self {
        let k = head.token.builder();
        let (request, offset) =
            (k.var::<u32>("request", known.request), k.var::<i32>("offset", known.offset));
        if look_up {
            let requests = RequestTable { rows: params.plan.requests, count: params.plan.num_requests };
            requests.look_up(head.token, known.request, Some(request), offset);
        }
        let position = head.token.reinterpret::<i32>() + offset.get();
        Self { head, request: request.get(), position }
    }

    /// The value of a hook's input; `None` if the input is not a property of the row.
    #[track_caller]
    pub(crate) fn input(&self, input: Input) -> Option<Value<'k, f32>> {
        match input {
            Input::Request => Some(self.request.to_f32()),
            Input::Qo => Some(self.position.to_f32()),
            Input::QoHead => Some(self.head.qo_head.to_f32()),
            Input::KvHead => Some(self.head.kv_head.to_f32()),
            _ => None,
        }
    }
}
