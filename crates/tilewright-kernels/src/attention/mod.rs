//! Attention.

pub mod call;
pub mod divisor;
pub mod items;
pub mod merge;
pub mod plan_device;
pub mod prefill_sm90;
pub mod scalar;
pub mod tensor_core;
