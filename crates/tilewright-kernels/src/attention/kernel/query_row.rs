//! A query row of one head: the indices that hooks and masks read, with and without tensor cores.
//!
//! The request is that of the item, or [looked up](crate::attention::items::look_up_request); the position is the row number plus the
//! request's offset.

use tilewright::attention::variant::Input;
use tilewright_ptx::build::Value;

/// Indices of a query row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueryRow<'k> {
    /// Counted over the whole batch.
    pub(crate) token: Value<'k, u32>,
    pub(crate) qo_head: Value<'k, u32>,
    pub(crate) kv_head: Value<'k, u32>,
    pub(crate) request: Value<'k, u32>,
    /// Within its request.
    pub(crate) position: Value<'k, i32>,
}

impl<'k> QueryRow<'k> {
    /// The value of a hook's input; `None` if the input is not a property of the row.
    #[track_caller]
    pub(crate) fn input(&self, input: Input) -> Option<Value<'k, f32>> {
        match input {
            Input::Request => Some(self.request.to_f32()),
            Input::Qo => Some(self.position.to_f32()),
            Input::QoHead => Some(self.qo_head.to_f32()),
            Input::KvHead => Some(self.kv_head.to_f32()),
            _ => None,
        }
    }
}
