//! Attention kernels.

pub mod call;
pub mod divisor;
pub mod items;
pub mod merge;
pub mod plan_device;
pub mod prefill_sm90;
mod row;
pub mod scalar;
pub mod tensor_core;
