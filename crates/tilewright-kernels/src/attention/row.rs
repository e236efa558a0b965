//! A query row of one head: what hooks and masks know of it, in the kernels with tensor cores and in those without.
//!
//! Its request is known of the item, or [looked up](super::items::look_up_request); its position is its number and the request's
//! offset.

use tilewright::attention::variant::Input;
use tilewright_ptx::build::Value;

/// Where a row stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'k> {
    /// Counted over the whole batch.
    pub(super) token: Value<'k, u32>,
    pub(super) qo_head: Value<'k, u32>,
    pub(super) kv_head: Value<'k, u32>,
    pub(super) request: Value<'k, u32>,
    /// In its request.
    pub(super) position: Value<'k, i32>,
}

impl<'k> Row<'k> {
    /// As a hook's input; nothing if it is not the row that decides it.
    #[track_caller]
    pub(super) fn input(&self, input: Input) -> Option<Value<'k, f32>> {
        match input {
            Input::Request => Some(self.request.to_f32()),
            Input::Qo => Some(self.position.to_f32()),
            Input::QoHead => Some(self.qo_head.to_f32()),
            Input::KvHead => Some(self.kv_head.to_f32()),
            _ => None,
        }
    }
}
